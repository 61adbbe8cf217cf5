"""Triton kernels of the decode step, each beside its eager reference. They need torch and triton, and our errors."""
