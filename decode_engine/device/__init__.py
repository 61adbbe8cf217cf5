"""Decode steps on a GPU: batches of sessions, kernels only, captured in graphs."""
