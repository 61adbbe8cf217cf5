"""What every index is, and what several of them share: parameters, growing arrays, products of matrices."""
