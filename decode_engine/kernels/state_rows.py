"""States of a batch's sessions: copied from where each session has them to where layers change them, and back.

A session's block has its states of one layer behind those of another; the batch's has those of all B sessions side by
side, layer by layer, since a layer of the model reads them as one tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.launches import chained, wait_for_launch
from index_store.store.description.context_id import ModelStates
from index_store.store.description.dtypes import dtype_name

_WORD = 2
"""Bytes, of which every element has a multiple."""

_TILE = 4096
"""Words that a program copies."""


@dataclass(frozen=True, slots=True)
class StateChunks:
    """What programs copy of each session.

    chunks_C3: int64 on the device: the first word of a tensor in a session's block, its words, and the first of them
    that the program copies. align: words that all of these are multiples of, at most 16 bytes.
    """

    chunks_C3: Tensor
    align: int

    @classmethod
    def of(cls, model: ModelStates, dtype: torch.dtype, device: torch.device) -> Self:
        """For a model that computes in the dtype."""
        sizes = [
            part.nbytes(dtype_name(dtype)) // len(part.layers) // _WORD
            for part in model.parts
            for _ in part.layers
        ]
        chunks = [
            (start, size, begin)
            for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)
            for begin in range(0, size, _TILE)
        ]
        return cls(torch.tensor(chunks, device=device), math.gcd(16 // _WORD, *sizes))


@triton.jit
def state_copy_kernel(
    addresses_ptr: tl.tensor,
    stride: tl.tensor,
    chunks_ptr: tl.tensor,
    block_ptr: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    BACK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per chunk and session."""
    wait_for_launch(CHAINED)
    chunk_ptr, b = chunks_ptr + tl.program_id(0) * 3, tl.program_id(1).to(tl.int64)
    start, size, begin = tl.load(chunk_ptr), tl.load(chunk_ptr + 1), tl.load(chunk_ptr + 2)
    address = tl.load(addresses_ptr + b * stride)
    i = tl.arange(0, TILE)
    there = i < tl.multiple_of(size - begin, ALIGN)
    text_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16) + tl.multiple_of(
        start + begin, ALIGN
    )
    own_ptr = block_ptr + tl.multiple_of(SIZE * start + b * size + begin, ALIGN)
    seated = there & (address != 0)
    if BACK:
        tl.store(text_ptr + i, tl.load(own_ptr + i, mask=seated), mask=seated)
    else:
        tl.store(own_ptr + i, tl.load(text_ptr + i, mask=seated, other=0), mask=there)


def copy_states(addresses_B: Tensor, block: Tensor, chunks: StateChunks, back: bool) -> None:
    """Copies the states of B sessions, whose blocks are at int64 addresses, 0 of idle rows, into the batch's, or back.

    block: uint8 [B * bytes of a session]. Idle rows become 0 there, and go nowhere.
    """
    size = len(addresses_B)
    state_copy_kernel[(len(chunks.chunks_C3), size)](
        addresses_B,
        addresses_B.stride(0),
        chunks.chunks_C3,
        block.view(torch.int16),
        SIZE=size,
        TILE=_TILE,
        ALIGN=chunks.align,
        BACK=back,
        num_warps=4,
        **chained(block.device),
    )


def copy_states_reference(
    texts: Sequence[Sequence[Tensor] | None], parts: Sequence[Tensor], back: bool
) -> None:
    """The same on tensors: of every session its parts [layers, *shape], of the batch [layers, B, *shape]."""
    for b, own in enumerate(texts):
        for place, rows in enumerate(parts):
            if not back:
                rows[:, b] = 0 if own is None else own[place]
            elif own is not None:
                own[place].copy_(rows[:, b])
