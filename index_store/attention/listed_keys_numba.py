"""Exact attention to listed keys on a host, read where and as they are stored: neither gathered nor converted before.

One loop does it for sessions on one context, for positions of one session (`Listed.of_positions`), and for sessions'
own tails behind a context (`Listed.of_tails`). What it finds for one depends on no other.

Shape legend: H KV heads, S sessions, T query positions, G query heads per KV head, K listed keys, N keys of the
context, t keys of the tail, d head dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.rows_in_line_numba import exponentiate, largest
from index_store.attention.vectors.bytes_numba import prefetch
from index_store.attention.vectors.code import (
    FLOAT,
    FLOATS,
    HALF,
    LANES,
    SIZE,
    Rows,
    constants,
    each_reduced,
    each_vector,
    emits,
    gathered,
    plus,
    repeated,
    variable,
)
from index_store.attention.vectors.floats_numba import add_product, widened
from index_store.compiled.launch import (
    F4,
    I2,
    I4,
    I8,
    int16_table,
    launch,
    njit,
    on_host,
    task_loop,
    thread_count,
)

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""What a table's rows hold, which is given as int16."""

_HALVES = ir.VectorType(HALF, LANES)


@emits(types.void, "rows i i rows i i rows i")
def multiply_row(
    builder: Any,
    table: Rows,
    row: Any,
    kind: Any,
    queries: Rows,
    heads: Any,
    vectors: Any,
    out: Rows,
    column: Any,
) -> None:
    """out[h, column] = the product of queries[h] and table[row], so many vectors of both, for h < heads."""

    def multiply(first_head: Any, count: int) -> None:
        totals = [variable(builder, constants(FLOATS, 0.0)) for _ in range(count)]
        with each_vector(builder, vectors) as first:
            taken = _loaded(builder, table, kind, row, first)
            for h, total in enumerate(totals):
                query = queries.load(plus(builder, first_head, h), first, FLOATS)
                builder.store(add_product(builder, taken, query, builder.load(total)), total)
        sums = [builder.load(total) for total in totals]
        sums += sums[-1:] * (4 - count)  # the same order of additions for any number of heads
        lanes = gathered(builder, sums, builder.fadd)
        for h, found in enumerate(each_reduced(builder, lanes, builder.fadd, 4)[:count]):
            out.store(found, plus(builder, first_head, h), column)

    _by_heads(builder, heads, multiply)


@emits(types.void, "rows rows i i i i rows rows i i")
def add_weighted_rows(
    builder: Any,
    table: Rows,
    rows: Rows,
    first_row: Any,
    count: Any,
    kind: Any,
    column: Any,
    weights: Rows,
    out: Rows,
    heads: Any,
    vectors: Any,
) -> None:
    """out[h] += the sum of weights[h, n] * table[rows[0, n]], so many vectors from number `column` on, for `count` rows
    n from first_row on and h < heads. rows: int64.
    """

    def add(first_head: Any, some: int) -> None:
        with each_vector(builder, vectors) as first:
            own = [plus(builder, first_head, h) for h in range(some)]
            totals = [variable(builder, out.load(head, first, FLOATS)) for head in own]
            with cgutils.for_range(builder, count) as loop:
                number = builder.add(first_row, loop.index)
                row = rows.load(SIZE(0), number, SIZE)
                taken = _loaded(builder, table, kind, row, builder.add(column, first))
                for head, total in zip(own, totals, strict=True):
                    weight = repeated(builder, weights.load(head, number, FLOAT))
                    builder.store(add_product(builder, taken, weight, builder.load(total)), total)
            for head, total in zip(own, totals, strict=True):
                out.store(builder.load(total), head, first)

    _by_heads(builder, heads, add)


@emits(types.float32, "w")
def float_of(builder: Any, bits: Any) -> Any:
    """float_of(bits): the float32 number of these 32 bits."""
    return builder.bitcast(bits, FLOAT)


