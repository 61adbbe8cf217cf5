"""Product codes: every key as a few bytes that name codewords of its slices."""
