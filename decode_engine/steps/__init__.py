"""Decode steps on a GPU: batches of sessions, captured in graphs."""
