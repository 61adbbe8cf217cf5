"""Coded keys and values, and rows, as tensor cores take them, in the registers of one warp."""
