"""Reads documents with a model once and stores what decoding needs."""

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported
