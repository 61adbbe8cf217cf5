"""Asks threads of the host for lists of keys, and waits for them, inside of a captured graph.

Both sides share page-locked memory (`mailbox.Mailbox`). One launch writes queries there and then, when every
write can be seen by the host, each row's word: the number of the search. Another one waits, with one program of one
warp for every list: it reads the list's word until the host has answered, and copies the ids to the device. So lists
that are early are copied while others are still searched, and all other places of the device are free for whatever
runs beside. A program that waits does not let the launch after it begin: its programs would take these places.

A wait ends early when the host has failed, and after a time limit: the list is then empty and `gave_up` is set, after
which the step's other waits end at once. The host sees that in `trouble`, and what the step yields is not used.

Shape legend: B rows of a batch, H KV heads, R = B * H lists, W room of a list, F fields of a record, X numbers of a
query.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_engine.host_search.shared_search_numba import COUNT_BITS, LINE
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.launches import chained, clock, doze, wait_for_launch
from decode_engine.kernels.record_fields import STEP, field, row_of

_LINE = tl.constexpr(LINE)
_COUNT_BITS = tl.constexpr(COUNT_BITS)
_COUNT_MASK = tl.constexpr((1 << COUNT_BITS) - 1)
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class SharedWords:
    """What both sides share, in page-locked memory where there is a device.

    q_BX: [B, X] float32. posted_BX, answers_RX: [B or R, LINE] int64. ids_RW: int32. waits_LR2: int64, when the wait
    for a list began and ended, by layer and list, in nanoseconds of the device's clock. trouble_X: [LINE] int64, word 0
    is set to 1 when a wait took too long.
    """

    q_BX: Tensor
    posted_BX: Tensor
    answers_RX: Tensor
    ids_RW: Tensor
    waits_LR2: Tensor
    trouble_X: Tensor


def post_queries(q_BX: Tensor, records_BF: Tensor, shared: SharedWords, layer: int) -> None:
    """Asks for the lists of a layer, with queries [B, X] of any float dtype.

    Rows whose record says step 0 ask for nothing.
    """
    rows, values = q_BX.shape
    post_kernel[(rows,)](
        records_BF,
        q_BX,
        shared.q_BX.data_ptr(),
        shared.posted_BX.data_ptr(),
        layer,
        len(shared.waits_LR2),
        VALUES=values,
        BLOCK=triton.next_power_of_2(values),
        ON_DEVICE=q_BX.is_cuda,
        num_warps=8,
        **chained(q_BX.device),
    )


def await_lists(
    records_BF: Tensor,
    shared: SharedWords,
    lists: KeyLists,
    gave_up_1: Tensor,
    layer: int,
    limit_ns: int,
    heads: range | None = None,
) -> None:
    """Waits for the lists of a layer, and copies them into `lists` [R, 1, W]; empty ones for rows of step 0.

    gave_up_1: [1] int32, set when a wait took more than limit_ns; while it is set nothing is waited for. heads: of KV
    heads, those whose lists are waited for and copied, all by default.
    """
    count, _, width = lists.ids_RPW.shape
    all_heads = count // len(records_BF)
    some = range(all_heads) if heads is None else heads
    await_kernel[(len(records_BF) * len(some),)](
        records_BF,
        shared.answers_RX.data_ptr(),
        shared.ids_RW.data_ptr(),
        shared.waits_LR2.data_ptr(),
        shared.trouble_X.data_ptr(),
        gave_up_1,
        lists.ids_RPW,
        lists.counts_RP,
        layer,
        len(shared.waits_LR2),
        width,
        limit_ns,
        count,
        HEADS=all_heads,
        FIRST_HEAD=some.start,
        SOME_HEADS=len(some),
        CHUNK=min(_CHUNK, triton.next_power_of_2(width)),
        ON_DEVICE=records_BF.is_cuda,
        num_warps=1,
        **chained(records_BF.device),
    )


@triton.jit
def fence(ON_DEVICE: tl.constexpr) -> None:
    """Orders this program's accesses before it and after it, for the host as well."""
    tl.debug_barrier()
    if ON_DEVICE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit(do_not_specialize=["out_address", "posted_address", "layer", "layers"])
def post_kernel(
    records_ptr: tl.tensor,
    q_ptr: tl.tensor,
    out_address: tl.tensor,
    posted_address: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per row."""
    b = tl.program_id(0)
    wait_for_launch(CHAINED)
    step = field(records_ptr, b, STEP)
    if step > 0:
        value = tl.arange(0, BLOCK)
        out_ptr = out_address.to(tl.int64).to(tl.pointer_type(tl.float32)) + b.to(tl.int64) * VALUES
        q = tl.load(q_ptr + b.to(tl.int64) * VALUES + value, mask=value < VALUES, other=0)
        tl.store(tl.multiple_of(out_ptr, 4) + value, q.to(tl.float32), mask=value < VALUES)
        fence(ON_DEVICE)
        posted_ptr = posted_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + b * _LINE
        tl.store(posted_ptr, step * layers + layer)


@triton.jit(
    do_not_specialize=[
        "answers_address",
        "ids_address",
        "waits_address",
        "trouble_address",
        "layer",
        "layers",
        "width",
        "limit_ns",
        "lists",
    ]
)
def await_kernel(
    records_ptr: tl.tensor,
    answers_address: tl.tensor,
    ids_address: tl.tensor,
    waits_address: tl.tensor,
    trouble_address: tl.tensor,
    gave_up_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    width: tl.tensor,
    limit_ns: tl.tensor,
    lists: tl.tensor,
    HEADS: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    SOME_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per list."""
    row = row_of(tl.program_id(0), HEADS, FIRST_HEAD, SOME_HEADS)
    if CHAINED:
        gdc_wait()
    step = field(records_ptr, row // HEADS, STEP)
    waiting = (step > 0) & (tl.load(gave_up_ptr, volatile=True) == 0)
    wanted = step * layers + layer
    answer_ptr = answers_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + row * _LINE
    turns = step * 0
    begin = clock(turns, ON_DEVICE)
    now = begin
    word = turns
    if waiting:
        word = tl.load(answer_ptr, volatile=True)
    while waiting & (word >= 0) & ((word >> _COUNT_BITS) < wanted) & (now - begin < limit_ns):
        doze(ON_DEVICE)
        turns += 1
        word = tl.load(answer_ptr, volatile=True)
        now = clock(turns, ON_DEVICE)
    fence(ON_DEVICE)
    answered = waiting & (word >= 0) & ((word >> _COUNT_BITS) >= wanted)
    if waiting:
        waits_ptr = waits_address.to(tl.int64).to(tl.pointer_type(tl.int64))
        waits_ptr += 2 * (layer.to(tl.int64) * lists + row)
        tl.store(waits_ptr, begin)
        tl.store(waits_ptr + 1, now)
        if (answered == 0) & (word >= 0):
            tl.store(gave_up_ptr, 1)
            tl.store(trouble_address.to(tl.int64).to(tl.pointer_type(tl.int64)), turns * 0 + 1)
    if CHAINED:
        gdc_launch_dependents()
    count = tl.where(answered, word & _COUNT_MASK, 0).to(tl.int32)
    tl.store(counts_ptr + row, count)
    ids_ptr = ids_address.to(tl.int64).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * width
    lists_ptr += row.to(tl.int64) * width
    for at in range(0, count, CHUNK):
        entry = at + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + entry, mask=entry < count, other=0)
        tl.store(lists_ptr + entry, ids, mask=entry < count)
