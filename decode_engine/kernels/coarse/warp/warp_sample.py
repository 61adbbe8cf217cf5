"""The kernel of `search` that scores a sample of keys, for one warp each (`value_tiles`).

It does what that one does, by the same sample; sums differ by rounding.

Shape legend: as in `coarse.sizes`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels import records
from decode_engine.kernels.coarse.warp.tiles.folding import fold, load_queries, load_steps
from decode_engine.kernels.coarse.warp.tiles.key_tiles import key_of, load_key_words, multiply_keys
from decode_engine.kernels.coarse.warp.tiles.operands import OF_KEYS, OF_ROWS
from decode_engine.kernels.coarse.warp.warp_records import (
    key_pointers,
    let_next_begin,
    number,
    wait_alone,
)
from index_store.indexes.coarse_rows.scalars import row_sizes

_KEYS, _FIRST, _END = (gl.constexpr(field) for field in (records.KEYS, records.FIRST, records.END))
_BLOCK = gl.constexpr(row_sizes.BLOCK)


@gluon.jit
def sample_kernel(
    q_ptr: gl.tensor,
    records_ptr: gl.tensor,
    sampled_ptr: gl.tensor,
    scale_log2: gl.tensor,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    X: gl.constexpr,
    DIM: gl.constexpr,
    KEY_BITS: gl.constexpr,
    TAKEN: gl.constexpr,
    RUNS: gl.constexpr,
    RUN: gl.constexpr,
    CHAINED: gl.constexpr,
) -> None:
    """Program (s, row): RUNS of the TAKEN runs of RUN keys that are sampled, as in `search.sample_kernel`.

    Codes, scales and offsets are on their way before the launch before has ended: no launch of a step writes them.
    """
    row = gl.program_id(1)
    b, head = row // HEADS, row % HEADS
    first = number(records_ptr, b, _FIRST).to(gl.int32)
    end = number(records_ptr, b, _END).to(gl.int32)
    keys = number(records_ptr, b, _KEYS)
    if end > first:
        keys_ptrs = key_pointers(records_ptr, b, head, keys, DIM, KEY_BITS)
        inner = key_of(gl.arange(0, RUN, layout=OF_KEYS), RUN)
        base = first // RUN * RUN
        runs = (end - base + RUN - 1) // RUN
        # All loads come before the first store, or they would wait for it.
        loaded: gl.tensor = ()
        for i in gl.static_range(RUNS):
            turn = gl.program_id(0) * RUNS + i
            stretch = (turn * 64 // TAKEN) * 27 % 64
            moved = (turn.to(gl.int64) * runs // TAKEN).to(gl.int32) + (stretch * (runs // TAKEN) >> 6)
            run = base + gl.where(runs > TAKEN, moved, turn) * RUN
            block = gl.minimum(run, end - 1) // _BLOCK
            # A context's last keys are loaded with some before them, of places that do not count.
            begin = gl.minimum(run, keys.to(gl.int32) - RUN)
            words = load_key_words(keys_ptrs[0], begin, RUN, DIM, KEY_BITS)
            loaded += ((turn, run, begin, load_steps(keys_ptrs, block, DIM, KEY_BITS), words),)
        wait_alone(CHAINED)
        let_next_begin(CHAINED)
        queries, units = load_queries(q_ptr, row, X, GROUP, DIM, KEY_BITS, 1)
        units = units * scale_log2
        n = gl.arange(0, X, layout=OF_ROWS)
        for i in gl.static_range(RUNS):
            turn, run, begin, steps, words = loaded[i]
            folded, steps_units, added = fold(queries, steps, X, DIM, KEY_BITS)
            products = multiply_keys((words,), (folded,), RUN, X, DIM, KEY_BITS)
            key = begin + inner
            there = (key >= gl.maximum(first, run)) & (key < end)
            logits = gl.fma(
                products, gl.expand_dims(steps_units * units, 0), gl.expand_dims(added * units, 0)
            )
            logits = gl.where(gl.expand_dims(there, 1), logits, float("-inf"))
            place = turn * RUN + ((key - run) & (RUN - 1))
            at = gl.expand_dims((row * GROUP + n) * (TAKEN * RUN), 0) + gl.expand_dims(place, 1)
            gl.store(
                sampled_ptr + at, logits, mask=gl.expand_dims(n < GROUP, 0) & gl.expand_dims(key >= 0, 1)
            )
    else:
        wait_alone(CHAINED)
        let_next_begin(CHAINED)
