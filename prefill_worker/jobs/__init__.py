"""One prefill job, from its input to a published context."""
