"""Exact attention by those of torch's fused kernels that tell the log-sum-exp as well: no logits in memory.

Shape legend: B batch, H KV heads, G query heads per KV head, T queries, N keys, X and Y any division of the queries of
one KV head, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from index_store.attention.attention_state import AttentionState

HALVES = (torch.float16, torch.bfloat16)

_EFFICIENT_ALIGNMENT = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this."""


def attend_to_all(queries_HXYD: Tensor, kv_HN2D: Tensor, *, cudnn: bool = False) -> AttentionState:
    """Attention of every query [H, X, Y, d] to all keys and values [H, N, 2, d] of its KV head.

    Keys and values are converted to the queries' dtype, and logits are scaled by 1/sqrt(d). cudnn: see `attend_fused`.
    Returns out [H, X, Y, d] in the queries' dtype and lse [H, X, Y].
    """
    # The group's heads are just more queries of the one KV head.
    kv = kv_HN2D.to(queries_HXYD.dtype)[None]
    queries = queries_HXYD.flatten(1, 2)[None]
    state = attend_fused(queries, kv[:, :, :, 0], kv[:, :, :, 1], causal=False, cudnn=cudnn)
    return AttentionState(state.out.view(queries_HXYD.shape), state.lse.view(queries_HXYD.shape[:-1]))


def attend_to_themselves(queries_HGTD: Tensor, kv_HT2D: Tensor, *, cudnn: bool = False) -> AttentionState:
    """Causal attention of queries [H, G, T, d] to the keys and values [H, T, 2, d] of the same tokens.

    As `attend_to_all`. Returns out [H, G, T, d] and lse [H, G, T].
    """
    kv = kv_HT2D.to(queries_HGTD.dtype).repeat_interleave(queries_HGTD.shape[1], dim=0)[None]
    queries = queries_HGTD.flatten(0, 1)[None]
    state = attend_fused(queries, kv[:, :, :, 0], kv[:, :, :, 1], causal=True, cudnn=cudnn)
    return AttentionState(state.out.view(queries_HGTD.shape), state.lse.view(queries_HGTD.shape[:-1]))


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    cudnn: bool = False,
) -> AttentionState:
    """Attention of [B, H, T, d] to [B, H, N, d], all of one dtype and device, which choose the kernel.

    causal: query t sees keys 0..t; N is T then. scale: of the logits, 1/sqrt(d) by default. cudnn: by cuDNN's kernel
    where it takes these, which is fast, but prepares long for every length it has not seen. Returns out [B, H, T, d] in
    the queries' dtype and lse [B, H, T].
    """
    aten = torch.ops.aten
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
    elif query.dtype not in HALVES:
        out, lse = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )[:2]
    elif cudnn and cudnn_takes(query, key, value, causal=causal):
        out, lse = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )[:2]
    return AttentionState(out, lse.reshape(*query.shape[:2], -1)[..., : query.shape[2]])


def attend_fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, state: AttentionState, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value of causal `attend_fused` with cuDNN, all [B, H, T, d]; grad: by `out`.

    state: of the whole softmax that these keys are a part of, which yields the part's share of the gradient.
    """
    aten = torch.ops.aten
    tokens, out, lse = query.shape[2], state.out, state.lse
    found: Any
    none = torch.zeros((), dtype=torch.int64, device=query.device)  # the state of a dropout that is not there
    lengths = (None, None, tokens, tokens, 0.0, True)
    if query.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, True, scale=scale
        )
    elif query.dtype not in HALVES:
        lse = torch.nn.functional.pad(lse, (0, -tokens % _EFFICIENT_ALIGNMENT))
        wanted = [True, True, True, False]
        found = aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, None, out, lse, none, none, 0.0, wanted, True, scale=scale
        )[:3]
    elif cudnn_takes(query, key, value, causal=True):
        lse = lse.contiguous()[..., None]
        found = aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, lse, none, none, None, *lengths, scale=scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse.contiguous(), *lengths, none, none, scale=scale
        )
    return found  # type: ignore[no-any-return]


def cudnn_takes(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> bool:
    """Whether there is a kernel of cuDNN's for these, [B, H, T, d] and [B, H, N, d]."""
    if not query.is_cuda or query.dtype not in HALVES:
        return False
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(parameters))


