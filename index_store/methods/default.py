"""The one place that names the default method: what prefill stores, and servers decode by, unless told otherwise.

A file of its own, so that a command shows its help without loading what computes.
"""

DEFAULT_METHOD = "refined"
"""A key of `index_store.methods.presets.METHODS`."""
