"""The engine's half of a server: what orders mean, the memory that they need, and the model that runs them."""
