"""What a request may ask for, as servers check it and commands check it before they ask."""

from __future__ import annotations

MAX_NAME_CHARACTERS = 500
MAX_TTL_S = 100 * 365 * 86400
MAX_SEARCH_PERIOD = 64
MAX_TEMPERATURE = 100.0
MAX_INT32 = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKENS = 64
MAX_ANSWERS = 16
MAX_PROMPTS = 128
"""In one request for completions."""
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 4096  # tokens of a prompt
MAX_MAP_EVERY = 1024  # tokens
MAX_PRIORITY = 100
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 300
MAX_CONSTRAINT_BYTES = 2**16
MAX_CHOICES = 1000
MAX_BATCH = 1000  # requests

LONGEST_WAIT_S = 7 * 86_400
"""Seconds that any program waits for anything."""
MAX_REQUEST_BYTES = 8 * 2**20
"""Of one message of a client: a million tokens as text or ids, with room to spare."""
