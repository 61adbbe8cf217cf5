"""What a context is said to be: its id, its manifest, the arrays that it has, and how they are written as JSON."""
