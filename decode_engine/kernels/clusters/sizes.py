"""Which sizes the kernels over key clusters take."""

from __future__ import annotations

HEAD_DIMS, MAX_GROUP = (64, 128), 8


def refuse_sizes(group: int, head_dim: int) -> str | None:
    """Why kernels cannot do such sizes; None when they can."""
    if 1 <= group <= MAX_GROUP and head_dim in HEAD_DIMS:
        return None
    return (
        f"group {group}, head dimension {head_dim}; the kernels over key clusters take groups of 1 to {MAX_GROUP} and "
        f"dimensions {' and '.join(map(str, HEAD_DIMS))}"
    )
