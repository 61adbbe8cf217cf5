"""Kernels that search product codes."""
