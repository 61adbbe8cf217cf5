"""What a request gets: tokens by methods, sampling and constraints, and batches of them."""
