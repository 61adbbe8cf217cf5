"""Contexts at rest: the catalog, writing, cleaning up, and arrays on disk. Knows nothing of devices or methods."""
