"""Steps that are launched behind others in flight."""
