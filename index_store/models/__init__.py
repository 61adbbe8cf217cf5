"""Models: found in folders, identified by content, checked, loaded; and the packaged reader."""
