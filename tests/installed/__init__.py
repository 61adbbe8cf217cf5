"""Commands and the wheel, as they are installed."""
