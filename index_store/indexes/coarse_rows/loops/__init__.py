"""Compiled loops over the coarse copy on a host: logits of keys, weights, the best keys, sums of values."""
