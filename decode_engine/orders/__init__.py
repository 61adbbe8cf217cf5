"""What doors and engine say to each other: orders, events, and the engine as doors see it. No torch here."""
