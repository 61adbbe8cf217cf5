"""Host kernels of a decode step, each beside its eager reference."""
