"""Kernel that scores a sample of coarse keys, and finds from which weight on keys are kept.

Keys are ranked as `CoarseRows.rank` ranks them: by the sum over a group's heads of the softmax of the estimated
logits. A second launch finds the softmaxes' normalisers and the cut (`border`). The sample is scored as the pass
over all keys scores them (`coarse_pass`), so that logits which are tied are tied in both.

Shape legend: as in `coarse.sizes`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import LOG2E, tile_options
from decode_engine.kernels.border import moved, store_cut, stretch_of
from decode_engine.kernels.coarse import sizes as coarse_sizes
from decode_engine.kernels.coarse.coded_tiles import key_logits, key_places, load_queries
from decode_engine.kernels.coarse.sizes import CHUNKS, CoarseSizes, CoarseWork
from decode_engine.kernels.coarse.warp.warp_search import cut_kernel as cut_in_registers
from decode_engine.kernels.coarse.warp.warp_search import sample_kernel as sample_alone
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import KEEP, field, searched_keys
from index_store.indexes.coarse_rows.scalars import row_sizes

BLOCK = tl.constexpr(row_sizes.BLOCK)
RUN = tl.constexpr(coarse_sizes.RUN)
CUT_REGISTERS = 64
"""Of each thread that finds a cut in registers."""


@triton.jit
def sample_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    scale_log2: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    PRODUCT: tl.constexpr,
    SAMPLERS: tl.constexpr,
    RUNS: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (s, row): evenly spread runs of the searched keys, or all of them where they are few."""
    wait_for_launch(CHAINED)
    row = tl.program_id(1)
    b = row // HEADS
    first, end = searched_keys(records_ptr, b)
    if end > first:
        element: tl.constexpr = q_ptr.dtype.element_ty
        taken: tl.constexpr = SAMPLERS * RUNS
        places = key_places(records_ptr, b, row % HEADS, DIM, KEY_BITS, PRODUCT)
        queries = load_queries(q_ptr, row, scale_log2, GROUP, DIM, KEY_BITS, KEY_BYTES, PRODUCT, ROWS)
        heads = tl.arange(0, ROWS)
        base = first // RUN * RUN
        runs = tl.cdiv(end - base, RUN)
        for i in range(RUNS):
            turn = tl.program_id(0) * RUNS + i
            run = tl.where(runs > taken, moved(turn, taken, runs, stretch_of(turn, taken)), turn)
            key = base + run * RUN + tl.arange(0, RUN)
            there = (key >= first) & (key < end)
            block = tl.minimum(base + run * RUN, end - 1) // BLOCK
            logits = key_logits(
                queries, places, block, key, there,
                DIM, KEY_BITS, KEY_BYTES, PRODUCT, ROWS, element, PRECISION, PACKED,
            )  # fmt: skip
            logits = tl.where(there[:, None], logits, float("-inf"))
            at = (row * GROUP + heads)[None, :] * (taken * RUN) + (turn * RUN + tl.arange(0, RUN))[:, None]
            tl.store(sampled_ptr + at, logits, mask=heads[None, :] < GROUP)


