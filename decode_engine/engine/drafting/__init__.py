"""Drafts: tokens that may follow, from texts read so far or by a method, and how many of them are worth a step."""
