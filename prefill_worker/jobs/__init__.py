"""One prefill job, from its input to a published and verified context."""
