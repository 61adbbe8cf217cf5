"""Triton kernels of the decode step, each beside its eager reference. Needs torch and triton only."""
