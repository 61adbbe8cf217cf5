"""Exact attention: partial results that merge by log-sum-exp, and torch's fused kernels that yield them."""
