"""Processes of a server: one that the user starts, one of the engine, and doors that talk to clients."""
