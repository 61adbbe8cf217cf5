"""Finding the cheapest method and budget that reach a wanted quality on a stored context."""
