"""Kernels that keep rows of host memory in slots on the device, and fetch those that are missing."""
