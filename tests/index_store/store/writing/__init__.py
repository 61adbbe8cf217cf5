"""Writers, also those that are killed, and what they change of a context."""
