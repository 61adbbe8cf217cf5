"""Decode attention over the keys that query tables select, in one launch after the search.

Every program but the first few of a KV head owns a tile of keys: it selects among them (`table_selection`), and attends
to those. Sinks, recent window and tail are shared out in runs of a fixed number of rows: to the programs without a tile
first, and what they cannot take in time to all. The group's query heads share one tile of the tensor cores. All leave
partial results, which `merge_partials` merges.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_engine.kernels import records
from decode_engine.kernels.attention.partials import chained, merge_partials
from decode_engine.kernels.records import field
from decode_engine.kernels.tables.device_functions import END, FIRST, KEYS, LOG2E, load_sequence
from decode_engine.kernels.tables.plan import TablePlan, Workspace
from decode_engine.kernels.tables.search import search
from decode_engine.kernels.tables.selection import found, keep_keys, selection_sizes

KV = tl.constexpr(records.KV)
KV_HEAD = tl.constexpr(records.KV_HEAD)
TAIL = tl.constexpr(records.TAIL)
TAIL_HEAD = tl.constexpr(records.TAIL_HEAD)
TAIL_KEYS = tl.constexpr(records.TAIL_KEYS)
NEAR_RUNS = tl.constexpr(8)  # runs of exact rows that a program without a tile takes before others help
_GROUP_TILE = 16  # the tensor cores' smallest tile; a group has up to 8 heads


@triton.jit
def attend_rows(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    b: tl.tensor,
    h: tl.tensor,
    count: tl.tensor,
    scale_log2: tl.tensor,
    EXACT: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Attends to the `count` listed keys, and to this program's runs of BN rows of sinks, recent window and tail.

    Runs x, x + EXACT, ... go to the EXACT programs without a tile, NEAR_RUNS to each; of the others every program takes
    its turn. Returns per head of the group the peak in units of log2, the mass relative to it, and the weighted sum of
    values.
    """
    x = tl.program_id(0)
    g = tl.arange(0, BG)
    d = tl.arange(0, D)
    n_keys = field(records_ptr, b, KEYS).to(tl.int32)
    first = field(records_ptr, b, FIRST).to(tl.int32)
    end = field(records_ptr, b, END).to(tl.int32)
    in_context = first + n_keys - end
    exact = in_context + field(records_ptr, b, TAIL_KEYS).to(tl.int32)
    runs = tl.cdiv(exact, BN)
    near = tl.where(x < EXACT, tl.minimum(tl.maximum(tl.cdiv(runs - x, EXACT), 0), NEAR_RUNS), 0)
    far = tl.maximum(tl.cdiv(runs - EXACT * NEAR_RUNS - x, tl.num_programs(0)), 0)
    listed = tl.cdiv(count, BN)
    element = tl.pointer_type(q_ptr.dtype.element_ty)
    item: tl.constexpr = q_ptr.dtype.element_ty.primitive_bitwidth // 8
    head_address = field(records_ptr, b, KV) + h * field(records_ptr, b, KV_HEAD)
    kv_ptr = tl.multiple_of(head_address.to(element), 16)
    # Key ids count on into the tail, whose rows are addressed relative to the context's, in elements.
    tail_address = field(records_ptr, b, TAIL) + h * field(records_ptr, b, TAIL_HEAD)
    tail_offset = (tail_address - head_address) // item - n_keys.to(tl.int64) * (2 * D)
    q = tl.load(q_ptr + g[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
    peak = tl.full([BG], float("-inf"), tl.float32)
    mass = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, D], tl.float32)
    for turn in range(0, listed + near + far):
        own = turn - listed
        run = tl.where(own < near, x + own * EXACT, EXACT * NEAR_RUNS + x + (own - near) * tl.num_programs(0))
        n = tl.where(own < 0, turn, run) * BN + tl.arange(0, BN)
        there = n < tl.where(own < 0, count, exact)
        always = tl.where(n < first, n, tl.where(n < in_context, n - first + end, n - in_context + n_keys))
        key = tl.where(own < 0, tl.load(ids_ptr + n, mask=there & (own < 0), other=0), always)
        offset = key.to(tl.int64) * (2 * D) + tl.where(key < n_keys, 0, tail_offset)
        row_ptrs = kv_ptr + tl.multiple_of(offset, 8)[:, None] + d[None, :]
        k = tl.load(row_ptrs, mask=there[:, None], other=0.0)
        v = tl.load(row_ptrs + D, mask=there[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(there[None, :], s, float("-inf"))
        higher = tl.maximum(peak, tl.max(s, 1))
        fade = tl.exp2(peak - higher)
        p = tl.exp2(s - higher[:, None])
        mass = mass * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        peak = higher
    return peak, mass, acc


@triton.jit
def attend_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    out_sums_ptr: tl.tensor,
    out_peaks_ptr: tl.tensor,
    out_totals_ptr: tl.tensor,
    scale_log2: tl.tensor,
    P: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    J: tl.constexpr,
    S: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    EXACT: tl.constexpr,
    POOLED: tl.constexpr,
    EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (x, bh): tile x - EXACT, and a share of what is attended exactly."""
    x = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // H
    tile = x - EXACT
    sequence = load_sequence(records_ptr, b)
    if CHAINED:
        gdc_wait()
    tile_ids_ptr = ids_ptr + (bh.to(tl.int64) * P + tl.maximum(tile, 0)) * (4 * BW)
    count = keep_keys(
        sequence, rows_ptr, weights_ptr, units_ptr, logits_ptr, peaks_ptr, normalisers_ptr, histograms_ptr,
        limits_ptr, tile_ids_ptr, bh, tile, P, L, J, S, BW, POOLED, EARLY, ASSEMBLY,
    )  # fmt: skip
    tl.store(counts_ptr + bh * P + tile, count, mask=tile >= 0)
    tl.debug_barrier()
    peak, mass, acc = attend_rows(
        q_ptr + bh * (G * D), records_ptr, tile_ids_ptr, b, bh % H, count, scale_log2,
        EXACT, G, D, BN, BG, PRECISION,
    )  # fmt: skip
    g = tl.arange(0, BG)
    place = (bh * tl.num_programs(0) + x) * G + g
    sums_ptrs = out_sums_ptr + place.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(sums_ptrs, acc, mask=(g < G)[:, None] & (mass > 0.0)[:, None])
    tl.store(out_peaks_ptr + place, peak, mask=g < G)
    tl.store(out_totals_ptr + place, mass, mask=g < G)
    if CHAINED:  # not sooner: programs that come early take the place of those that still have work
        gdc_launch_dependents()


def attend(q_BHGD: Tensor, records_BF: Tensor, plan: TablePlan, work: Workspace, counts_BHP: Tensor) -> None:
    """Launches selection and attention of one step after `search`: fills counts, ids and partials."""
    whole = q_BHGD.element_size() == 4
    partials = work.partials
    attend_kernel[(plan.programs, q_BHGD.shape[0] * plan.kv_heads)](
        q_BHGD, records_BF, *found(work), counts_BHP,
        partials.sums_RSGD, partials.peaks_RSG, partials.totals_RSG, plan.scale * LOG2E.value, plan.tiles,
        H=plan.kv_heads, G=plan.group, D=plan.head_dim, BN=plan.shape.rows, BG=_GROUP_TILE,
        EXACT=plan.shape.exact_programs, PRECISION="ieee" if whole else "tf32", **selection_sizes(q_BHGD, plan),
        **plan.shape.options(), **chained(q_BHGD.device),
    )  # fmt: skip


def table_attention(
    q_BHGD: Tensor, records_BF: Tensor, plan: TablePlan, work: Workspace, counts_BHP: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of one decode step to sinks, recent window, tail and the keys that the tables select.

    q_BHGD: [B, H, G, d] contiguous, in the dtype of keys and values, unscaled. records_BF: [B, F] int64. counts_BHP:
    [B, H, P] int32, gets the number of kept keys of every tile. Returns out [B, H, G, d] in the queries' dtype and lse
    [B, H, G] float32; keys that are kept neither by the tables nor always are dropped. Does not wait for the device
    and may be captured in a CUDA graph.
    """
    search(q_BHGD, records_BF, plan, work)
    attend(q_BHGD, records_BF, plan, work, counts_BHP)
    out, lse = merge_partials(work.partials, q_BHGD.dtype)
    return out.view_as(q_BHGD), lse.view(q_BHGD.shape[:3])
