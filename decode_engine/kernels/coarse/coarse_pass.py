"""One pass over the coarse copies of keys and values: scores every searched key, lists the best, attends to the others.

A program goes over consecutive blocks of a row's keys, decides by the cut that `search.find_cuts` has found which keys
are listed, to be attended exactly, and attends to all others of the searched range by their codes. So no logit is
stored: for a group of four they would be 16 bytes a key, written and read, where the codes that they are made of are 64
at 4 bits and d = 128.

Kernels of one warp each (`coarse.warp`) do it in two launches: one that scores keys and one that reads values. Each
needs half of the registers that both would, so that a processor has room for twice as many; and only weights of tiles
that count, 8 bytes a key for a group of four, pass between them.

Shape legend: as in `coarse.sizes`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.attention.online_softmax import LOG2E, tile_options
from decode_engine.kernels.attention.partials import Partials
from decode_engine.kernels.border import load_cut, passes
from decode_engine.kernels.coarse.coded_tiles import (
    add_values,
    key_logits,
    key_places,
    load_queries,
    no_values_yet,
    store_values,
    value_places,
    value_steps,
)
from decode_engine.kernels.coarse.search import product_options
from decode_engine.kernels.coarse.sizes import CoarseSizes, CoarseWork
from decode_engine.kernels.coarse.warp.warp_pass import pass_kernel as pass_alone
from decode_engine.kernels.coarse.warp.warp_values import values_kernel as values_alone
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import KEYS, field, searched_keys
from index_store.indexes.coarse_rows.scalars import row_sizes

BLOCK = tl.constexpr(row_sizes.BLOCK)


@triton.jit
def share_of_blocks(first: tl.tensor, end: tl.tensor) -> tl.tensor:
    """First block and end of this program's share of those that hold searched keys."""
    base = first // BLOCK
    stop = tl.where(end > first, tl.cdiv(end, BLOCK), base)
    share = tl.cdiv(stop - base, tl.num_programs(0))
    begin = base + tl.program_id(0) * share
    return begin, tl.minimum(begin + share, stop)


