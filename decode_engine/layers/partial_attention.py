"""Exact attention over a part of the keys, as mergeable states; also where these are in host memory or in two planes.

Rows elsewhere are streamed in blocks, or picked one by one. Those of two planes are decoded where the queries are: a
tensor of all of them is never made.

Shape legend: H KV heads, T query positions, G group heads, R = T * G query rows of a KV head, N keys, n of a block, K
gathered keys per row, d head dim. Queries are float32 and already scaled by 1/sqrt(d); keys and values may be float32,
float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from decode_engine.kernels.slots import slot_cache as gather_rows
from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import HALVES, attend_fused, attend_many, attend_masked, attend_to_themselves
from index_store.indexes.coarse_rows.two_planes import ContextRows, TwoPlanes
from index_store.memory.host_memory import BlockReader, copy_source, is_readable

STREAM_BYTES = 32 * 2**20
"""Of one of the two blocks in device memory that keys and values are streamed through."""


DECODED_BYTES = 16 * 2**20
"""Of a block of two planes in float32 on a CPU: smaller ones cost more launches and merges than caches gain."""


def stream_blocks(rows: ContextRows, device: torch.device) -> Iterator[Tensor]:
    """All rows in order as blocks [H, n, 2, d] on the device, each good until the next one is asked for."""
    if not isinstance(rows, TwoPlanes):
        yield from _stream_blocks(rows, device)
    elif rows.device == device:
        heads, count, two, head_dim = rows.shape
        most = DECODED_BYTES if device.type == "cpu" else STREAM_BYTES
        step = min(count, max(1, most // (4 * heads * two * head_dim)))
        block = torch.empty(heads, step, two, head_dim, device=device)
        for first in range(0, count, step):
            yield rows.decode(first, min(first + step, count), block)
    else:
        first = 0
        for low_Hn2C in _stream_blocks(rows.low_HN2C, device):
            yield rows.refine(first, low_Hn2C)
            first += low_Hn2C.shape[1]


def _stream_blocks(kv_HN2D: Tensor, device: torch.device) -> Iterator[Tensor]:
    heads, count, two, head_dim = kv_HN2D.shape
    row_bytes = heads * two * head_dim * kv_HN2D.element_size()
    rows = min(max(1, STREAM_BYTES // row_bytes), max(count, 1))
    reader = BlockReader((heads, rows, two, head_dim), kv_HN2D.dtype, device)
    starts = range(0, count, rows)
    try:
        reader.start(kv_HN2D[:, start : min(start + rows, count)] for start in starts)
        for _ in starts:
            yield reader.next()
    finally:
        reader.end()


def copy_rows(rows: ContextRows, start: int, end: int, device: torch.device) -> Tensor:
    """A copy of rows start..end-1 on the device, [H, n, 2, d]."""
    if isinstance(rows, TwoPlanes):
        return rows.decode(start, max(start, end))
    return _copy_rows(rows, start, end, device)


def _copy_rows(kv_HN2D: Tensor, start: int, end: int, device: torch.device) -> Tensor:
    heads, _, two, head_dim = kv_HN2D.shape
    out = torch.empty(heads, max(end - start, 0), two, head_dim, dtype=kv_HN2D.dtype, device=device)
    source = copy_source(kv_HN2D, device)
    for head in range(heads):  # in one piece each
        out[head].copy_(source[head, start:end], non_blocking=device.type == "cuda")
    return out


def pick_rows(rows: ContextRows, ids_HTK: Tensor) -> Tensor:
    """Rows [H*T*K, 2*d] at the ids of every head, in the stored dtype or float32, on the ids' device.

    A GPU reads them from host memory itself where it can. Otherwise they are picked where they are, and
    copied once if the ids are elsewhere.
    """
    if not isinstance(rows, TwoPlanes):
        return _pick_rows(rows, ids_HTK)
    heads, _, two, head_dim = rows.shape
    ids_HX = ids_HTK.flatten(1)
    if rows.device == ids_HTK.device:
        return rows.pick(ids_HX).view(-1, two * head_dim)
    low = _pick_rows(rows.low_HN2C, ids_HTK).view(heads, -1, two, head_dim // 2)
    return rows.refine_listed(ids_HX, low).view(-1, two * head_dim)


def _pick_rows(kv_HN2D: Tensor, ids_HTK: Tensor) -> Tensor:
    device = ids_HTK.device
    heads = kv_HN2D.shape[0]
    # Rows between heads; more than N where a buffer has slack.
    stride = kv_HN2D.stride(0) // kv_HN2D.stride(1)
    width = kv_HN2D.shape[2] * kv_HN2D.shape[3]
    row_bytes = width * kv_HN2D.element_size()
    fetched = kv_HN2D.device.type == "cpu" and device.type == "cuda"
    read = fetched and row_bytes >= 16 and row_bytes & (row_bytes - 1) == 0 and is_readable(kv_HN2D)
    place = device if read else kv_HN2D.device
    offsets = (torch.arange(heads, device=place) * stride)[:, None, None]
    rows = (ids_HTK.to(place).long() + offsets).flatten()
    if read:
        return _read_rows(kv_HN2D, rows, width)
    table = kv_HN2D.as_strided(
        ((heads - 1) * stride + kv_HN2D.shape[1], width), (width, 1), kv_HN2D.storage_offset()
    )
    picked = torch.empty(len(rows), width, dtype=kv_HN2D.dtype, device=kv_HN2D.device, pin_memory=fetched)
    torch.index_select(table, 0, rows, out=picked)
    return picked.to(device, non_blocking=fetched)


def _read_rows(kv_HN2D: Tensor, rows_R: Tensor, width: int) -> Tensor:
    """Rows of host memory, by a kernel that reads them from there."""
    out = torch.empty(len(rows_R), width, dtype=kv_HN2D.dtype, device=rows_R.device)
    row_bytes = width * kv_HN2D.element_size()
    gather_rows.copy_rows(rows_R * row_bytes + kv_HN2D.data_ptr(), out)
    return out


BLOCK_BYTES = 4 * 2**20
"""Keys and values converted to float32 at a time. A block of this size stays in the last-level cache and in memory that
the allocator reuses; blocks of tens of MiB are mapped anew on every call, which costs five times the arithmetic."""

FUSED_POSITIONS = 8
"""Query positions from which on a GPU attends by a fused kernel, which splits its work over queries, not over keys."""

FUSED_ROWS = 4
"""Query rows of a KV head that the fused kernel on a CPU gets at least: fewer go through other products there, which
round otherwise. From here on a row's bits do not depend on how many rows there are."""

