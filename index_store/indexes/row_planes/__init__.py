"""Exact rows in 8 bits: the coarse copy's 4 bits, and a plane of 4 more."""