def widen(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [..., d] and values [..., e], all of them max(d, e) wide."""
    missing = value.shape[-1] - key.shape[-1]
    if missing > 0:
        return pad(query, (0, missing)), pad(key, (0, missing)), value
    return query, key, pad(value, (0, -missing)) if missing < 0 else value


def narrow(out: Tensor, width: int) -> Tensor:
    """An attention output [..., d] without what values were filled up with: [..., width]."""
    return out if out.shape[-1] == width else out[..., :width]


_GENERATIONS = (9, 10)
"""Of GPUs for which cuDNN has kernels of its own, as major compute capabilities: those where torch prefers it, too."""

_TILE = 128
"""Query rows that a processor works on at a time."""

_LEAST_ROWS = 1024
"""Of a KV head, from which on arithmetic outweighs copies of the keys and values."""

_LONGEST = 32_768
_BLOCK_BYTES = 128 * 2**20
"""Of the keys and values of a block at most, which is what copies take of the GPU's memory."""


@dataclass(frozen=True, slots=True)
class Division:
    """How attention of many queries is divided into calls of few shapes.

    rows: of each KV head in a pass. longest, shortest: keys of the blocks, powers of two.
    """

    rows: int
    longest: int
    shortest: int

    @staticmethod
    def of(heads: int, row_bytes: int, processors: int) -> Division:
        """For so many KV heads, bytes of a key and its value, and processors.

        A pass is a tile for each processor, as nearly as KV heads divide them: filling it up costs no time.
        """
        longest = min(_LONGEST, _BLOCK_BYTES // (heads * row_bytes))
        longest = max(4 * _TILE, 1 << (longest.bit_length() - 1))
        return Division(_TILE * max(1, processors // heads), longest, longest // 4)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of blocks, descending."""
        return (self.longest, self.longest // 2, self.shortest)

    def pays(self, rows: int, count: int) -> bool:
        """Whether calls of these shapes are faster than one of the flash kernel for so many query rows and keys."""
        return count >= self.shortest and rows >= max(_LEAST_ROWS, 3 * self.rows // 4)

    def blocks(self, count: int) -> Iterator[tuple[int, int]]:
        """First and end of blocks of so many keys; all but the last one are of `lengths`."""
        return divide_past(count, self.longest, self.shortest)


def divide_past(count: int, largest: int, smallest: int) -> Iterator[tuple[int, int]]:
    """First and end of blocks of so many keys: as many of the largest as fit, then halves down to the smallest."""
    start, size = 0, largest
    while start < count:
        while size > smallest and count - start < size:
            size = max(smallest, size // 2)
        end = min(start + size, count)
        yield start, end
        start = end


def attend_many(queries_HXYD: Tensor, kv_HN2D: Tensor) -> AttentionState:
    """`attend_to_all` by whichever kernel is the fastest for so many queries and keys on their device.

    Which one, and so the last bits of the result, depends on shapes, dtypes and the device alone. Returns out float32.
    """
    heads, rows_x, rows_y, _ = queries_HXYD.shape
    division = division_on(kv_HN2D, queries_HXYD.dtype)
    if division is None or not division.pays(rows_x * rows_y, kv_HN2D.shape[1]):
        state = attend_to_all(queries_HXYD, kv_HN2D)
        return AttentionState(state.out.float(), state.lse)
    kv = kv_HN2D.to(queries_HXYD.dtype)
    state = attend_divided(queries_HXYD.reshape(heads, rows_x * rows_y, -1), kv, division)
    return AttentionState(state.out.reshape(queries_HXYD.shape), state.lse.reshape(queries_HXYD.shape[:-1]))


def division_on(kv_HN2D: Tensor, dtype: torch.dtype) -> Division | None:
    """How attention in this dtype to such keys and values is divided on their device; None where cuDNN is no gain."""
    if not kv_HN2D.is_cuda or dtype not in HALVES:
        return None
    device = torch.cuda.get_device_properties(kv_HN2D.device)
    heads, _, _, head_dim = kv_HN2D.shape
    sample = kv_HN2D.new_empty((1, 1, _TILE, head_dim), dtype=dtype)
    if device.major not in _GENERATIONS or not cudnn_takes(sample, sample, sample, causal=False):
        return None
    return Division.of(heads, 2 * head_dim * dtype.itemsize, device.multi_processor_count)


def attend_divided(queries_HRD: Tensor, kv_HN2D: Tensor, division: Division) -> AttentionState:
    """Attention of queries [H, R, d] to all keys and values [H, N, 2, d] of their dtype, N > 0, in calls of few shapes.

    Logits are scaled by 1/sqrt(d). Returns out [H, R, d] and lse [H, R], float32.
    """
    heads, rows, head_dim = queries_HRD.shape
    passes = -(-rows // division.rows)
    filled = pad(queries_HRD, (0, 0, 0, passes * division.rows - rows))
    queries_PHRD = _together(filled.view(heads, passes, division.rows, head_dim).transpose(0, 1))
    states: list[AttentionState] = []
    for start, end in division.blocks(kv_HN2D.shape[1]):
        block = kv_HN2D[:, start:end]
        known = end - start in division.lengths
        if known:
            block = _together(block)
        key, value = block[None, :, :, 0], block[None, :, :, 1]
        for number, queries in enumerate(queries_PHRD):
            part = attend_fused(queries[None], key, value, causal=False, cudnn=known)
            part = AttentionState(part.out[0], part.lse[0])
            if start == 0:
                states.append(AttentionState(part.out.float(), part.lse))
            else:
                states[number] = states[number].merge_(part)
    return AttentionState.concatenate(states, dim=1).columns(slice(rows))


def prepare_many(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Has the calling thread's cuDNN prepare everything that `attend_many` gives it for such keys and values.

    Returns how many calls that took.
    """
    division = division_on(torch.empty(heads, 0, 2, head_dim, dtype=dtype, device=device), dtype)
    if division is None:
        return 0
    kv = torch.zeros(heads, division.longest, 2, head_dim, dtype=dtype, device=device)
    queries = torch.zeros(heads, division.rows, head_dim, dtype=dtype, device=device)
    for length in division.lengths:
        attend_divided(queries, kv[:, :length], division)
    return len(division.lengths)


def _together(tensor: Tensor) -> Tensor:
    """The same numbers in one piece of memory, with the strides of one: also where a dimension of size 1 had others."""
    return tensor.contiguous().flatten().view(tensor.shape)


_LOGIT_BYTES = 64 * 2**20  # of eager attention, at a time


def attend_recent(
    queries_HGTD: Tensor,
    kv_HS2D: Tensor,
    window: int,
    position: int,
    *,
    chunked: bool = False,
    cap: float | None = None,
) -> AttentionState:
    """Attention of the last T of S tokens, the first of which is at `position`, to those that a layer lets them see.

    chunked: the keys of a query's own chunk, which begin at multiples of the window; by default the last ones. cap: of
    the logits. Otherwise as `attend_window`.
    """
    count, keys = queries_HGTD.shape[2], kv_HS2D.shape[1]
    before = keys - count
    if not chunked:
        if cap is not None:
            return attend_masked(queries_HGTD, kv_HS2D, before, window, cap)
        return attend_window(queries_HGTD, kv_HS2D, window)
    parts, first = [], 0
    while first < count:
        start = (position + first) // window * window - position  # of the chunk, by the first of the queries
        end = min(count, start + window)
        rows = kv_HS2D[:, max(0, before + start) : before + end]
        # Within a chunk the window ends nothing.
        own = attend_recent(queries_HGTD[:, :, first:end], rows, window, position + first, cap=cap)
        parts.append(own)
        first = end
    return AttentionState.concatenate(parts, dim=2)


def attend_window(queries_HGTD: Tensor, kv_HS2D: Tensor, window: int) -> AttentionState:
    """Attention of the last T of S tokens to those up to themselves, each to `window` keys at most, its own included.

    kv_HS2D: keys and values of the S tokens, in any float dtype; where S - T < window - 1 there are no earlier ones.
    Logits are scaled by 1/sqrt(d). Returns out [H, G, T, d] float32 and lse [H, G, T].
    """
    count = queries_HGTD.shape[2]
    before = kv_HS2D.shape[1] - count
    whole = min(count, max(0, window - before))  # queries that see everything from the first key on
    parts = []
    if whole:
        own = kv_HS2D[:, : before + whole]
        parts.append(_attend_block(queries_HGTD[:, :, :whole], own, before + whole))
    for first in range(whole, count, window):
        end = min(first + window, count)
        oldest = before + first - window + 1
        parts.append(_attend_block(queries_HGTD[:, :, first:end], kv_HS2D[:, oldest : before + end], window))
    return AttentionState.concatenate(parts, dim=2)


def _attend_block(queries_HGnD: Tensor, kv_HS2D: Tensor, window: int) -> AttentionState:
    """The same for n <= window queries, the first of which sees from the first key on."""
    count, keys = queries_HGnD.shape[2], kv_HS2D.shape[1]
    own = attend_to_themselves(queries_HGnD, kv_HS2D[:, keys - count :])
    state = AttentionState(own.out.float(), own.lse.float())
    oldest = max(0, keys - window)  # keys that not all of the queries see
    if oldest < keys - count:
        state = state.merge_(attend_to_all(queries_HGnD, kv_HS2D[:, oldest : keys - count]))
    if oldest:
        edge = attend_to_themselves(queries_HGnD[:, :, :oldest].flip(2), kv_HS2D[:, :oldest].flip(1))
        seeing = AttentionState(state.out[:, :, :oldest], state.lse[:, :, :oldest])
        merged = seeing.merge(AttentionState(edge.out.flip(2).float(), edge.lse.flip(2).float()))
        rest = AttentionState(state.out[:, :, oldest:], state.lse[:, :, oldest:])
        state = AttentionState.concatenate([merged, rest], dim=2)
    return state


def attend_masked(
    queries_HGTD: Tensor, kv_HS2D: Tensor, first: int, window: int | None = None, cap: float | None = None
) -> AttentionState:
    """Attention of T queries to keys of which query t sees those from first + t - window + 1 to first + t.

    Eager, in float32 and in blocks of keys: for capped logits, which no fused kernel has, and to compare with. cap: see
    `LogitForm`. As `attend_window` otherwise; a query that sees no key gets out 0 and lse -inf.
    """
    heads, group, count, head_dim = queries_HGTD.shape
    queries = queries_HGTD.float().flatten(1, 2) * head_dim**-0.5
    places_X = torch.arange(count, device=queries.device).repeat(group) + first
    step = max(1, _LOGIT_BYTES // (4 * heads * group * count))
    state = AttentionState.empty((heads, group * count), head_dim, queries.device)
    for start in range(0, kv_HS2D.shape[1], step):
        keys, values = kv_HS2D[:, start : start + step].float().unbind(2)
        logits = torch.bmm(queries, keys.transpose(1, 2))
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)
        ages = places_X[:, None] - torch.arange(start, start + keys.shape[1], device=queries.device)
        logits.masked_fill_((ages < 0) if window is None else (ages < 0) | (ages >= window), -torch.inf)
        peak = logits.amax(-1, keepdim=True)
        peak = torch.where(torch.isneginf(peak), 0.0, peak)
        weights = logits.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        out = torch.bmm(weights, values) / total.clamp(min=torch.finfo(torch.float32).tiny)
        state = state.merge(AttentionState(out, (peak + total.log()).squeeze(-1)))
    return AttentionState(state.out.view(queries_HGTD.shape), state.lse.view(heads, group, count))
