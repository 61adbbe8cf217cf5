"""Indexes: how keys are found. One folder or file per kind, and the registry of all kinds."""
