"""Launches that go over the coarse copies of keys and values: all searched keys are scored, the best ones listed.

The cut that `search.find_cuts` has found decides which keys are listed, to be attended exactly; all others of the
searched range are attended by their codes. So no logit is stored: for a group of four they would be 16 bytes a key,
written and read, where the codes that they are made of are 64 at 4 bits and d = 128.

One launch scores keys and one reads values, of programs of one warp each. Each needs half of the registers that both
would, so that a processor has room for twice as many; and only weights of tiles that count, 8 bytes a key for a group
of four, pass between them.

Shape legend: as in `coarse.sizes`.
"""

from __future__ import annotations

import triton
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.attention.online_softmax import LOG2E
from decode_engine.kernels.attention.partials import Partials
from decode_engine.kernels.coarse.sizes import CoarseSizes, CoarseWork
from decode_engine.kernels.coarse.warp.warp_pass import pass_kernel
from decode_engine.kernels.coarse.warp.warp_values import values_kernel
from decode_engine.kernels.launches import chained


def attend_all(
    q_BHGD: Tensor,
    records_BF: Tensor,
    sizes: CoarseSizes,
    work: CoarseWork,
    lists: KeyLists,
    partials: Partials,
) -> None:
    """A whole step's attention, into sizes.slots(B * H) slots of `partials`.

    To the keys that the cuts keep, sinks, recent window and tail exactly, to all others by their codes; `lists` gets
    those that are kept. For queries, keys and values in bfloat16.
    """
    weigh_keys(q_BHGD, records_BF, sizes, work, lists)
    attend_others(q_BHGD, records_BF, sizes, work, lists, partials, exact=True)


def weigh_keys(
    q_BHGD: Tensor,
    records_BF: Tensor,
    sizes: CoarseSizes,
    work: CoarseWork,
    lists: KeyLists,
    *,
    weigh: bool = True,
) -> None:
    """Fills `lists` with the keys that the cuts in `work` keep: sizes.splits(B * H) segments of sizes.width(B * H).

    Leaves in `work` what `attend_others` has to know of all other keys. Right behind `find_cuts` on its stream: queries
    are read before that has ended, but not what came before it.
    q_BHGD: [B, H, G, d] contiguous, unscaled, in the dtype of keys. weigh: False where nobody is going to ask. Does not
    wait for the device and may be captured in a CUDA graph, as all launches here.
    """
    rows, segments = q_BHGD.shape[0] * sizes.kv_heads, lists.counts_RP.shape[1]
    pass_kernel[(segments, rows)](
        *_found(q_BHGD, records_BF, work, lists),
        work.cuts_RX,
        sizes.head_dim**-0.5 * LOG2E,
        sizes.width(rows),
        KEY_BITS=sizes.key_bits,
        VALUE_GROUPS=sizes.value_groups,
        WEIGH=weigh,
        AHEAD=sizes.shape.ahead,
        EARLY=sizes.shape.early,
        TILE=sizes.tile,
        **sizes.constants(),
        **sizes.launch(keys=True),
        **chained(q_BHGD.device),
    )


def attend_others(
    q_BHGD: Tensor,
    records_BF: Tensor,
    sizes: CoarseSizes,
    work: CoarseWork,
    lists: KeyLists,
    partials: Partials,
    *,
    exact: bool = False,
) -> None:
    """Coarse attention to all keys of the searched range that `weigh_keys` has not listed, into the first slots.

    exact: the first programs attend to everything else exactly, and sizes.slots(B * H) slots are filled.
    """
    rows, segments = q_BHGD.shape[0] * sizes.kv_heads, lists.counts_RP.shape[1]
    shares = sizes.exact_programs(rows) if exact else 0
    values_kernel[(shares + sizes.value_programs(rows), rows)](
        *_found(q_BHGD, records_BF, work, lists),
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        sizes.head_dim**-0.5 * LOG2E,
        segments,
        shares,
        sizes.width(rows),
        partials.peaks_RSG.shape[1],
        VALUE_BITS=sizes.value_bits,
        VALUE_GROUPS=sizes.value_groups,
        EXACT=exact,
        AHEAD=sizes.shape.values_ahead,
        SEGMENTS=max(32, triton.next_power_of_2(segments)),
        TILE=sizes.tile,
        **sizes.constants(),
        **sizes.launch(keys=False),
        **chained(q_BHGD.device),
    )


def _found(q_BHGD: Tensor, records_BF: Tensor, work: CoarseWork, lists: KeyLists) -> tuple[Tensor, ...]:
    """What both kernels are given."""
    return (
        q_BHGD,
        records_BF,
        work.normalisers_RG,
        lists.ids_RPW,
        lists.counts_RP,
        work.weights_RSX,
        work.tiles_RSX,
        work.weighed_RS,
        work.left_RSG,
    )
