"""Exact attention to listed keys on a host, read where and as they are stored: no copies of rows, and one softmax.

And logits of listed keys, taken out of those that something else attends to.

A session's result depends on nothing but its own queries and keys.

Shape legend: H KV heads, G query heads per KV head, K listed keys, N keys of the context, t keys of the tail, d head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.exponentials_numba import exponentiate, largest
from index_store.attention.vectors.bytes_numba import prefetch
from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import add_weighted, dot, make_widening
from index_store.launch import int16_table, launch, njit, prange

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_AHEAD = 8  # rows asked for before they are read: listed rows lie apart, where processors do not foresee them
_LINE = 32  # int16 numbers
_widen_bfloats, _widen_halves = make_widening("bfloat16"), make_widening("float16")


@dataclass(frozen=True, slots=True)
class Listed:
    """Keys that a session's queries attend to: of the context and, from id N on, of its tail.

    q_HGD: float32, scaled. tail_Ht2D: in the context's dtype; heads may be apart. ids_HK: int32, listed keys. counts_H:
    int32, how many of a row count. sinks: keys from the first one on. begin: of the last ones, all from there to the
    tail's end. They do not overlap. others: a state over other keys, [H, G, d] and [H, G], that is merged with it.
    """

    q_HGD: Tensor
    tail_Ht2D: Tensor
    ids_HK: Tensor
    counts_H: Tensor
    sinks: int
    begin: int
    others: AttentionState | None = None


def attend_listed(context_HN2D: Tensor, listed: Sequence[Listed]) -> list[AttentionState]:
    """Attention of sessions on one context to the keys that each lists: out [H, G, d] and lse [H, G], float32.

    Each gets the bits that it gets alone.
    """
    heads, count, _, head_dim = context_HN2D.shape
    width = 2 * head_dim * context_HN2D.element_size() // 2
    queries = torch.stack([each.q_HGD for each in listed])
    state = AttentionState.empty(queries.shape[:-1], head_dim)
    for own, lse, each in zip(state.out, state.lse, listed, strict=True):
        if each.others is not None:
            own.copy_(each.others.out)
            lse.copy_(each.others.lse)
    ids = np.zeros((len(listed), heads, max(each.ids_HK.shape[1] for each in listed)), np.int32)
    counts = np.empty((len(listed), heads), np.int32)
    for number, each in enumerate(listed):
        ids[number, :, : each.ids_HK.shape[1]] = each.ids_HK.numpy()
        counts[number] = each.counts_H.numpy()
    numbers = [(*_table(each.tail_Ht2D), each.tail_Ht2D.shape[1], each.sinks, each.begin) for each in listed]
    launch(
        _attend_listed,
        queries.numpy(),
        *_table(context_HN2D),
        count,
        width,
        _KINDS[context_HN2D.dtype],
        np.array(numbers, np.int64),
        ids,
        counts,
        state.out.numpy(),
        state.lse.numpy(),
    )
    return [AttentionState(out, lse) for out, lse in zip(state.out, state.lse, strict=True)]


def _table(kv_Hn2D: Tensor) -> tuple[int, int]:
    """Where the first row is, and rows from one head to the next."""
    return kv_Hn2D.data_ptr(), kv_Hn2D.stride(0) // (2 * kv_Hn2D.shape[3])


def attend_listed_reference(context_HN2D: Tensor, keys: Listed) -> AttentionState:
    """The same for one session, over gathered copies in float32."""
    q_HGD = keys.q_HGD
    kv = torch.cat([context_HN2D, keys.tail_Ht2D], dim=1).float()
    count = kv.shape[1]
    seen_HN = torch.zeros(kv.shape[:2], dtype=torch.bool)
    seen_HN[:, : keys.sinks] = seen_HN[:, keys.begin :] = True
    for head, (ids, some) in enumerate(zip(keys.ids_HK, keys.counts_H.tolist(), strict=True)):
        seen_HN[head, ids[:some].long()] = True
    logits = torch.einsum("hgd,hnd->hgn", q_HGD, kv[:, :, 0])
    logits = logits.masked_fill_(~seen_HN[:, None].expand(-1, q_HGD.shape[1], count), -torch.inf)
    state = AttentionState(logits.softmax(-1) @ kv[:, :, 1], logits.logsumexp(-1))
    return state if keys.others is None else state.merge(keys.others)


def leave_out(logits_HTGX: Tensor, columns_HTK: Tensor, counted_HTK: Tensor) -> None:
    """Writes -inf to those columns that count, of every head and position, and that there are.

    columns_HTK: int32, may be outside. counted_HTK: bool.
    """
    _leave_out(logits_HTGX.numpy(), columns_HTK.contiguous().numpy(), counted_HTK.contiguous().numpy())


def leave_out_reference(logits_HTGX: Tensor, columns_HTK: Tensor, counted_HTK: Tensor) -> None:
    """The same in a tensor, on any device."""
    inside = counted_HTK & (columns_HTK >= 0) & (columns_HTK < logits_HTGX.shape[-1])
    head, position, entry = inside.nonzero(as_tuple=True)
    columns = columns_HTK[head, position, entry].long()
    logits_HTGX.transpose(2, 3)[head, position, columns] = -torch.inf


@njit(cache=True, nogil=True)
def _leave_out(
    logits: NDArray[np.float32], columns: NDArray[np.int32], counted: NDArray[np.bool_]
) -> None:  # pragma: no cover - compiled
    heads, positions, group, count = logits.shape
    for head in range(heads):
        for position in range(positions):
            for g in range(group):
                for k in range(columns.shape[2]):
                    column = columns[head, position, k]
                    if counted[head, position, k] and 0 <= column < count:
                        logits[head, position, g, column] = -np.inf


@njit(cache=True, nogil=True, parallel=True)
def _attend_listed(
    queries: NDArray[np.float32],
    address: int,
    head_rows: int,
    context_count: int,
    width: int,
    kind: int,
    numbers: NDArray[np.int64],
    ids: NDArray[np.int32],
    counts: NDArray[np.int32],
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """out, lse: those of the others, and then of all. numbers: what differs by session, as `attend_listed` says."""
    sessions, heads = queries.shape[:2]
    context = int16_table(address, (heads - 1) * head_rows + context_count, width)
    for task in prange(sessions * heads):
        s, head = task // heads, task % heads
        tail_address, tail_rows, tail_count, sinks, begin = numbers[s]
        tail = int16_table(tail_address, (heads - 1) * tail_rows + tail_count, width)
        last, listed = context_count + tail_count, counts[s, head]
        # Ids ascend, and where some are of the tail, `begin` is, too: so rows of the context come first.
        rows = np.empty(sinks + listed + last - begin, np.int64)
        for i in range(sinks):
            rows[i] = i
        for i in range(listed):
            rows[sinks + i] = ids[s, head, i]
        for i in range(begin, last):
            rows[sinks + listed + i - begin] = i
        late = np.int64(0)  # a literal would have what follows compiled for it, too
        for i in range(rows.shape[0]):
            late += int(rows[i] < context_count)
            rows[i] += head * head_rows if rows[i] < context_count else head * tail_rows - context_count
        _attend_rows(queries[s, head], context, tail, kind, late, rows, out[s, head], lse[s, head])


@njit(cache=True, nogil=True)
def _attend_rows(
    queries: NDArray[np.float32],
    context: NDArray[np.int16],
    tail: NDArray[np.int16],
    kind: int,
    late: int,
    rows: NDArray[np.int64],
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """One head's attention to rows of the context and, from entry `late` on, of the tail, merged into out and lse."""
    group, dim = queries.shape
    count = rows.shape[0]
    words, logits = np.empty((1, dim), np.uint32), np.empty((group, count), np.float32)
    row = words.view(np.float32)
    padded = (count + LANES - 1) // LANES * LANES
    weights, scratch = np.empty((1, padded), np.float32), np.empty((1, LANES), np.float32)
    _multiply(queries, context, rows, 0, late, kind, words, row, logits)
    _multiply(queries, tail, rows, late, count, kind, words, row, logits)
    for g in range(group):
        peak = max(largest(logits, g, 0, count), lse[g])
        total = exponentiate(logits, g, 0, count, peak, scratch, weights)
        others = np.exp(lse[g] - peak)
        lse[g] = peak + np.log(total + others)
        for n in range(count):
            logits[g, n] = weights[0, n] / (total + others)
        for i in range(dim):
            out[g, i] *= others / (total + others)
    _add_up(logits, context, rows, 0, late, kind, words, row, out)
    _add_up(logits, tail, rows, late, count, kind, words, row, out)


