"""Attention to a window of the last keys: flash-decoding over contexts and tails, in equal shares.

The query heads of a group share a tile of the tensor cores, so every key and value is read once.

Shape legend: B sequences, H KV heads, G group heads, S splits, d head dim, F fields of a record.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import (
    LOG2E,
    attend_run,
    keys_of_tile,
    load_group,
    no_keys_yet,
    tile_options,
)
from decode_engine.kernels.attention.partials import Partials, store_partial
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import KEYS, KV, TAIL, TAIL_KEYS, WINDOW, field, head_rows


@triton.jit
def attend_share(
    q: tl.tensor,
    rows_ptr: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    scale_log2: tl.tensor,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Adds this program's share of the rows first .. count - 1 to a running softmax."""
    share = tl.cdiv(tl.cdiv(count - first, TILE), tl.num_programs(0)) * TILE
    begin = first + tl.program_id(0) * share
    end = tl.minimum(begin + share, count)
    return attend_run(q, rows_ptr, begin, end, peaks, totals, sums, scale_log2, DIM, TILE, STAGES, PRECISION)


@triton.jit
def window_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    scale_log2: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (split, row): a share of the context and one of the tail of a KV head, of the last WINDOW keys."""
    wait_for_launch(CHAINED)
    row = tl.program_id(1)
    b = row // HEADS
    h = row % HEADS
    element: tl.constexpr = q_ptr.dtype.element_ty
    q = load_group(q_ptr, row, GROUP, DIM)
    peaks, totals, sums = no_keys_yet(DIM)
    keys = field(records_ptr, b, KEYS).to(tl.int32)
    tail_keys = field(records_ptr, b, TAIL_KEYS).to(tl.int32)
    first = tl.maximum(keys + tail_keys - field(records_ptr, b, WINDOW).to(tl.int32), 0)
    context_ptr = head_rows(records_ptr, b, h, KV, element)
    peaks, totals, sums = attend_share(
        q,
        context_ptr,
        tl.minimum(first, keys),
        keys,
        peaks,
        totals,
        sums,
        scale_log2,
        DIM,
        TILE,
        STAGES,
        PRECISION,
    )
    tail_ptr = head_rows(records_ptr, b, h, TAIL, element)
    peaks, totals, sums = attend_share(
        q,
        tail_ptr,
        tl.maximum(first - keys, 0),
        tail_keys,
        peaks,
        totals,
        sums,
        scale_log2,
        DIM,
        TILE,
        1,
        PRECISION,
    )
    store_partial(
        sums_ptr, peaks_ptr, totals_ptr, row, tl.num_programs(0), tl.program_id(0), peaks, totals, sums,
        GROUP, DIM, True,
    )  # fmt: skip


def attend_window(q_BHGD: Tensor, records_BF: Tensor, partials: Partials, scale: float) -> None:
    """Fills the partial attention [B * H, S, G, d] of contexts and tails, one slot per split.

    q_BHGD: contiguous, unscaled, in the dtype of keys and values; G 1..16, d 64, 128 or 256. scale: of the logits.
    The last keys count, as many as the records say.
    """
    _, heads, group, head_dim = q_BHGD.shape
    rows, splits, _, _ = partials.sums_RSGD.shape
    window_kernel[(splits, rows)](
        q_BHGD,
        records_BF,
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        scale * LOG2E,
        HEADS=heads,
        GROUP=group,
        DIM=head_dim,
        # Two programs fit into a multiprocessor's shared memory.
        **tile_options(q_BHGD.dtype, keys_of_tile(64, head_dim), 3),
        **chained(q_BHGD.device),
    )
