"""The command `prefill-worker`."""
