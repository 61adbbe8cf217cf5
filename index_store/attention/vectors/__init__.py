"""Innermost parts of compiled loops, written in vectors where compilers do not find them."""
