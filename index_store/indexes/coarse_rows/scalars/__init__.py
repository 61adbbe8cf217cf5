"""Rows of scalar codes: how they are made and stored, and on a host the compiled loops over them."""
