"""Contexts at rest: manifests, arrays on disk, writing, the catalog. Knows nothing of devices or methods."""
