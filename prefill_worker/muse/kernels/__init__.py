"""Triton kernels of MuSe, each named like the eager reference that it equals."""
