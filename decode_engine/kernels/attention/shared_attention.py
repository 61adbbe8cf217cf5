"""Attention to everything, where sessions share contexts, and to a window of the last keys: flash-decoding.

The query heads of a group's sessions share a tile of the tensor cores, so every key and value of a context is read once
for all sessions on it. Who shares a context changes with every session that comes or goes, and a captured graph must
serve any grouping, so that is data: a table of int32 in device memory, which the host writes when a batch changes
(`RowGroups.arrange`) and kernels read (`task_count`, `load_task`, `member_rows`).

A group is the rows of a batch on one context. Its work is cut into *tasks*, for each KV head alike: one of several
parts of the context's keys, for up to as many sessions as fit into a tile. The programs of a KV head take tasks in
turns: program p those of numbers p, p + P, p + 2 P, and so on. What a task yields for a session goes into one of the
slots of that session's row (`Partials`): the number of the part. The tail of a session is its own: a session alone in
its group has its tail attended to by the tasks of its context, each by one part of it; where several share a context,
each has tasks for its tail, whose slots follow those of the context.

The table, one after the other: number of tasks, and of those with a part of a context, which come first; at HEADER the
rows in the order of their groups [B]; parts of its context for every row [B], and slots that it has in all [B]; and the
tasks [T, TASK_FIELDS]. A table of zeros has no tasks; idle rows have no slots. Windows are divided in equal shares.

Shape legend: B sequences, the rows of a batch, H KV heads, G query heads per KV head, S slots, d head dim, F fields of
a record, T tasks, P programs of a KV head, X rows of a tile.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import (
    LOG2E,
    AttendConstants,
    Partials,
    keys_of_tile,
    load_group,
    no_keys_yet,
    store_partial,
)
from decode_engine.kernels.attention.row_planes import attend_run, plane_pointers
from decode_engine.kernels.device_queue import DeviceQueue
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import KEYS, KV, TAIL, TAIL_KEYS, WINDOW, field, head_rows
from index_store.attention.attention_state import AttentionState

HEADER, TASK_FIELDS = 8, 8
FIRST, MEMBERS, LEADER, PART, PARTS, WHAT, SLOT = range(7)
"""Of a task: place of its first member in the order, how many there are, the row of the first one, its part of so many,
of what, and its slot."""
READS_CONTEXT, READS_TAIL = 1, 2
"""Of what; both where added up."""
FEW_ROWS = 16
"""Query heads of a small tile."""
TAIL_SLOTS = 8
"""Parts of a tail that has tasks of its own, at most."""
_ROUNDS, _GAIN = 4, 0.95
"""Tasks that a program may have, one after the other, where more of them make the whole so much shorter."""
_TASK_KEYS = 128
"""What a task costs besides its keys, in keys; parts are no smaller."""
_STEADY_KEYS = 256

_HEADER, _TASK_FIELDS, _FIRST, _MEMBERS = map(tl.constexpr, (HEADER, TASK_FIELDS, FIRST, MEMBERS))
_LEADER, _PART, _PARTS, _WHAT, _SLOT = map(tl.constexpr, (LEADER, PART, PARTS, WHAT, SLOT))
OF_CONTEXT, OF_TAIL = tl.constexpr(READS_CONTEXT), tl.constexpr(READS_TAIL)


class Seat(NamedTuple):
    """A row of a batch. context: equal where keys and values are the same; so many keys. tail: tail keys, about."""

    row: int
    context: Hashable
    keys: int
    tail: int


class Task(NamedTuple):
    """A row of the table, see above. cost: in keys, of reading them once."""

    first: int
    members: int
    leader: int
    part: int
    parts: int
    what: int
    slot: int
    cost: float


@dataclass(slots=True)
class _Group:
    """Rows on one context. places: the first in the order, and one after the last, of those that share a task."""

    rows: list[int]
    keys: int
    tails: list[int]
    places: list[tuple[int, int]]
    parts: int = 1

    @property
    def weight(self) -> int:
        """Keys that are divided into parts."""
        return self.keys + (self.tails[0] if self.alone else 0)

    @property
    def alone(self) -> bool:
        return len(self.rows) == 1

    def most(self, programs: int) -> int:
        """Parts that are worth while."""
        return min(programs, -(-self.weight // _TASK_KEYS))

    def context_tasks(self, what: int) -> Iterator[Task]:
        """Those that read the same keys stand together, so that they do so at the same time."""
        cost = self.weight / self.parts
        for part in range(self.parts):
            for begin, end in self.places:
                leader = self.rows[begin - self.places[0][0]]
                yield Task(begin, end - begin, leader, part, self.parts, what, part, cost)

    def tail_tasks(self, unit: float) -> Iterator[Task]:
        """unit: keys of a part, about."""
        first = self.places[0][0]
        for place, (row, tail) in enumerate(zip(self.rows, self.tails, strict=True), first):
            parts = tail_parts(tail, unit)
            for part in range(parts):
                yield Task(place, 1, row, part, parts, READS_TAIL, self.parts + part, tail / parts)


def tail_parts(tail: int, unit: float) -> int:
    """Tasks for a tail of so many keys, where others have `unit` keys each."""
    return max(1, min(TAIL_SLOTS, round(tail / max(unit, _TASK_KEYS))))


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The table of a batch, made on the host and kept on the device.

    size: rows B. programs: P. slots: of a row, at most. few, many: sessions of a small and of a large tile. table:
    int32 on the device, see above.
    """

    size: int
    programs: int
    slots: int
    few: int
    many: int
    table: Tensor
    _queue: DeviceQueue

    @classmethod
    def allocate(
        cls,
        size: int,
        programs: int,
        group: int,
        many_rows: int,
        device: torch.device,
        queue: DeviceQueue | None = None,
    ) -> RowGroups:
        """No tasks. group: G, up to 16. many_rows: query heads of a large tile. queue: by which tables get there."""
        slots, few = programs + TAIL_SLOTS, FEW_ROWS // group
        length = HEADER + 3 * size + size * slots * TASK_FIELDS
        table = torch.zeros(length, dtype=torch.int32, device=device)
        many = max(few, many_rows // group)
        return cls(size, programs, slots, few, many, table, queue or DeviceQueue())

    @property
    def slots_B(self) -> Tensor:
        """Slots of every row that hold something, int32 on the device."""
        return self.table[HEADER + 2 * self.size : HEADER + 3 * self.size]

    def arrange(self, seats: Sequence[Seat], *, steady: bool = False) -> None:
        """Writes the table for these rows, all others being idle, and copies it to the device, in stream order.

        Keys are divided so that programs have equal shares, in as few parts as that takes. steady: how a row's keys are
        divided depends on nothing but its own lengths, and its tile is always a small one, so that its attention is the
        same bit for bit whoever else is in the batch.
        """
        groups = self._groups(seats, self.few if steady else self.many)
        if steady:
            for each in groups:
                each.parts = max(1, min(self.programs, -(-each.keys // _STEADY_KEYS)))
        else:
            _divide(groups, self.programs)
        unit = _STEADY_KEYS if steady else sum(_costs(groups)) / self.programs
        joined = [each for each in groups if each.alone and not steady]
        apart = [each for each in groups if not each.alone or steady]
        contexts = [task for each in apart for task in each.context_tasks(READS_CONTEXT)]
        contexts += [task for each in joined for task in each.context_tasks(READS_CONTEXT | READS_TAIL)]
        tails = [task for each in apart for task in each.tail_tasks(unit)]
        self._write(groups, _longest_first(contexts), _longest_first(tails))

    def _groups(self, seats: Sequence[Seat], most: int) -> list[_Group]:
        """Rows by context; no more than `most` of a group share a task."""
        shared: dict[Hashable, list[Seat]] = {}
        for seat in seats:
            shared.setdefault((seat.context, seat.keys), []).append(seat)
        groups, first = [], 0
        for members in shared.values():
            tiles = -(-len(members) // most)
            borders = [first + len(members) * tile // tiles for tile in range(tiles + 1)]
            groups.append(
                _Group(
                    [seat.row for seat in members],
                    members[0].keys,
                    [seat.tail for seat in members],
                    list(pairwise(borders)),
                )
            )
            first += len(members)
        return groups

    def _write(self, groups: Sequence[_Group], contexts: Sequence[Task], tails: Sequence[Task]) -> None:
        table = np.zeros(len(self.table), dtype=np.int32)
        tasks = [*contexts, *tails]
        table[:2] = len(tasks), len(contexts)
        order_B, parts_B, slots_B = table[HEADER : HEADER + 3 * self.size].reshape(3, self.size)
        place = 0
        for each in groups:
            order_B[place : place + len(each.rows)] = each.rows
            parts_B[each.rows] = slots_B[each.rows] = each.parts
            place += len(each.rows)
        rows = table[HEADER + 3 * self.size :].reshape(-1, TASK_FIELDS)
        if tasks:
            rows[: len(tasks), : SLOT + 1] = [task[: SLOT + 1] for task in tasks]
        for task in tails:
            slots_B[task.leader] = max(slots_B[task.leader], task.slot + 1)
        self._queue.send(torch.from_numpy(table), self.table)


def _costs(groups: Sequence[_Group]) -> Iterator[float]:
    return (each.weight * len(each.places) for each in groups)


def _longest_first(tasks: Sequence[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: -task.cost)


def _divide(groups: Sequence[_Group], programs: int) -> None:
    """Sets each group's parts so that the program with most to do is done soon: one task for each, or a few."""
    best, fewest = float("inf"), [1] * len(groups)
    for rounds in range(1, _ROUNDS + 1):
        _divide_once(groups, programs * rounds, programs)
        costs = [
            each.weight / each.parts + _TASK_KEYS
            for each in groups
            for _ in range(each.parts * len(each.places))
        ]
        costs.sort(reverse=True)
        longest = max(sum(costs[program::programs]) for program in range(programs))
        if longest < best * _GAIN:
            best, fewest = longest, [each.parts for each in groups]
    for each, parts in zip(groups, fewest, strict=True):
        each.parts = parts


def _divide_once(groups: Sequence[_Group], tasks: int, programs: int) -> None:
    """The largest parts are made smaller while there are tasks left."""
    for each in groups:
        each.parts = 1
    left = tasks - sum(len(each.places) for each in groups)
    largest = [(-each.weight / 1, number) for number, each in enumerate(groups)]
    heapify(largest)
    while largest:
        each = groups[largest[0][1]]
        left -= len(each.places)
        if left < 0 or each.parts >= each.most(programs):
            return
        each.parts += 1
        heapreplace(largest, (-each.weight / each.parts, largest[0][1]))


@triton.jit
def task_count(table_ptr: tl.tensor) -> tl.tensor:
    """Tasks of a KV head."""
    return tl.load(table_ptr)


@triton.jit
def load_task(table_ptr: tl.tensor, task: tl.tensor, count: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Place of the first member, members, the row of the first one, part, parts, what of, and slot; of a task whose
    number is below the count, otherwise zeros, of one part. SIZE: rows of the batch.

    No launch of a step writes the table: what it says may be read before results of the launch before are waited for.
    """
    at = table_ptr + _HEADER + 3 * SIZE + task * _TASK_FIELDS
    there = task < count
    return (
        tl.load(at + _FIRST, mask=there, other=0),
        tl.load(at + _MEMBERS, mask=there, other=0),
        tl.load(at + _LEADER, mask=there, other=0),
        tl.load(at + _PART, mask=there, other=0),
        tl.load(at + _PARTS, mask=there, other=1),
        tl.load(at + _WHAT, mask=there, other=0),
        tl.load(at + _SLOT, mask=there, other=0),
    )


@triton.jit
def member_rows(table_ptr: tl.tensor, places: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Rows of the batch that stand at these places of the order; 0 for places that are not there."""
    return tl.load(table_ptr + _HEADER + places, mask=there, other=0)


@triton.jit
def part_of(keys: tl.tensor, part: tl.tensor, parts: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """A part of so many keys, in whole tiles: its first key, and the one after its last."""
    tiles = tl.cdiv(keys, TILE)
    return part * tiles // parts * TILE, tl.minimum((part + 1) * tiles // parts * TILE, keys)


@dataclass(frozen=True, slots=True)
class SharedShape:
    """Of launches.

    rows: query heads of a large tile. tile, stages: keys of an iteration, and iterations in flight, with a small tile;
    many_tile, many_stages: with a large one. warps: of a program. programs: of a multiprocessor.
    """

    rows: int = 64
    tile: int = 64
    stages: int = 3
    many_tile: int = 64
    many_stages: int = 3
    warps: int = 4
    programs: int = 2


def shared_shape(group: int, head_dim: int, planes: bool, size: int) -> SharedShape:
    """Of launches for layers of that shape and so many sequences: sums of all programs of a processor fit registers."""
    # The heads of such a group are found in a large tile by divisions, which take registers.
    uneven = group & (group - 1) != 0
    if planes and head_dim > 128:  # decoding long rows leaves none for a large tile
        return SharedShape(rows=FEW_ROWS, tile=32, stages=2, warps=2, programs=4)
    # Two small tiles, of fewer warps that wait, are as fast as a large one.
    if planes and size * group <= 2 * FEW_ROWS:
        return SharedShape(rows=FEW_ROWS, warps=2, programs=4)
    if planes:
        return SharedShape(tile=128)
    if head_dim > 128 and uneven:
        return SharedShape(many_tile=32, warps=8, programs=1)
    if head_dim > 128:
        return SharedShape(rows=128, stages=2, many_stages=2, warps=8, programs=1)
    if head_dim == 128 and uneven and group > 8:
        return SharedShape(many_tile=32, many_stages=4)
    return SharedShape()


def shared_programs(shape: SharedShape, heads: int, device: torch.device) -> int:
    """Programs for each KV head: all multiprocessors have as many as fit, of all heads together."""
    if device.type != "cuda":
        return 4
    present = torch.cuda.get_device_properties(device).multi_processor_count * shape.programs
    return max(1, min(128, present // heads))


@triton.jit
def attend_task(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    table_ptr: tl.tensor,
    partials: tl.tensor,
    slots: tl.tensor,
    scale_log2: tl.tensor,
    task: tl.tensor,
    h: tl.tensor,
    ALONE: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """One task of a KV head (`load_task`). ALONE: it may have a single member, and read that one's tail."""
    first_place, members, leader, part, parts, what, slot = task
    sums_ptr, peaks_ptr, totals_ptr = partials
    element: tl.constexpr = q_ptr.dtype.element_ty
    x = tl.arange(0, K.X)
    d = tl.arange(0, K.DIM)
    present = x // K.GROUP < members
    b = member_rows(table_ptr, first_place + x // K.GROUP, present)
    query = (b * K.HEADS + h) * K.GROUP + x % K.GROUP
    q = tl.load(q_ptr + query[:, None] * K.DIM + d[None, :], mask=present[:, None], other=0.0)
    state = no_keys_yet(K)
    keys = field(records_ptr, leader, KEYS).to(tl.int32)
    begin, end = part_of(keys, part, parts, K.TILE)
    end = tl.where(what & OF_CONTEXT != 0, end, begin)
    rows_ptr = head_rows(records_ptr, leader, h, KV, tl.uint32 if K.PLANES else element)
    pointers = plane_pointers(records_ptr, leader, h, K)
    state = attend_run(q, rows_ptr, pointers, begin, end, state, scale_log2, K.STAGES, K)
    if ALONE:
        tail_keys = field(records_ptr, leader, TAIL_KEYS).to(tl.int32)
        begin, end = part_of(tail_keys, part, parts, K.TILE)
        rows_ptr = head_rows(records_ptr, leader, h, TAIL, element)
        end = tl.where(what & OF_TAIL != 0, end, begin)
        state = attend_run(q, rows_ptr, (), begin, end, state, scale_log2, 1, K)
    peaks, totals, sums = state
    at = ((b * K.HEADS + h).to(tl.int64) * slots + slot) * K.GROUP + x % K.GROUP
    tl.store(peaks_ptr + at, peaks, mask=present)
    tl.store(totals_ptr + at, totals, mask=present)
    found = present & (peaks != float("-inf"))
    tl.store(sums_ptr + at[:, None] * K.DIM + d[None, :], sums, mask=found[:, None])


@triton.jit(do_not_specialize=["slots"])
def shared_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    table_ptr: tl.tensor,
    partials: tl.tensor,
    slots: tl.tensor,
    scale_log2: tl.tensor,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (place, KV head): tasks in turns with the others of the head. FEW, MANY: of a small and a large tile."""
    h = tl.program_id(1)
    count = task_count(table_ptr)
    task = load_task(table_ptr, tl.program_id(0), count, SIZE)
    wait_for_launch(CHAINED)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        many = task[1] * FEW.GROUP > FEW.X
        if MANY.X > FEW.X:  # noqa: SIM102 - decided when the kernel is compiled
            if many:
                attend_task(q_ptr, records_ptr, table_ptr, partials, slots, scale_log2, task, h, False, MANY)
        if not many:
            attend_task(q_ptr, records_ptr, table_ptr, partials, slots, scale_log2, task, h, True, FEW)
        task = load_task(table_ptr, number + tl.num_programs(0), count, SIZE)


def attend_shared(
    q_BHGD: Tensor,
    records_BF: Tensor,
    groups: RowGroups,
    partials: Partials,
    scale: float,
    shape: SharedShape,
    planes: bool = False,
) -> None:
    """Fills the partial attention [B * H, S, G, d] of contexts and tails: each row's first `groups.slots_B` slots.

    q_BHGD: contiguous, unscaled, in the dtype of keys and values; G 1..16, d 64, 128 or 256. scale: of the logits.
    planes: the contexts' rows are in two planes, the low one in place of keys and values; tails are as ever.
    """
    size, heads = q_BHGD.shape[:2]
    many = shape.rows if size > groups.few else FEW_ROWS
    tiles = ((FEW_ROWS, shape.tile, shape.stages), (many, shape.many_tile, shape.many_stages))
    few, large = (
        AttendConstants.of(q_BHGD, heads, tile, stages, rows=rows, planes=planes)
        for rows, tile, stages in tiles
    )
    shared_kernel[(groups.programs, heads)](
        q_BHGD,
        records_BF,
        groups.table,
        partials,
        partials.sums_RSGD.shape[1],
        scale * LOG2E,
        FEW=few,
        MANY=large,
        SIZE=size,
        num_warps=shape.warps,
        **chained(q_BHGD.device),
    )


def attend_dense_reference(q_HGD: Tensor, kv_HN2D: Tensor, scale: float) -> AttentionState:
    """Attention [H, G, d] of one sequence to rows [H, N, 2, d], context and tail together, computed in float64.

    Of fewer rows than all it is what every kernel that selects keys is compared with.
    """
    if kv_HN2D.shape[1] == 0:
        return AttentionState.empty(q_HGD.shape[:2], q_HGD.shape[2], q_HGD.device)
    keys, values = kv_HN2D[:, :, 0].double(), kv_HN2D[:, :, 1].double()
    logits = torch.einsum("hgd,hnd->hgn", q_HGD.double() * scale, keys)
    out = torch.einsum("hgn,hnd->hgd", logits.softmax(-1), values)
    return AttentionState(out.float(), logits.logsumexp(-1).float())


@triton.jit
def attend_share(
    q: tl.tensor,
    rows_ptr: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    state: tl.tensor,
    scale_log2: tl.tensor,
    K: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Adds this program's share of the rows first .. count - 1 to a running softmax."""
    share = tl.cdiv(tl.cdiv(count - first, K.TILE), tl.num_programs(0)) * K.TILE
    begin = first + tl.program_id(0) * share
    end = tl.minimum(begin + share, count)
    return attend_run(q, rows_ptr, (), begin, end, state, scale_log2, STAGES, K)


@triton.jit
def window_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    partials: tl.tensor,
    scale_log2: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (split, row): a share of the context and one of the tail of a KV head, of the keys that WINDOW says."""
    wait_for_launch(CHAINED)
    row = tl.program_id(1)
    b = row // K.HEADS
    h = row % K.HEADS
    element: tl.constexpr = q_ptr.dtype.element_ty
    q = load_group(q_ptr, row, K)
    keys = field(records_ptr, b, KEYS).to(tl.int32)
    tail_keys = field(records_ptr, b, TAIL_KEYS).to(tl.int32)
    window = field(records_ptr, b, WINDOW).to(tl.int32)
    first = tl.maximum(keys + tail_keys - window, 0)
    if window < 0:  # the own chunk's
        first = tl.maximum(keys + tail_keys - 1, 0) // -window * -window
    context_ptr = head_rows(records_ptr, b, h, KV, element)
    state = no_keys_yet(K)
    state = attend_share(q, context_ptr, tl.minimum(first, keys), keys, state, scale_log2, K, K.STAGES)
    tail_ptr = head_rows(records_ptr, b, h, TAIL, element)
    state = attend_share(q, tail_ptr, tl.maximum(first - keys, 0), tail_keys, state, scale_log2, K, 1)
    store_partial(partials, row, tl.num_programs(0), tl.program_id(0), state, K, True)


def attend_window(q_BHGD: Tensor, records_BF: Tensor, partials: Partials, scale: float) -> None:
    """Fills the partial attention [B * H, S, G, d] of contexts and tails, one slot per split.

    q_BHGD: contiguous, unscaled, in the dtype of keys and values; G 1..16, d 64, 128 or 256. scale: of the logits.
    The last keys count, as many as the records say, or those of the last key's chunk.
    """
    rows, splits, _, _ = partials.sums_RSGD.shape
    window_kernel[(splits, rows)](
        q_BHGD,
        records_BF,
        partials,
        scale * LOG2E,
        # Two programs fit into a multiprocessor's shared memory.
        K=AttendConstants.of(q_BHGD, q_BHGD.shape[1], keys_of_tile(64, q_BHGD.shape[3]), 3),
        **chained(q_BHGD.device),
    )


@triton.jit
def tail_write_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    records_ptr: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per sequence. keys, values: a pointer, and elements from one sequence, and one KV head, on."""
    k_ptr, k_row, k_head = keys
    v_ptr, v_row, v_head = values
    wait_for_launch(CHAINED)
    b = tl.program_id(0)
    count = field(records_ptr, b, TAIL_KEYS)
    if count > 0:
        h = tl.arange(0, HEAD_TILE).to(tl.int64)
        d = tl.arange(0, DIM)
        there = (h < HEADS)[:, None]
        k = tl.load(k_ptr + b.to(tl.int64) * k_row + h[:, None] * k_head + d[None, :], mask=there)
        v = tl.load(v_ptr + b.to(tl.int64) * v_row + h[:, None] * v_head + d[None, :], mask=there)
        rows = head_rows(records_ptr, b, h, TAIL, k_ptr.dtype.element_ty) + (count - 1) * (2 * DIM)
        tl.store(rows[:, None] + d[None, :], k, mask=there)
        tl.store(rows[:, None] + DIM + d[None, :], v, mask=there)


def write_tails(k_BHD: Tensor, v_BHD: Tensor, records_BF: Tensor) -> None:
    """Writes keys and values [B, H, d] as the last of each tail's TAIL_KEYS rows; nothing for idle rows.

    Any strides, but for the last dimension's, which is 1; in the dtype of the tails.
    """
    batch, heads, head_dim = k_BHD.shape
    tail_write_kernel[(batch,)](
        (k_BHD, *k_BHD.stride()[:2]),
        (v_BHD, *v_BHD.stride()[:2]),
        records_BF,
        HEADS=heads,
        HEAD_TILE=triton.next_power_of_2(heads),
        DIM=head_dim,
        num_warps=4,
        **chained(k_BHD.device),
    )


def write_tails_reference(
    k_BHD: Tensor, v_BHD: Tensor, tails_BHT2D: list[Tensor], counts_B: list[int]
) -> None:
    """The same on tensors: tails [H, capacity, 2, d] of every sequence with their number of rows."""
    for b, (tail, count) in enumerate(zip(tails_BHT2D, counts_B, strict=True)):
        if count:
            tail[:, count - 1] = torch.stack([k_BHD[b], v_BHD[b]], dim=1)
