"""Whatever comes in from outside: taken, or refused in a sentence. Never anything else, and nothing is left behind."""
