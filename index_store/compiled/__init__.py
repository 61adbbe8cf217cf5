"""Compiled loops at rest: where machine code is kept, and processes that compile before it is needed."""