@triton.jit
def cut_kernel(
    records_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    SAMPLED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program row: estimates the normalisers from the sampled keys, and what a kept key's weight has to reach.

    A few keys may hold most of a softmax. So each chunk's largest weight stands for itself alone, and its others for
    the keys that were not sampled.
    """
    wait_for_launch(CHAINED)
    row = tl.program_id(0)
    b = row // HEADS
    first, end = searched_keys(records_ptr, b)
    searched = end - first
    if searched <= 0:
        return
    keep = field(records_ptr, b, KEEP).to(tl.int32)
    chunk = tl.arange(0, CHUNKS)
    at = chunk[:, None] * (SAMPLED // CHUNKS) + tl.arange(0, SAMPLED // CHUNKS)[None, :]
    total = tl.zeros([CHUNKS, SAMPLED // CHUNKS], tl.float32)
    counted = searched * 0
    for g in tl.static_range(GROUP):
        logits = tl.load(sampled_ptr + (row * GROUP + g) * SAMPLED + at, cache_modifier=".cg")
        counted = tl.sum(tl.sum((logits > float("-inf")).to(tl.int32), 1), 0)
        stands_for = searched.to(tl.float32) / tl.maximum(counted, 1).to(tl.float32)
        peaks = tl.max(logits, 1)
        highest = tl.max(peaks, 0)
        weights = tl.exp2(logits - tl.where(peaks == float("-inf"), 0.0, peaks)[:, None])
        estimates = tl.maximum(tl.sum(weights, 1) - 1.0, 0.0) * stands_for + 1.0
        normaliser = highest + tl.log2(tl.sum(estimates * tl.exp2(peaks - highest), 0))
        tl.store(normalisers_ptr + row * GROUP + g, normaliser)
        total += tl.exp2(logits - normaliser)
    bits = tl.reshape(total, [SAMPLED]).to(tl.int32, bitcast=True)
    wanted = keep.to(tl.float32) * counted.to(tl.float32) / searched.to(tl.float32)
    store_cut(cuts_ptr + row * 3, bits, counted, wanted, keep, searched)


def most_runs_alone(head_dim: int, columns: int) -> int:
    """Runs that one warp scores at most: what it loads for them is on its way together."""
    return min(4, 512 // head_dim, 4096 // (columns * head_dim))


def find_cuts(q_BHGD: Tensor, records_BF: Tensor, sizes: CoarseSizes, work: CoarseWork) -> None:
    """Fills normalisers and cuts of `work` for one step's queries; of rows that search nothing they stay as they are.

    q_BHGD: [B, H, G, d] contiguous, unscaled, fp16, bf16 or float32. records_BF: [B, RECORD_FIELDS] int64.
    """
    shape, rows = sizes.shape, q_BHGD.shape[0] * sizes.kv_heads
    scale = sizes.head_dim**-0.5 * LOG2E
    if sizes.in_registers:
        taken, runs = shape.samplers * shape.runs, 1
        while (
            runs < most_runs_alone(sizes.head_dim, sizes.columns) and rows * taken > 2 * shape.programs * runs
        ):
            runs *= 2
        sample_alone[(taken // runs, rows)](
            q_BHGD,
            records_BF,
            work.sampled_RGM,
            scale,
            TAKEN=taken,
            RUNS=runs,
            RUN=coarse_sizes.RUN,
            KEY_BITS=sizes.key_bits,
            num_warps=1,
            **sizes.constants_alone(),
            **chained(q_BHGD.device),
        )
    else:
        sample_kernel[(shape.samplers, rows)](
            q_BHGD,
            records_BF,
            work.sampled_RGM,
            scale,
            SAMPLERS=shape.samplers,
            RUNS=shape.runs,
            num_warps=4,
            **sizes.key_constants(),
            **product_options(q_BHGD),
            **chained(q_BHGD.device),
        )
    arguments = (records_BF, work.sampled_RGM, work.normalisers_RG, work.cuts_RX)
    constants = {"HEADS": sizes.kv_heads, "GROUP": sizes.group, "CHUNKS": CHUNKS, "SAMPLED": shape.sampled}
    kernel = cut_in_registers if sizes.in_registers else cut_kernel
    # Programs of the next launch have room beside it.
    most = {"maxnreg": CUT_REGISTERS} if sizes.in_registers else {}
    kernel[(rows,)](*arguments, **constants, num_warps=CHUNKS, **most, **chained(q_BHGD.device))


def product_options(q_BHGD: Tensor) -> dict[str, Any]:
    """How kernels that score keys multiply and unpack."""
    precision = tile_options(q_BHGD.dtype, 0, 0)["PRECISION"]
    return {"PRECISION": precision, "PACKED": q_BHGD.dtype == torch.bfloat16 and q_BHGD.is_cuda}