@triton.jit
def list_kept(
    kept_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """Lists the keys of begin .. end - 1 that are marked as kept, ascending; their number."""
    count = begin * 0
    for start in range(begin, end, AT_ONCE):
        key = start + tl.arange(0, AT_ONCE)
        kept = tl.load(kept_ptr + key, mask=key < end, other=0, cache_modifier=".cg").to(tl.int32)
        tl.store(ids_ptr + count + tl.cumsum(kept, 0) - kept, key, mask=kept > 0)
        count += tl.sum(kept, 0)
    return count


@triton.jit(do_not_specialize=["width", "room", "slots"])
def pass_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    scale_log2: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    slots: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    PRODUCT: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    ATTEND: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (split, row): a share of the row's blocks. Decides which keys are kept, marks and lists them.

    ATTEND: attends to the others.
    """
    wait_for_launch(CHAINED)
    split = tl.program_id(0)
    row = tl.program_id(1)
    b = row // HEADS
    head = row % HEADS
    element: tl.constexpr = q_ptr.dtype.element_ty
    first, end = searched_keys(records_ptr, b)
    keys = field(records_ptr, b, KEYS).to(tl.int32)
    coded_keys = key_places(records_ptr, b, head, DIM, KEY_BITS, PRODUCT)
    coded_values = value_places(records_ptr, b, head, DIM, VALUE_BITS, VALUE_GROUPS, PRODUCT)
    heads = tl.arange(0, ROWS)
    queries = load_queries(q_ptr, row, scale_log2, GROUP, DIM, KEY_BITS, KEY_BYTES, PRODUCT, ROWS)
    # Heads that only pad the tile weigh nothing. Past the first-level cache, as cuts are.
    at = normalisers_ptr + row * GROUP + heads
    normalisers = tl.load(at, mask=heads < GROUP, other=float("inf"), cache_modifier=".cg")
    least, above, draws = load_cut(cuts_ptr + row * 3)
    kept_ptr += row.to(tl.int64) * room
    begin, stop = share_of_blocks(first, end)
    totals = tl.zeros([BLOCK, ROWS], tl.float32)
    sums, evens = no_values_yet(BLOCK, DIM, VALUE_BITS, VALUE_BYTES, VALUE_GROUPS, PRODUCT, ROWS)
    for block in tl.range(begin, stop, num_stages=STAGES):
        key = block * BLOCK + tl.arange(0, BLOCK)
        there = key < keys
        if ATTEND:  # asked for before anything waits
            steps, starts = value_steps(coded_values, key, there, VALUE_GROUPS, PRODUCT)
        logits = key_logits(
            queries, coded_keys, block, key, there,
            DIM, KEY_BITS, KEY_BYTES, PRODUCT, ROWS, element, PRECISION, PACKED,
        )  # fmt: skip
        shares = tl.exp2(logits - normalisers[None, :])
        searched = (key >= first) & (key < end)
        kept = passes(tl.sum(shares, 1), key, head, least, above, draws) & searched
        tl.store(kept_ptr + key, kept.to(tl.uint8), mask=there)
        if ATTEND:
            # What is not kept weighs less than the cut: no peak has to be found that these are relative to. (With KEEP
            # at 0, which no budget asks for, it weighs what the sample has missed.)
            weights = tl.where((searched & (kept == 0))[:, None], shares, 0.0)
            totals += weights
            sums, evens = add_values(
                sums, evens, weights, above, coded_values, steps, starts, key, there,
                DIM, VALUE_BITS, VALUE_BYTES, VALUE_GROUPS, PRODUCT, element, PRECISION, PACKED,
            )  # fmt: skip
    tl.debug_barrier()
    place = row.to(tl.int64) * tl.num_programs(0) + split
    last = tl.minimum(stop * BLOCK, keys)
    count = list_kept(kept_ptr, ids_ptr + place * width, begin * BLOCK, last, 8 * BLOCK)
    tl.store(counts_ptr + place, count)
    if ATTEND:
        total = tl.sum(totals, 0)
        at = (row.to(tl.int64) * slots + split) * GROUP + heads
        tl.store(peaks_ptr + at, tl.where(total > 0, normalisers, float("-inf")), mask=heads < GROUP)
        tl.store(totals_ptr + at, total, mask=heads < GROUP)
        there = (heads < GROUP) & (total > 0)
        store_values(
            sums_ptr, sums, evens, above, at, there, DIM, VALUE_BITS, VALUE_BYTES, VALUE_GROUPS, PRODUCT
        )


def list_keys(
    q_BHGD: Tensor,
    records_BF: Tensor,
    sizes: CoarseSizes,
    work: CoarseWork,
    lists: KeyLists,
    partials: Partials | None = None,
) -> None:
    """Fills `lists` with the keys that the cuts in `work` keep: sizes.splits(B * H) segments of sizes.width(B * H).

    partials: gets the coarse attention to all others of the searched range in its first slots, as many as programs for
    values.
    q_BHGD: [B, H, G, d] contiguous, unscaled, in the dtype of keys. Does not wait for the device and may be captured in
    a CUDA graph.
    """
    if sizes.in_registers:
        weigh_keys(q_BHGD, records_BF, sizes, work, lists, weigh=partials is not None)
        if partials is not None:
            attend_others(q_BHGD, records_BF, sizes, work, lists, partials)
        return
    rows = q_BHGD.shape[0] * sizes.kv_heads
    pass_kernel[(sizes.splits(rows), rows)](
        q_BHGD,
        records_BF,
        work.normalisers_RG,
        work.cuts_RX,
        work.kept_RN,
        lists.ids_RPW,
        lists.counts_RP,
        None if partials is None else partials.sums_RSGD,
        None if partials is None else partials.peaks_RSG,
        None if partials is None else partials.totals_RSG,
        sizes.head_dim**-0.5 * LOG2E,
        sizes.width(rows),
        work.kept_RN.shape[1],
        0 if partials is None else partials.peaks_RSG.shape[1],
        ATTEND=partials is not None,
        **sizes.value_constants(),
        STAGES=tile_options(q_BHGD.dtype, 0, sizes.stages)["STAGES"],
        num_warps=sizes.warps,
        **sizes.key_constants(),
        **product_options(q_BHGD),
        **chained(q_BHGD.device),
    )


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
    those that are kept. For sizes in registers and queries, keys and values in bfloat16.
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
    """As `list_keys`, for sizes in registers; leaves in `work` what `attend_others` has to know of all other keys.

    Right behind `find_cuts` on its stream: queries are read before that has ended, but not what came before it.
    weigh: False where nobody is going to ask.
    """
    rows, segments = q_BHGD.shape[0] * sizes.kv_heads, lists.counts_RP.shape[1]
    pass_alone[(segments, rows)](
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
        **sizes.constants_alone(),
        **sizes.launch_alone(keys=True),
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
    values_alone[(shares + sizes.value_programs(rows), rows)](
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
        **sizes.constants_alone(),
        **sizes.launch_alone(keys=False),
        **chained(q_BHGD.device),
    )


def _found(q_BHGD: Tensor, records_BF: Tensor, work: CoarseWork, lists: KeyLists) -> tuple[Tensor, ...]:
    """What all kernels of one warp are given."""
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