def _by_heads(builder: Any, heads: Any, emit: Callable[[Any, int], None]) -> None:
    """Code for heads by fours, then for two and one of those that are left."""
    with cgutils.for_range(builder, builder.lshr(heads, SIZE(2))) as loop:
        emit(builder.shl(loop.index, SIZE(2)), 4)
    for count in (2, 1):
        with builder.if_then(builder.trunc(builder.lshr(heads, SIZE(count - 1)), ir.IntType(1))):
            emit(builder.and_(heads, SIZE(-2 * count)), count)


def _loaded(builder: Any, table: Rows, kind: Any, row: Any, first: Any) -> Any:
    """16 numbers of a row as floats. Compilers move the question for the kind out of loops."""
    taken = cgutils.alloca_once(builder, FLOATS)
    with builder.if_else(builder.icmp_signed("==", kind, SIZE(BFLOAT16))) as (then, otherwise):
        with then:
            builder.store(widened(builder, table.load(row, first, _HALVES), "bfloat16"), taken)
        with otherwise, builder.if_else(builder.icmp_signed("==", kind, SIZE(FLOAT16))) as (half, whole):
            with half:
                builder.store(widened(builder, table.load(row, first, _HALVES), "float16"), taken)
            with whole:
                builder.store(table.load(row, builder.shl(first, SIZE(1)), FLOATS), taken)
    return builder.load(taken)


_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_ADDED_AT_ONCE = 8  # rows, whose values stay in the first-level cache while channels are added up
_AHEAD = (
    16  # rows asked for before they are read: listed rows lie apart, where processors do not foresee them
)
_LINE = 32  # int16 numbers
_AT_ONCE = 1008
"""Keys whose logits are held: more take new memory in every step. Rows of a power of two would share cache lines."""
_PART = 2048  # keys at least of a part of a context


@dataclass(frozen=True, slots=True)
class Listed:
    """Keys that queries of S sessions attend to: of the context and, from id N on, of each session's tail.

    q_HSGD: float32, scaled. tails: of each, [H, t, 2, d] in the context's dtype; heads may be apart. ids_HSK: int32.
    counts_HS: int32, how many of a row count. sinks: of each, keys from the first one on. begins: of the last ones, all
    from there to the tail's end. They do not overlap. others: a state over other keys, [H, S, G, d], that is merged.
    firsts: of each, where its sinks begin; at 0 without.
    """

    q_HSGD: Tensor
    tails: Sequence[Tensor]
    ids_HSK: Tensor
    counts_HS: Tensor
    sinks: Sequence[int]
    begins: Sequence[int]
    others: AttentionState
    firsts: Sequence[int] = ()

    @classmethod
    def of_positions(
        cls, q_HTGD: Tensor, tail_Ht2D: Tensor, end: int, ids_HTK: Tensor, counts_HT: Tensor
    ) -> Listed:
        """What positions of one session list, and nothing else. end: of all keys."""
        heads, positions, group, head_dim = q_HTGD.shape
        nothing = AttentionState.empty((heads, positions, group), head_dim)
        ids, counts = ids_HTK.to(torch.int32), counts_HT.to(torch.int32)
        return cls(q_HTGD, [tail_Ht2D] * positions, ids, counts, [0] * positions, [end] * positions, nothing)

    @classmethod
    def of_tails(cls, q_HSGD: Tensor, tails: Sequence[Tensor], context: AttentionState, count: int) -> Listed:
        """Sessions' own tails. context: the state over all `count` keys of the context."""
        heads, sessions = q_HSGD.shape[:2]
        ids = torch.zeros(heads, sessions, 0, dtype=torch.int32, device="cpu")
        counts = torch.zeros(heads, sessions, dtype=torch.int32, device="cpu")
        return cls(q_HSGD, tails, ids, counts, [0] * sessions, [count] * sessions, context)

    def of(self, number: int) -> Listed:
        """The same of one session, its list no wider than it has to be."""
        row = slice(number, number + 1)
        counts = self.counts_HS[:, row]
        return Listed(
            self.q_HSGD[:, row],
            self.tails[row],
            self.ids_HSK[:, row, : int(counts.max())],
            counts,
            self.sinks[row],
            self.begins[row],
            self.others.columns(row),
            self.firsts[row],
        )


