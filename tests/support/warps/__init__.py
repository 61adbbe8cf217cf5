"""Kernels of one warp without a GPU: programs in numpy."""
