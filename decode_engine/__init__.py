"""Decodes against stored contexts and serves the result over gRPC."""

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported
