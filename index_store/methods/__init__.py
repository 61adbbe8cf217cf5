"""Methods: triples of index, budget and remainder, their options, and what they need of a context."""
