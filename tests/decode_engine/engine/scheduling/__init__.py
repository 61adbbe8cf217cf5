"""The engine and its scheduler's turns."""
