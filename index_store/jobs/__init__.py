"""Contexts that are to be made: a durable queue of prefill jobs beside the store's contexts, and uploaded documents."""