@njit(cache=True, nogil=True, _nrt=False)
def _multiply(
    queries: NDArray[np.float32],
    table: NDArray[np.int16],
    rows: NDArray[np.int64],
    first: int,
    end: int,
    kind: int,
    words: NDArray[np.uint32],
    row: NDArray[np.float32],
    logits: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Logits of entries first..end-1: products of queries with keys. words: scratch, and row the same as float32."""
    vectors = row.shape[1] // LANES
    for n in range(first, end):
        if n + _AHEAD < end:
            _ask_for(table, rows[n + _AHEAD])
        _read_row(table, rows[n], kind, 0, words, row)
        for g in range(queries.shape[0]):
            total = dot(queries, g, 0, row, 0, 0, vectors)
            for i in range(vectors * LANES, row.shape[1]):
                total += queries[g, i] * row[0, i]
            logits[g, n] = total


@njit(cache=True, nogil=True, _nrt=False)
def _add_up(
    weights: NDArray[np.float32],
    table: NDArray[np.int16],
    rows: NDArray[np.int64],
    first: int,
    end: int,
    kind: int,
    words: NDArray[np.uint32],
    row: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Adds the weighted values of entries first..end-1."""
    vectors = row.shape[1] // LANES
    for n in range(first, end):
        _read_row(table, rows[n], kind, row.shape[1], words, row)
        for g in range(out.shape[0]):
            add_weighted(weights[g, n], row, 0, 0, out, g, vectors)
            for i in range(vectors * LANES, row.shape[1]):
                out[g, i] += weights[g, n] * row[0, i]


@njit(cache=True, nogil=True, _nrt=False)
def _ask_for(table: NDArray[np.int16], row: int) -> None:  # pragma: no cover - compiled
    """Has a row's key and value brought into the caches."""
    for at in range(0, table.shape[1], _LINE):
        prefetch(table, row, at)


@njit(cache=True, nogil=True, _nrt=False)
def _read_row(
    table: NDArray[np.int16],
    number: int,
    kind: int,
    first: int,
    words: NDArray[np.uint32],
    row: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """words = the bits in float32 of as many numbers from `first` on of a row of the table."""
    count = row.shape[1]
    if kind == 0:  # two halves of every number; the lower one comes first
        numbers = table[number, 2 * first : 2 * (first + count)]
        for i in range(count):
            words[0, i] = (np.uint32(numbers[2 * i + 1]) << 16) | (np.uint32(numbers[2 * i]) & 0xFFFF)
        return
    vectors = count // LANES
    if kind == 1:
        _widen_bfloats(table, number, first, row, 0, 0, vectors)
    else:
        _widen_halves(table, number, first, row, 0, 0, vectors)
    for i in range(vectors * LANES, count):
        bits = np.uint32(table[number, first + i])
        if kind == 1:
            words[0, i] = bits << 16
        else:
            words[0, i] = ((bits & 0x7FFF) << 13) | ((bits & 0x8000) << 16)
            row[0, i] *= np.float32(2.0**112)  # the exponents' biases are 127 and 15
