"""Kernels that search query tables and attend to what they find."""
