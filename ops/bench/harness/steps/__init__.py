"""Steps and searches that are timed, and sessions for them."""