def attend_context(context_HN2D: Tensor, q_HSGD: Tensor) -> AttentionState:
    """Attention of sessions to all keys of the context, as `attend_listed`: keys are read once for all sessions.

    Where threads cannot share heads evenly, keys are divided as well; how depends on nothing but the number of keys,
    heads and threads.
    """
    (heads, sessions, group, head_dim), count = q_HSGD.shape, context_HN2D.shape[1]
    threads = thread_count()
    parts = max(1, min(threads // math.gcd(heads, threads), count // _PART))
    edges = [count * part // parts for part in range(parts + 1)]
    rows_H1RD = q_HSGD.reshape(heads, 1, sessions * group, head_dim)  # as if of one session
    listed = Listed(
        rows_H1RD.expand(-1, parts, -1, -1),
        [context_HN2D[:, :0]] * parts,
        torch.zeros(heads, parts, 0, dtype=torch.int32, device="cpu"),
        torch.zeros(heads, parts, dtype=torch.int32, device="cpu"),
        [end - first for first, end in itertools.pairwise(edges)],
        [count] * parts,
        AttentionState.empty((heads, parts, sessions * group), head_dim),
        edges[:-1],
    )
    found = attend_listed(context_HN2D, listed)
    state = reduce(AttentionState.merge, [found.columns(slice(part, part + 1)) for part in range(parts)])
    return AttentionState(state.out.view(q_HSGD.shape), state.lse.view(q_HSGD.shape[:-1]))


def attend_context_reference(context_HN2D: Tensor, q_HSGD: Tensor) -> AttentionState:
    """The same over a copy in float32."""
    kv = context_HN2D.float()
    logits = torch.einsum("hsgd,hnd->hsgn", q_HSGD, kv[:, :, 0])
    return AttentionState(logits.softmax(-1) @ kv[:, None, :, 1], logits.logsumexp(-1))


def attend_listed(context_HN2D: Tensor, listed: Listed) -> AttentionState:
    """Attention of sessions on one context to the keys that each lists: out [H, S, G, d] and lse [H, S, G], float32.

    0 and -inf where nothing is listed and nothing was merged. Each gets the bits that it gets alone. Only for rows that
    are `readable`.
    """
    firsts = listed.firsts or [0] * len(listed.tails)
    each_one = zip(listed.tails, firsts, listed.sinks, listed.begins, strict=True)
    numbers = [(*_table(tail), tail.shape[1], *others) for tail, *others in each_one]
    form = torch.contiguous_format
    state = AttentionState(
        listed.others.out.clone(memory_format=form), listed.others.lse.clone(memory_format=form)
    )
    heads, count, _, head_dim = context_HN2D.shape
    always = sum(sinks + max(0, count + tail - begin) for *_, tail, _first, sinks, begin in numbers)
    launch(
        _attend,
        listed.counts_HS.numel(),
        listed.q_HSGD.contiguous().numpy(),
        *_table(context_HN2D),
        count,
        head_dim * context_HN2D.element_size(),
        _KINDS[context_HN2D.dtype],
        np.array(numbers, np.int64),
        listed.ids_HSK.contiguous().numpy(),
        listed.counts_HS.contiguous().numpy(),
        state.out.numpy(),
        state.lse.numpy(),
        work=0.6 * head_dim * (heads * always + int(listed.counts_HS.sum())),
    )
    return state


def readable(queries_HSGD: Tensor, context_HN2D: Tensor, tails: Sequence[Tensor]) -> bool:
    """Whether the loop takes these rows as they are."""
    rows = (context_HN2D, *tails)
    return (
        all(on_host(tensor) for tensor in (queries_HSGD, *rows))
        and context_HN2D.dtype in _KINDS
        and all(each.dtype == context_HN2D.dtype and _is_table(each) for each in rows)
    )


def _table(kv_Hn2D: Tensor) -> tuple[int, int]:
    """Where the first row is, and rows from one head to the next."""
    return kv_Hn2D.data_ptr(), kv_Hn2D.stride(0) // (2 * kv_Hn2D.shape[3])


def _is_table(rows_HN2D: Tensor) -> bool:
    head_dim = rows_HN2D.shape[3]
    return rows_HN2D.stride()[1:] == (2 * head_dim, head_dim, 1) and rows_HN2D.stride(0) % (2 * head_dim) == 0


def attend_listed_reference(context_HN2D: Tensor, listed: Listed) -> AttentionState:
    """The same over gathered copies in float32, session by session."""
    states = []
    for number, tail_Ht2D in enumerate(listed.tails):
        kv = torch.cat([context_HN2D, tail_Ht2D], dim=1).float()
        seen_HN = torch.zeros(kv.shape[:2], dtype=torch.bool)
        first = listed.firsts[number] if listed.firsts else 0
        seen_HN[:, first : first + listed.sinks[number]] = seen_HN[:, listed.begins[number] :] = True
        for head, count in enumerate(listed.counts_HS[:, number]):
            seen_HN[head, listed.ids_HSK[head, number, :count].long()] = True
        logits = torch.einsum("hsgd,hnd->hsgn", listed.q_HSGD[:, number : number + 1], kv[:, :, 0])
        logits.masked_fill_(~seen_HN[:, None, None], -torch.inf)
        weights = logits.softmax(-1).nan_to_num(0.0)
        states.append(AttentionState(weights @ kv[:, None, :, 1], logits.logsumexp(-1)))
    return AttentionState.concatenate(states, dim=1).merge(listed.others)


@task_loop("f4x4 i8 i8 i8 i8 i8 i8x2 i4x3 i4x2 f4x4 f4x3")
def _attend(
    task: int,
    queries: F4,
    address: int,
    head_rows: int,
    context_count: int,
    width: int,
    kind: int,
    numbers: I8,
    ids: I4,
    counts: I4,
    out: F4,
    lse: F4,
) -> None:
    """out, lse: those of the others, and then of all. numbers, of each session: where its tail is, rows there from one
    head to the next, rows of a head, first key, how many from there on, begin of the window."""
    heads, sessions = queries.shape[:2]
    context = int16_table(address, (heads - 1) * head_rows + context_count, width)
    head, s = task // sessions, task % sessions
    tail_address, tail_rows, tail_count, first, sinks, begin = numbers[s]
    tail = int16_table(tail_address, (heads - 1) * tail_rows + tail_count, width)
    own = ids[head, s, : counts[head, s]]
    count = sinks + own.shape[0] + context_count + tail_count - begin
    rows = np.empty(min(count, _AT_ONCE), np.int64)
    for start in range(0, count, _AT_ONCE):
        some = rows[: min(_AT_ONCE, count - start)]
        late = _list_rows(
            own, start, first, sinks, begin, context_count, head * head_rows, head * tail_rows, some
        )
        _attend_rows(queries[head, s], context, tail, kind, late, some, out[head, s], lse[head, s])


@njit(_nrt=False)
def _list_rows(
    ids: I4,
    start: int,
    first: int,
    sinks: int,
    begin: int,
    context_count: int,
    head_begins: int,
    tail_begins: int,
    rows: I8,
) -> int:
    """Fills in the rows of sinks, listed keys and those from `begin` on, from number `start` of all of these: first
    those of the context, which it counts.

    head_begins, tail_begins: where the head's rows are in the context's and in the tail's table.
    """
    early, late = 0, rows.shape[0]
    for i in range(start, start + rows.shape[0]):
        if i < sinks:
            key = np.int64(first + i)
        elif i < sinks + ids.shape[0]:
            key = np.int64(ids[i - sinks])
        else:
            key = np.int64(begin + i - sinks - ids.shape[0])
        if key < context_count:
            rows[early] = head_begins + key
            early += 1
        else:
            late -= 1
            rows[late] = tail_begins + key - context_count
    return early


@njit()
def _attend_rows(
    queries: F4, context: I2, tail: I2, kind: int, late: int, rows: I8, out: F4, lse: F4
) -> None:
    """One head's attention to rows of the context and, from entry `late` on, of the tail, merged into out and lse."""
    group, dim = queries.shape
    count = rows.shape[0]
    logits, listed = np.empty((group, count), np.float32), rows.reshape(1, count)
    padded = (count + LANES - 1) // LANES * LANES
    weights, scratch = np.empty((1, padded), np.float32), np.empty((1, LANES), np.float32)
    _multiply(queries, context, listed, 0, late, kind, logits)
    _multiply(queries, tail, listed, late, count, kind, logits)
    for g in range(group):
        peak = max(largest(logits, g, 0, count), lse[g])
        if peak == -np.inf:
            logits[g] = 0.0
            continue
        total = exponentiate(logits, g, 0, count, peak, scratch, weights)
        others = np.exp(lse[g] - peak)
        lse[g] = peak + np.log(total + others)
        for n in range(count):
            logits[g, n] = weights[0, n] / (total + others)
        for i in range(dim):
            out[g, i] *= others / (total + others)
    _add_up(logits, context, listed, 0, late, kind, out)
    _add_up(logits, tail, listed, late, count, kind, out)


@njit(_nrt=False)
def _multiply(queries: F4, table: I2, rows: I8, first: int, end: int, kind: int, logits: F4) -> None:
    """Logits of entries first..end-1: products of queries with keys."""
    group, dim = queries.shape
    vectors = dim // LANES
    for n in range(first, end):
        if n + _AHEAD < end:
            _ask_for(table, rows[0, n + _AHEAD])
        multiply_row(table, rows[0, n], kind, queries, group, vectors, logits, n)
        for i in range(vectors * LANES, dim):
            number = _number(table, rows[0, n], kind, i)
            for g in range(group):
                logits[g, n] += queries[g, i] * number


@njit(_nrt=False)
def _add_up(weights: F4, table: I2, rows: I8, first: int, end: int, kind: int, out: F4) -> None:
    """Adds the weighted values of entries first..end-1."""
    group, dim = out.shape
    vectors = dim // LANES
    for begin in range(first, end, _ADDED_AT_ONCE):
        some = min(_ADDED_AT_ONCE, end - begin)
        add_weighted_rows(table, rows, begin, some, kind, dim, weights, out, group, vectors)
        for i in range(vectors * LANES, dim):
            for n in range(begin, begin + some):
                number = _number(table, rows[0, n], kind, dim + i)
                for g in range(group):
                    out[g, i] += weights[g, n] * number


@njit(_nrt=False)
def _ask_for(table: I2, row: int) -> None:
    """Has a row's key and value brought into the caches."""
    for at in range(0, table.shape[1], _LINE):
        prefetch(table, row, at)


@njit(_nrt=False)
def _number(table: I2, row: int, kind: int, i: int) -> np.float32:
    if kind == FLOAT32:  # two halves, of which the lower one comes first
        bits = (np.uint32(table[row, 2 * i + 1]) << 16) | (np.uint32(table[row, 2 * i]) & 0xFFFF)
        return float_of(np.uint32(bits))  # type: ignore[no-any-return]
    bits = np.uint32(table[row, i])
    if kind == BFLOAT16:
        return float_of(np.uint32(bits << 16))  # type: ignore[no-any-return]
    number = float_of(np.uint32(((bits & 0x7FFF) << 13) | ((bits & 0x8000) << 16)))
    return number * np.float32(2.0**112)  # type: ignore[no-any-return]  # the exponents' biases are 127 and 15