SPLIT_KEYS = 4096
"""Keys at least that a thread of a CPU attends to, where a KV head's keys are divided among several."""

DEVICE_BLOCK_BYTES = 128 * 2**20
"""The same in device memory, and the logits held at a time there: few launches, whatever N and T are."""


def attend_shared(
    q_HTGD: Tensor, kv_HN2D: Tensor, *, causal: bool, cap: float | None = None
) -> AttentionState:
    """Every query attends to the same N keys [H, N, 2, d]; with `causal`, position t of T to the first N-T+t+1.

    Keys and values are on the queries' device; for others there is `attend_streamed`. Without `causal` a CPU rounds
    queries, weights and out to the dtype of the keys, as its fused kernel does. cap: see `LogitForm`. Returns out
    [H, T, G, d] and lse [H, T, G], float32.
    """
    heads, positions, group, head_dim = q_HTGD.shape
    count = kv_HN2D.shape[1]
    if cap is not None:
        return _attend_capped(q_HTGD, kv_HN2D, causal, cap)
    if not q_HTGD.is_cuda and not causal and count > 0:
        return _attend_on_cpu(q_HTGD, kv_HN2D)
    if q_HTGD.is_cuda and positions >= FUSED_POSITIONS and kv_HN2D.dtype in HALVES and count > 0:
        return _attend_fused(q_HTGD, kv_HN2D, causal)
    step = _keys_at_once(q_HTGD)
    q_HRD = q_HTGD.reshape(heads, positions * group, head_dim)
    state = AttentionState.empty((heads, positions * group), head_dim, q_HTGD.device)
    for start in range(0, count, step):
        block = kv_HN2D[:, start : start + step].float()
        logits = torch.bmm(q_HRD, block[:, :, 0].transpose(1, 2))
        last_visible = count - positions
        if causal and start + block.shape[1] > last_visible + 1:
            keys = torch.arange(start, start + block.shape[1], device=logits.device)
            seen = torch.arange(positions * group, device=logits.device) // group
            limit = last_visible + seen
            logits.masked_fill_(keys[None] > limit[:, None], -torch.inf)
        part = _state(logits, block[:, :, 1])
        state = part if start == 0 else state.merge(part)
    return AttentionState(
        state.out.view(heads, positions, group, head_dim), state.lse.view(heads, positions, group)
    )


def _attend_capped(q_HTGD: Tensor, kv_HN2D: Tensor, causal: bool, cap: float) -> AttentionState:
    """`attend_shared` with capped logits."""
    positions, head_dim = q_HTGD.shape[1], q_HTGD.shape[3]
    count = kv_HN2D.shape[1]
    first = count - positions if causal else count
    state = attend_masked(q_HTGD.transpose(1, 2) * head_dim**0.5, kv_HN2D, first, cap=cap)
    return AttentionState(state.out.transpose(1, 2), state.lse.transpose(1, 2))


