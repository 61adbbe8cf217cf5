"""Kernels over coarse copies: they score all keys, cut, list the best, and attend to the others."""
