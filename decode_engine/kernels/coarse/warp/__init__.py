"""Kernels over coarse copies, of which each program is one warp."""
