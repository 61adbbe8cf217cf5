"""Kernels over key clusters: lookup, selection, and the remainder."""
