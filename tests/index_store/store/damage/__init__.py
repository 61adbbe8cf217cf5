"""Files that are wrong, foreign, too large, or out of reach."""
