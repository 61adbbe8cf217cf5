"""What kills a service at random moments, and callers who remember what they were told."""
