"""The attention of a batch of decode steps as one operator, so that the model around it can be compiled.

A compiler sees an operator by its tensors. Everything else that attention needs is found through the number of a live
batch, which travels as a tensor on the CPU: as a plain number it would be compiled in.

Shape legend: B rows, Q query heads, H KV heads, d head dim.
"""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from decode_engine.steps.attention.step_batch import StepBatch

_numbers = count()
_live: WeakValueDictionary[int, StepBatch] = WeakValueDictionary()


def register_batch(batch: StepBatch) -> Tensor:
    """A number for the batch, [] int64 on the CPU, good for as long as the batch lives."""
    number = next(_numbers)
    _live[number] = batch
    return torch.tensor(number)


def live_batch(number: Tensor) -> StepBatch:
    """The batch of that number."""
    return _live[int(number)]


@torch.library.custom_op("sparsekv::attend_step", mutates_args=())
def attend_step(query: Tensor, key: Tensor, value: Tensor, batch: Tensor, layer: int) -> Tensor:
    """Attention [B, 1, Q, d] of one new token per row; its keys and values join the tails.

    query: [B, Q, 1, d]. key, value: [B, H, 1, d]. batch: from `register_batch`. The tails are no tensors that the
    caller sees, so that nothing is declared as mutated; calls stay in order because each layer needs the one before.
    For the same reason the result may be a buffer that the next layer's call writes again.
    """
    rows, query_heads, _, head_dim = query.shape
    heads = key.shape[1]
    grouped = (rows, heads, query_heads // heads, head_dim)
    q_BHGD = query.reshape(grouped).contiguous()
    out = live_batch(batch).attend(layer, q_BHGD, key[:, :, 0], value[:, :, 0])
    return out.reshape(rows, 1, query_heads, head_dim)


@attend_step.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, batch: Tensor, layer: int) -> Tensor:
    rows, query_heads, _, head_dim = query.shape
    return query.new_empty(rows, 1, query_heads, head_dim)
