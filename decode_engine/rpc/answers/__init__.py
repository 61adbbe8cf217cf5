"""Answers at a door: prompts as tokens, what the engine says as text, calls and notices. No wire here, and no torch."""
