"""Scores a sample of coarse keys, and finds from which weight on keys are kept.

Keys are ranked as `CoarseRows.rank` ranks them: by the sum over a group's heads of the softmax of the estimated
logits. A second launch finds the softmaxes' normalisers and the cut, with most sums in registers: a warp has a chunk of
the sample, since for numbers of several heads at once Triton chooses layouts of its own, in which they go through
shared memory. The sample is scored as the pass over all keys scores them (`warp_pass`), so that logits which are tied
are tied in both.

Shape legend: as in `coarse.sizes`; C chunks, a warp each, of K x 32 keys.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.attention.online_softmax import LOG2E
from decode_engine.kernels.border import EVERY, NONE, draws_below, halve, sampled_run, store_cut
from decode_engine.kernels.coarse.key_tiles import (
    fold,
    key_of,
    load_key_words,
    load_queries,
    load_steps,
    multiply_keys,
)
from decode_engine.kernels.coarse.registers import OF_KEYS, OF_ROWS
from decode_engine.kernels.coarse.sizes import CHUNKS, CUT_PLACES, RUN, CoarseSizes, CoarseWork
from decode_engine.kernels.coarse.warp_reads import key_pointers
from decode_engine.kernels.launches import chained, let_next_begin, wait_alone
from decode_engine.kernels.record_fields import END, FIRST, KEEP, KEYS, field
from index_store.indexes.coarse_rows.parameters import BLOCK

CUT_REGISTERS = 64
"""Of each thread that finds a cut: programs of the next launch have room beside it."""


def most_runs(head_dim: int, columns: int) -> int:
    """Runs that one warp scores at most: what it loads for them is on its way together."""
    return min(4, 512 // head_dim, 4096 // (columns * head_dim))


def find_cuts(q_BHGD: Tensor, records_BF: Tensor, sizes: CoarseSizes, work: CoarseWork) -> None:
    """Fills normalisers and cuts of `work` for one step's queries; of rows that search nothing they stay as they are.

    q_BHGD: [B, H, G, d] contiguous, unscaled, fp16, bf16 or float32. records_BF: [B, RECORD_FIELDS] int64.
    """
    shape, rows = sizes.shape, q_BHGD.shape[0] * sizes.kv_heads
    taken, runs = shape.samplers * shape.runs, 1
    while runs < most_runs(sizes.head_dim, sizes.columns) and rows * taken > 2 * shape.programs * runs:
        runs *= 2
    sample_kernel[(taken // runs, rows)](
        q_BHGD,
        records_BF,
        work.sampled_RGM,
        sizes.head_dim**-0.5 * LOG2E,
        TAKEN=taken,
        RUNS=runs,
        K=sizes.constants(sizes.key_bits, RUN),
        num_warps=1,
        **chained(q_BHGD.device),
    )
    cut_kernel[(rows,)](
        records_BF,
        work.sampled_RGM,
        work.normalisers_RG,
        work.cuts_RX,
        HEADS=sizes.kv_heads,
        GROUP=sizes.group,
        CHUNKS=CHUNKS,
        SAMPLED=shape.sampled,
        num_warps=CHUNKS,
        maxnreg=CUT_REGISTERS,
        **chained(q_BHGD.device),
    )


HEADS_AT_ONCE = 4
"""Query heads whose sampled logits are in registers together."""

_AT_ONCE = gl.constexpr(HEADS_AT_ONCE)
_BLOCK = gl.constexpr(BLOCK)
_LEAST, _RANGE, _TURNS, _MARGIN = map(gl.constexpr, CUT_PLACES)
_EVERY, _NONE = gl.constexpr(EVERY), gl.constexpr(NONE)


@gluon.jit
def sample_kernel(
    q_ptr: gl.tensor,
    records_ptr: gl.tensor,
    sampled_ptr: gl.tensor,
    scale_log2: gl.tensor,
    K: gl.constexpr,
    TAKEN: gl.constexpr,
    RUNS: gl.constexpr,
    CHAINED: gl.constexpr,
) -> None:
    """Program (s, row): RUNS of the TAKEN runs of T keys that are sampled, evenly spread, or all where they are few.

    Codes, scales and offsets are on their way before the launch before has ended: no launch of a step writes them.
    """
    row = gl.program_id(1)
    b, head = row // K.HEADS, row % K.HEADS
    first = field(records_ptr, b, FIRST).to(gl.int32)
    end = field(records_ptr, b, END).to(gl.int32)
    keys = field(records_ptr, b, KEYS)
    if end > first:
        keys_ptrs = key_pointers(records_ptr, b, head, keys, K)
        inner = key_of(gl.arange(0, K.T, layout=OF_KEYS), K.T)
        base = first // K.T * K.T
        runs = (end - base + K.T - 1) // K.T
        # All loads come before the first store, or they would wait for it.
        loaded: gl.tensor = ()
        for i in gl.static_range(RUNS):
            turn = gl.program_id(0) * RUNS + i
            run = base + sampled_run(turn, TAKEN, runs) * K.T
            block = gl.minimum(run, end - 1) // _BLOCK
            # A context's last keys are loaded with some before them, of places that do not count.
            begin = gl.minimum(run, keys.to(gl.int32) - K.T)
            words = load_key_words(keys_ptrs[0], begin, K)
            loaded += ((turn, run, begin, load_steps(keys_ptrs, block, K), words),)
        wait_alone(CHAINED)
        let_next_begin(CHAINED)
        queries, units = load_queries(q_ptr, row, K)
        units = units * scale_log2
        n = gl.arange(0, K.X, layout=OF_ROWS)
        for i in gl.static_range(RUNS):
            turn, run, begin, steps, words = loaded[i]
            folded, steps_units, added = fold(queries, steps, K)
            products = multiply_keys((words,), (folded,), K)
            key = begin + inner
            there = (key >= gl.maximum(first, run)) & (key < end)
            logits = gl.fma(
                products, gl.expand_dims(steps_units * units, 0), gl.expand_dims(added * units, 0)
            )
            logits = gl.where(gl.expand_dims(there, 1), logits, float("-inf"))
            place = turn * K.T + ((key - run) & (K.T - 1))
            at = gl.expand_dims((row * K.GROUP + n) * (TAKEN * K.T), 0) + gl.expand_dims(place, 1)
            gl.store(
                sampled_ptr + at, logits, mask=gl.expand_dims(n < K.GROUP, 0) & gl.expand_dims(key >= 0, 1)
            )
    else:
        wait_alone(CHAINED)
        let_next_begin(CHAINED)


@gluon.constexpr_function
def sample_layout(K: int, CHUNKS: int) -> gl.BlockedLayout:
    """Of logits [heads at once, K, C, 32]: a warp has a chunk, a lane K neighbours of it for all heads."""
    return gl.BlockedLayout([HEADS_AT_ONCE, K, 1, 1], [1, 1, 1, 32], [1, 1, CHUNKS, 1], [1, 3, 2, 0])


@gluon.jit
def over_keys(numbers: gl.tensor) -> gl.tensor:
    """Sums [heads, C] of numbers [heads, K, C, 32]."""
    return gl.sum(gl.sum(numbers, 1), 2)


@gluon.jit
def over_chunks(counts: gl.tensor) -> gl.tensor:
    """The sum of [K, C, 32] int32, three counts in 10 bits each, as int64 with 20 bits for each.

    A chunk has fewer than 1024 keys.
    """
    chunks = gl.sum(gl.sum(counts, 0), 1)
    spread = (chunks & 0x3FF).to(gl.int64) + (((chunks >> 10) & 0x3FF).to(gl.int64) << 20)
    return gl.sum(spread + ((chunks >> 20).to(gl.int64) << 40), 0)


@gluon.jit
def along(numbers: gl.tensor) -> gl.tensor:
    """[heads, C] as [heads, 1, C, 1]."""
    return gl.expand_dims(gl.expand_dims(numbers, 2), 1)


@gluon.jit
def cut_kernel(
    records_ptr: gl.tensor,
    sampled_ptr: gl.tensor,
    normalisers_ptr: gl.tensor,
    cuts_ptr: gl.tensor,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    CHUNKS: gl.constexpr,
    SAMPLED: gl.constexpr,
    CHAINED: gl.constexpr,
) -> None:
    """Program row, CHUNKS warps: estimates the normalisers from the sampled keys, and what a kept key has to weigh.

    A few keys may hold most of a softmax. So each chunk's largest weight stands for itself alone, and its others for
    the keys that were not sampled.
    The next launch may begin at once, since this one began when all programs of the one before had waited. So what
    came before the sample, such as queries, is there for both.
    """
    K: gl.constexpr = SAMPLED // CHUNKS // 32
    LAYOUT: gl.constexpr = sample_layout(K, CHUNKS)
    OF_KEYS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    OF_CHUNKS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(1, LAYOUT))
    OF_HEADS: gl.constexpr = gl.SliceLayout(1, OF_CHUNKS)
    let_next_begin(CHAINED)
    row = gl.program_id(0)
    b = row // HEADS
    first = field(records_ptr, b, FIRST).to(gl.int32)
    searched = field(records_ptr, b, END).to(gl.int32) - first
    keep = field(records_ptr, b, KEEP).to(gl.int32)
    wait_alone(CHAINED)
    if searched > 0:
        part = gl.arange(0, K, layout=gl.SliceLayout(1, gl.SliceLayout(2, OF_KEYS)))
        chunk = gl.arange(0, CHUNKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, OF_KEYS))) * (
            SAMPLED // CHUNKS
        )
        lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, OF_KEYS))) * K
        place = gl.expand_dims(gl.expand_dims(part, 1), 2) + gl.expand_dims(gl.expand_dims(chunk, 0), 2)
        place += gl.expand_dims(gl.expand_dims(lane, 0), 1)
        total = gl.full([K, CHUNKS, 32], 0.0, gl.float32, layout=OF_KEYS)
        counted = searched * 0
        for some in gl.static_range(0, GROUP, _AT_ONCE):
            g = some + gl.arange(0, _AT_ONCE, layout=OF_HEADS)
            at_head = along(gl.expand_dims(g, 1))
            at = (row * GROUP + at_head) * SAMPLED + gl.expand_dims(place, 0)
            known = at_head < GROUP
            logits = gl.load(sampled_ptr + at, mask=known, other=float("-inf"), cache_modifier=".cg")
            peaks = gl.max(gl.max(logits, 1), 2)
            weights = gl.exp2(logits - along(gl.where(peaks == float("-inf"), 0.0, peaks)))
            there = (gl.max(logits, 0) > float("-inf")).to(gl.int32)
            counted = gl.maximum(counted, gl.sum(gl.sum(gl.sum(there, 0), 1), 0))
            stands_for = searched.to(gl.float32) / gl.maximum(counted, 1).to(gl.float32)
            estimates = gl.maximum(over_keys(weights) - 1.0, 0.0) * stands_for + 1.0
            highest = gl.where(g < GROUP, gl.max(peaks, 1), 0.0)
            sums = gl.sum(estimates * gl.exp2(peaks - gl.expand_dims(highest, 1)), 1)
            normalisers = highest + gl.log2(gl.where(g < GROUP, sums, 1.0))
            gl.store(normalisers_ptr + row * GROUP + g, normalisers, mask=g < GROUP)
            below = gl.where(g < GROUP, normalisers, float("inf"))
            # What a cut may be off by covers that a chunk's weights are scaled instead of taken anew.
            total += gl.sum(weights * along(gl.exp2(peaks - gl.expand_dims(below, 1))), 0)
        store_cut(cuts_ptr + row * 3, cut_of(total.to(gl.int32, bitcast=True), counted, keep, searched))


@gluon.jit
def quarters_reached(held: gl.tensor, place: gl.tensor, width: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """How many of three places so many of some bits [K, C, 32] reach, with three numbers of keys in one sum."""
    bits, wanted = held
    reach = (bits >= place + width).to(gl.int32)
    reach += (bits >= place + 2 * width).to(gl.int32) << 10
    reach += (bits >= place + 3 * width).to(gl.int32) << 20
    reached = over_chunks(reach)
    parts = ((reached & 0xFFFFF).to(gl.float32) >= wanted).to(gl.int32)
    parts += (((reached >> 20) & 0xFFFFF).to(gl.float32) >= wanted).to(gl.int32)
    return parts + ((reached >> 40).to(gl.float32) >= wanted).to(gl.int32)


@gluon.jit
def cut_of(bits: gl.tensor, counted: gl.tensor, keep: gl.tensor, searched: gl.tensor) -> gl.tensor:
    """The cut by the bits [K, C, 32] of sampled keys' weights; around what is found, since these are rounded."""
    wanted = keep.to(gl.float32) * counted.to(gl.float32) / searched.to(gl.float32)
    place = halve(quarters_reached, (bits, wanted), searched * 0 + _LEAST, _RANGE, _TURNS // 2, 4, None)
    lowest = place == _LEAST
    least = gl.where(lowest, _EVERY, place - _MARGIN)
    above = place + ((_RANGE >> _TURNS) + _MARGIN)
    reached = over_chunks((bits >= above).to(gl.int32) + ((bits >= least).to(gl.int32) << 10))
    over = (reached & 0xFFFFF).to(gl.int32)
    inside = gl.where(lowest, counted, (reached >> 20).to(gl.int32)) - over
    draws = draws_below((wanted - over.to(gl.float32)) / gl.maximum(inside, 1).to(gl.float32))
    ends = gl.where(keep >= searched, _EVERY, _NONE)
    some = (keep > 0) & (keep < searched)
    return gl.where(some, least, ends), gl.where(some, above, ends), draws
