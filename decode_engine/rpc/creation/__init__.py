"""Contexts that are made on request: orders, the operations that follow them, and a worker of the server's own."""
