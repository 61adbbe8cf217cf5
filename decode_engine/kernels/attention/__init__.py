"""Kernels that attend: to everything, to lists of keys, and the merge of partial results."""
