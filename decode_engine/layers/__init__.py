"""The general path: one session's attention, layer by layer, on any device and with any method."""
