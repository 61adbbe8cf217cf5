"""Every key and value in a few bits: a search, and what stands for the keys that were not selected."""
