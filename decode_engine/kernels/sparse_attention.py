"""Attention to listed keys: flash-decoding over ragged lists, and over the keys that are always attended.

A row's segments count as one list, which a fixed number of programs
share tile by tile; the same programs, counted from the last, share the sinks, the recent window and the tail. So no
head waits for the longest list. The query heads of a group share a tile, so every key and value is read once. Partial
results are merged by one more launch (`partials`). Counts stay on the device: programs without keys end at once.

Keys that a remainder's clusters hold leave them here: the weight that the cluster's mean gave them is taken away from
their own (`MONOPOLE`), or their logits are summed up for a launch that does it later (`SUMS`).

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, P segments of a row, W keys that a segment has
room for, S slots, C clusters, X programs that attend to lists, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.cluster_tables import ClusterScores
from decode_engine.kernels.key_lists import KeyLists
from decode_engine.kernels.key_values import check_queries
from decode_engine.kernels.partials import LOG2E, Partials, chained, wait_for_launch
from decode_engine.kernels.records import (
    ASSIGNMENT,
    END,
    FIRST,
    KEYS,
    KV,
    TAIL,
    TAIL_KEYS,
    field,
)
from index_store.errors import InvalidArgumentError

_KV = tl.constexpr(KV)
_TAIL = tl.constexpr(TAIL)
_KEYS = tl.constexpr(KEYS)
_FIRST = tl.constexpr(FIRST)
_END = tl.constexpr(END)
_TAIL_KEYS = tl.constexpr(TAIL_KEYS)
_ASSIGNMENT = tl.constexpr(ASSIGNMENT)

NOTHING, MONOPOLE, SUMS = 0, 1, 2
"""What is taken out of clusters."""
_MONOPOLE = tl.constexpr(MONOPOLE)
_SUMS = tl.constexpr(SUMS)
_TILE = 64


_PROGRAMS = 1536
"""Of all rows together: whole rounds of what a large device holds at a time."""


def list_programs(rows: int, lists: KeyLists) -> int:
    """Programs of a row, and slots that they fill."""
    _, segments, width = lists.ids_RPW.shape
    return max(2, min(128, _PROGRAMS // rows, -(-segments * width // _TILE) + 4))


@dataclass(frozen=True, slots=True)
class TakeOut:
    """Clusters that attended keys leave, scored by a lookup; `mode` is MONOPOLE or SUMS."""

    scores: ClusterScores
    mode: int


def attend_lists(
    q_RGD: Tensor,
    records_BF: Tensor,
    lists: KeyLists,
    partials: Partials,
    scale: float,
    *,
    first_slot: int = 0,
    kept_RX: Tensor | None = None,
    take_out: TakeOut | None = None,
) -> int:
    """Attention to listed keys, sinks, recent window and tail, into slots from first_slot on; returns their number.

    q_RGD: [R, G, d] in the dtype of the keys, contiguous; G 1..8, d 64 or 128. scale: of the logits, 1/sqrt(d).
    kept_RX: [R, X] int32, set to how many listed keys each of the `list_programs` attended.
    Raises InvalidArgumentError for shapes and dtypes that do not fit.
    """
    rows, group, head_dim = q_RGD.shape
    check_queries(q_RGD, len(records_BF))
    if len(lists.ids_RPW) != rows:
        raise InvalidArgumentError(
            f"lists of keys have shape {tuple(lists.ids_RPW.shape)}, expected [{rows}, any, any]"
        )
    programs = list_programs(rows, lists)
    scores = None if take_out is None else take_out.scores
    attend_kernel[(programs, rows)](
        q_RGD,
        records_BF,
        lists.ids_RPW,
        lists.counts_RP,
        None if scores is None else scores.logits_RCG,
        None if scores is None else scores.taken_RC,
        None if scores is None else scores.taken_logits_RCG,
        kept_RX,
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        lists.ids_RPW.shape[2],
        0 if scores is None else scores.logits_RCG.shape[1],
        partials.peaks_RSG.shape[1],
        first_slot,
        scale * LOG2E,
        HEADS=rows // len(records_BF),
        GROUP=group,
        DIM=head_dim,
        SEGMENTS=lists.ids_RPW.shape[1],
        SEGMENTS_TILE=triton.next_power_of_2(lists.ids_RPW.shape[1]),
        TAKE=NOTHING if take_out is None else take_out.mode,
        KEPT=kept_RX is not None,
        **tile_options(q_RGD.dtype),
        **chained(q_RGD.device),
    )
    return programs


def tile_options(dtype: torch.dtype, tile: int = _TILE) -> dict[str, Any]:
    """Shape of a launch: keys per iteration, loads in flight, warps."""
    whole = dtype == torch.float32
    return {
        "TILE": tile,
        "STAGES": 1 if whole else 3,
        "PRECISION": "ieee" if whole else "tf32",
        "num_warps": 4,
    }


@triton.jit
def load_group(
    q_ptr: tl.tensor, row: tl.tensor, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """The queries of a row's group, padded with zeros to ROWS."""
    heads = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    at = (row * GROUP + heads)[:, None] * DIM + dims[None, :]
    return tl.load(q_ptr + at, mask=heads[:, None] < GROUP, other=0.0)


