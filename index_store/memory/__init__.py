"""Contexts in memory: devices and placements, loading, and the arena that requests share."""