def attend_streamed(q_HTGD: Tensor, kv_HN2D: ContextRows, cap: float | None = None) -> AttentionState:
    """`attend_shared` to keys and values in host memory or in two planes: block by block, merged by lse."""
    state = AttentionState.empty(q_HTGD.shape[:-1], q_HTGD.shape[-1], q_HTGD.device)
    for block in stream_blocks(kv_HN2D, q_HTGD.device):
        state = state.merge(attend_shared(q_HTGD, block, causal=False, cap=cap))
    return state


def _attend_on_cpu(q_HTGD: Tensor, kv_HN2D: Tensor) -> AttentionState:
    """`attend_shared` without a mask by torch's fused kernel, over keys and values as they are stored.

    That kernel divides its work by KV heads and blocks of query rows. Where this makes too little for all threads, keys
    are divided as well; how depends on nothing but the number of keys and threads.
    """
    heads, positions, group, head_dim = q_HTGD.shape
    count, rows = kv_HN2D.shape[1], positions * group
    q_HRD = q_HTGD.reshape(heads, rows, head_dim).to(kv_HN2D.dtype)
    q_HRD = torch.nn.functional.pad(q_HRD, (0, 0, 0, max(0, FUSED_ROWS - rows)))
    parts = max(1, min(torch.get_num_threads() // heads, count // SPLIT_KEYS))
    even = count - count % parts
    states = _attend_parts(q_HRD, kv_HN2D[:, :even].view(heads, parts, -1, 2, head_dim))
    if even < count:
        states += _attend_parts(q_HRD, kv_HN2D[:, even:].unsqueeze(1))
    state = reduce(AttentionState.merge, states)
    return AttentionState(
        state.out[:, :rows].reshape(q_HTGD.shape), state.lse[:, :rows].reshape(q_HTGD.shape[:-1])
    )


def _attend_parts(q_HRD: Tensor, kv_HPN2D: Tensor) -> list[AttentionState]:
    """Attention of queries to each of P parts of the keys, all at once: to the kernel they are sequences of a batch."""
    kv_PHN2D = kv_HPN2D.transpose(0, 1)
    q_PHRD = q_HRD.expand(len(kv_PHN2D), -1, -1, -1)
    found = attend_fused(q_PHRD, kv_PHN2D[:, :, :, 0], kv_PHN2D[:, :, :, 1], causal=False, scale=1.0)
    return [AttentionState(out.float(), lse) for out, lse in zip(found.out, found.lse, strict=True)]


def _attend_fused(q_HTGD: Tensor, kv_HN2D: Tensor, causal: bool) -> AttentionState:
    """`attend_shared` on a GPU by torch's fused kernels, in the dtype of keys and values: no logits in memory.

    Queries lose nothing by the conversion: divided by their scale they are what the model made, in that dtype.
    """
    positions, head_dim = q_HTGD.shape[1], q_HTGD.shape[3]
    q = (q_HTGD * head_dim**0.5).to(kv_HN2D.dtype)
    before = kv_HN2D.shape[1] - positions if causal else kv_HN2D.shape[1]
    states = []
    if before > 0:
        states.append(attend_many(q, kv_HN2D[:, :before]))
    if causal:
        own = attend_to_themselves(q.transpose(1, 2), kv_HN2D[:, before:])
        states.append(AttentionState(own.out.transpose(1, 2).float(), own.lse.transpose(1, 2)))
    return states[0] if len(states) == 1 else states[0].merge(states[1])


def _keys_at_once(q_HTGD: Tensor) -> int:
    heads, positions, group, head_dim = q_HTGD.shape
    if q_HTGD.device.type == "cpu":
        return max(1, BLOCK_BYTES // (heads * 2 * head_dim * 4))
    return max(1, DEVICE_BLOCK_BYTES // (heads * max(2 * head_dim, positions * group) * 4))


def attend_logits(logits_HTGK: Tensor, values_HTKD: Tensor) -> AttentionState:
    """State of keys whose logits are known; -inf marks keys that do not count. The logits are overwritten.

    Values belong to all heads of the group. Returns out [H, T, G, d] and lse [H, T, G].
    """
    return _state(logits_HTGK, values_HTKD)


def _state(logits_BRN: Tensor, values_BND: Tensor) -> AttentionState:
    if logits_BRN.shape[-1] == 0:
        return AttentionState.empty(logits_BRN.shape[:-1], values_BND.shape[-1], values_BND.device)
    peak = logits_BRN.amax(-1, keepdim=True)
    # A row without any visible key has peak -inf; subtracting 0 instead keeps it at weight 0, not nan.
    peak = torch.where(torch.isneginf(peak), torch.zeros_like(peak), peak)
    weights = logits_BRN.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, values_BND) / total.clamp(min=torch.finfo(torch.float32).tiny)
    return AttentionState(out, (peak + total.log()).squeeze(-1))