@triton.jit
def add_weighted(
    sums: tl.tensor, weights: tl.tensor, values: tl.tensor, FINE: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """sums [rows, d] + weights [rows, keys] @ values [keys, d].

    FINE: weights count with twice the digits of the values' type, for sums that others largely cancel.
    """
    coarse = weights.to(values.dtype)
    sums = tl.dot(coarse, values, sums, input_precision=PRECISION)
    if FINE and values.dtype != tl.float32:
        rest = (weights - coarse.to(tl.float32)).to(values.dtype)
        sums = tl.dot(rest, values, sums, input_precision=PRECISION)
    return sums


@triton.jit
def store_partial(
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    row: tl.tensor,
    slots: tl.tensor,
    slot: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Writes what a program found into its slot."""
    heads = tl.arange(0, ROWS)
    at = (row.to(tl.int64) * slots + slot) * GROUP + heads
    tl.store(peaks_ptr + at, peaks, mask=heads < GROUP)
    tl.store(totals_ptr + at, totals, mask=heads < GROUP)
    into = sums_ptr + at[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(into, sums, mask=(heads < GROUP)[:, None] & (peaks != float("-inf"))[:, None])


@triton.jit
def context_entries(records_ptr: tl.tensor, b: tl.tensor) -> tl.tensor:
    """First searched key, their end, and how many keys of the context are always attended."""
    first = field(records_ptr, b, _FIRST).to(tl.int32)
    end = field(records_ptr, b, _END).to(tl.int32)
    keys = field(records_ptr, b, _KEYS).to(tl.int32)
    return first, end, first + tl.maximum(keys - end, 0)


@triton.jit
def context_rows(
    records_ptr: tl.tensor, b: tl.tensor, head: tl.tensor, ADDRESS: tl.constexpr, ELEMENT: tl.constexpr
) -> tl.tensor:
    """Pointer to a KV head's keys and values; the field of its stride follows that of the address."""
    address = field(records_ptr, b, ADDRESS) + head * field(records_ptr, b, ADDRESS + 1)
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def segment_ends(
    counts_ptr: tl.tensor, row: tl.tensor, width: tl.tensor, SEGMENTS: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Entries of a row's segments [TILE], and where each ends in the row's whole list."""
    segment = tl.arange(0, TILE)
    counts = tl.load(counts_ptr + row.to(tl.int64) * SEGMENTS + segment, mask=segment < SEGMENTS, other=0)
    counts = tl.minimum(counts, width)
    return counts, tl.cumsum(counts, 0)


@triton.jit
def listed_ids(
    ids_ptr: tl.tensor,
    entry: tl.tensor,
    stop: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    width: tl.tensor,
    SEGMENTS: tl.constexpr,
) -> tl.tensor:
    """Key ids at entries of a row's whole list, -1 from `stop` on."""
    at = entry.to(tl.int64)
    if SEGMENTS > 1:
        passed = (entry[:, None] >= ends[None, :]).to(tl.int32)
        segment = tl.minimum(tl.sum(passed, 1), SEGMENTS - 1)
        at = segment.to(tl.int64) * width + (entry - tl.sum(passed * counts[None, :], 1))
    return tl.load(ids_ptr + at, mask=entry < stop, other=-1)


@triton.jit
def take_sums(
    logits: tl.tensor,
    of_cluster: tl.tensor,
    member: tl.tensor,
    taken_ptr: tl.tensor,
    taken_logits_ptr: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Counts keys and adds up their logits, cluster by cluster."""
    heads = tl.arange(0, ROWS)
    inside = (heads < GROUP)[:, None] & member[None, :]
    into = of_cluster[None, :] * GROUP + heads[:, None]
    tl.atomic_add(taken_ptr + of_cluster, tl.full([TILE], 1, tl.int32), mask=member, sem="relaxed")
    tl.atomic_add(taken_logits_ptr + into, logits, mask=inside, sem="relaxed")


@triton.jit
def attend_run(
    q: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    step: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    assignment_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    taken_logits_ptr: tl.tensor,
    row_clusters: tl.tensor,
    SEGMENTS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TAKE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Adds entries start.., TILE in every `step`, up to stop-1 to a running softmax; returns how many were keys too.

    SEGMENTS: of the list of key ids that entries are of; with 0 they are rows 0..first-1 and those from `end` on.
    """
    heads = tl.arange(0, 16)
    dims = tl.arange(0, DIM)
    attended = tl.zeros([TILE], tl.int32)
    for at in tl.range(start, stop, step, num_stages=STAGES):
        entry = at + tl.arange(0, TILE)
        if SEGMENTS > 0:
            ids = listed_ids(ids_ptr, entry, stop, counts, ends, width, SEGMENTS)
        else:
            ids = tl.where(entry < stop, tl.where(entry < first, entry, end + entry - first), -1)
        valid = ids >= 0
        attended += valid.to(tl.int32)
        # A head's rows span less than 2^31 elements up to 2^22 keys.
        where = ids[:, None] * (2 * DIM) + dims[None, :]
        keys = tl.load(rows_ptr + where, mask=valid[:, None], other=0.0)
        values = tl.load(rows_ptr + DIM + where, mask=valid[:, None], other=0.0)
        logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        logits = tl.where(valid[None, :], logits, float("-inf"))
        higher = tl.maximum(peaks, tl.max(logits, 1))
        if TAKE > 0:
            cluster = tl.load(assignment_ptr + ids, mask=valid, other=-1)
            member = cluster >= 0
            of_cluster = row_clusters + cluster
        if TAKE == _SUMS:
            take_sums(logits, of_cluster, member, taken_ptr, taken_logits_ptr, GROUP, 16, TILE)
        if TAKE == _MONOPOLE:
            inside = (heads < GROUP)[:, None] & member[None, :]
            from_ptr = logits_ptr + of_cluster[None, :] * GROUP + heads[:, None]
            means = tl.load(from_ptr, mask=inside, other=float("-inf"))
            higher = tl.maximum(higher, tl.max(means, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(peaks - base)
        weights = tl.exp2(logits - base[:, None])
        if TAKE == _MONOPOLE:
            weights -= tl.exp2(means - base[:, None])
        totals = totals * shrink + tl.sum(weights, 1)
        sums = add_weighted(sums * shrink[:, None], weights, values, False, PRECISION)
        peaks = higher
    return peaks, totals, sums, tl.sum(attended, 0)


@triton.jit(do_not_specialize=["width", "cluster_width", "slots", "first_slot"])
def attend_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    taken_logits_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    width: tl.tensor,
    cluster_width: tl.tensor,
    slots: tl.tensor,
    first_slot: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENTS_TILE: tl.constexpr,
    TAKE: tl.constexpr,
    KEPT: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (number, row) of a row's: its tiles of the list, of what is always attended, and of the tail."""
    program = tl.program_id(0)
    row = tl.program_id(1)
    b = row // HEADS
    head = (row % HEADS).to(tl.int64)
    element: tl.constexpr = q_ptr.dtype.element_ty
    rows_ptr = context_rows(records_ptr, b, head, _KV, element)
    tail_ptr = context_rows(records_ptr, b, head, _TAIL, element)
    first, end, entries = context_entries(records_ptr, b)
    tail_keys = field(records_ptr, b, _TAIL_KEYS).to(tl.int32)
    assignment_ptr = ids_ptr
    if TAKE > 0:
        assignment_ptr = field(records_ptr, b, _ASSIGNMENT).to(tl.pointer_type(tl.int32))
        assignment_ptr += head * field(records_ptr, b, _KEYS)
    row_clusters = row.to(tl.int64) * cluster_width
    step = tl.num_programs(0) * TILE
    # What is always attended begins with the last program, whose part of the list may be a tile shorter.
    start = (tl.num_programs(0) - 1 - program) * TILE
    after = (start + tl.cdiv(entries, TILE) * (step - TILE)) % step
    wait_for_launch(CHAINED)
    counts, ends = segment_ends(counts_ptr, row, width, SEGMENTS, SEGMENTS_TILE)
    q = load_group(q_ptr, row, GROUP, DIM, 16)
    peaks = tl.full([16], float("-inf"), tl.float32)
    totals = tl.zeros([16], tl.float32)
    sums = tl.zeros([16, DIM], tl.float32)
    own_ids = ids_ptr + row.to(tl.int64) * SEGMENTS * width
    peaks, totals, sums, attended = attend_run(
        q, peaks, totals, sums, rows_ptr, own_ids, program * TILE, tl.sum(counts, 0), step, first, end,
        counts, ends, width, scale, assignment_ptr, logits_ptr, taken_ptr, taken_logits_ptr, row_clusters,
        SEGMENTS, GROUP, DIM, TAKE, TILE, STAGES, PRECISION,
    )  # fmt: skip
    if KEPT:
        tl.store(kept_ptr + row * tl.num_programs(0) + program, attended)
    peaks, totals, sums, _ = attend_run(
        q, peaks, totals, sums, rows_ptr, own_ids, start, entries, step, first, end,
        counts, ends, width, scale, assignment_ptr, logits_ptr, taken_ptr, taken_logits_ptr, row_clusters,
        0, GROUP, DIM, TAKE, TILE, 1, PRECISION,
    )  # fmt: skip
    peaks, totals, sums, _ = attend_run(
        q, peaks, totals, sums, tail_ptr, own_ids, after, tail_keys, step, tail_keys, tail_keys,
        counts, ends, width, scale, assignment_ptr, logits_ptr, taken_ptr, taken_logits_ptr, row_clusters,
        0, GROUP, DIM, 0, TILE, STAGES, PRECISION,
    )  # fmt: skip
    slot = first_slot + program
    store_partial(sums_ptr, peaks_ptr, totals_ptr, row, slots, slot, peaks, totals, sums, GROUP, DIM, 16)
