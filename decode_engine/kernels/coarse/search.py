"""Launches that score a sample of coarse keys, and find from which weight on keys are kept.

Keys are ranked as `CoarseRows.rank` ranks them: by the sum over a group's heads of the softmax of the estimated
logits. A second launch finds the softmaxes' normalisers and the cut. The sample is scored as the pass over all keys
scores them (`coarse_pass`), so that logits which are tied are tied in both.

Shape legend: as in `coarse.sizes`.
"""

from __future__ import annotations

from torch import Tensor

from decode_engine.kernels.attention.online_softmax import LOG2E
from decode_engine.kernels.coarse.sizes import CHUNKS, RUN, CoarseSizes, CoarseWork
from decode_engine.kernels.coarse.warp.warp_search import cut_kernel, sample_kernel
from decode_engine.kernels.launches import chained

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
        RUN=RUN,
        KEY_BITS=sizes.key_bits,
        num_warps=1,
        **sizes.constants(),
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
