"""What captured steps do in each layer: one class per kind of method and placement."""
