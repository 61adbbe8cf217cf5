"""How much memory a request may come to hold, estimated before it is admitted, and how much there is for all.

A session holds its tail in every layer, and what it appends to the indexes in layers that search. Both grow by
doubling, and so does the estimate, which is for the whole prompt and for all tokens that the request allows, of which
fewer may be generated: a session never holds more than was estimated. What one step computes with and gives back at
once is not in it.
"""

from __future__ import annotations

from bisect import bisect_right

import torch

from decode_engine.layers.dense_layer import Tail
from index_store.indexes.interface.index_kind import Growth
from index_store.methods.method import FittedMethod
from index_store.store.description.dtypes import stored_dtype

SHARE = 4
"""Sessions may hold one part in this many of the memory that is free when the model has been loaded."""


def session_bytes(fitted: FittedMethod, tokens: int) -> int:
    """Bytes that a session of the method over its context may come to hold when it adds `tokens`."""
    model = fitted.manifest.model
    dtype = stored_dtype(fitted.manifest.dtype).torch_dtype
    total = len(model.full_layers) * _tail_bytes(model.kv_heads, model.head_dim, dtype, tokens)
    if model.window is not None:
        own = model.window
        total += len(own.layers) * _tail_bytes(own.kv_heads, own.head_dim, dtype, tokens)
    if model.states is not None:
        total += 2 * model.states.nbytes(
            "float32"
        )  # the widest; a GPU writes the next ones beside those it reads
    searched = fitted.drafting or fitted
    growth = _growth(searched, tokens)
    for spec in (searched.method.index, searched.partition):
        if spec is not None and searched.searching:
            appended = spec.built.appended_bytes(model.head_dim, growth)
            total += len(searched.searching) * model.kv_heads * appended
    return total


def fitting_tokens(
    fitted: FittedMethod, before: int, least: int, most: int, room: int | None
) -> tuple[int, int]:
    """How many tokens, `least` to `most`, a session may add after `before` within `room` bytes, and its bytes then.

    `least` where fewer would fit. room: None has no bound.
    """
    needed = session_bytes(fitted, before + most)
    if room is None or needed <= room or least >= most:
        return most, needed
    numbers = range(least, most)
    fit = bisect_right(numbers, room, key=lambda tokens: session_bytes(fitted, before + tokens))
    tokens = numbers[max(0, fit - 1)]
    return tokens, session_bytes(fitted, before + tokens)


def _growth(fitted: FittedMethod, tokens: int) -> Growth:
    """What has left the recent window when all tokens were added, and where it is cut into appends."""
    keys = fitted.manifest.token_count
    _, end = fitted.method.searched_range(keys + tokens - 1, keys)
    return Growth(keys, max(0, end - keys), fitted.method.append_block)


def _tail_bytes(heads: int, head_dim: int, dtype: torch.dtype, tokens: int) -> int:
    tail = Tail(heads, head_dim, dtype, device="meta")
    while tail.capacity < tokens:
        tail.reserve(tail.capacity + 1)
    return tail.nbytes
