"""Commands that serve, and make the tokens that let callers in."""
