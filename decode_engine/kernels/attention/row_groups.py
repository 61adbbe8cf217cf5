"""Row groups: which sessions of a batch stand on the same context, and which program works on what of it.

Keys and values of a context are read once for all sessions on it. Who shares a context changes with every session that
comes or goes, and a captured graph must serve any grouping, so that is data: a table of int32 in device memory, which
the host writes when a batch changes (`RowGroups.arrange`) and kernels read (`task_count`, `load_task`, `member_rows`).

A group is the rows of a batch on one context. Its work is cut into *tasks*, for each KV head alike: one of several
parts of the context's keys, for up to as many sessions as fit into a tile. The programs of a KV head take tasks in
turns: program p those of numbers p, p + P, p + 2 P, and so on. What a task yields for a session goes into one of the
slots of that session's row (`Partials`): the number of the part. The tail of a session is its own: a session alone in
its group has its tail attended to by the tasks of its context, each by one part of it; where several share a context,
each has tasks for its tail, whose slots follow those of the context.

The table, one after the other: number of tasks, and of those with a part of a context, which come first; at HEADER the
rows in the order of their groups [B]; parts of its context for every row [B], and slots that it has in all [B]; and the
tasks [T, TASK_FIELDS]. A table of zeros has no tasks; idle rows have no slots.

Shape legend: B rows of a batch, T tasks, P programs of a KV head, G query heads per KV head.
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

from decode_engine.kernels.device_queue import DeviceQueue

HEADER, TASK_FIELDS = 8, 8
FIRST, MEMBERS, LEADER, PART, PARTS, WHAT, SLOT = range(7)
"""Of a task: place of its first member in the order, how many there are, the row of the first one, its part of so many,
of what, and its slot."""
CONTEXT, TAIL = 1, 2
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

_HEADER, _TASK_FIELDS = tl.constexpr(HEADER), tl.constexpr(TASK_FIELDS)
_FIRST, _MEMBERS, _LEADER = tl.constexpr(FIRST), tl.constexpr(MEMBERS), tl.constexpr(LEADER)
_PART, _PARTS = tl.constexpr(PART), tl.constexpr(PARTS)
_WHAT, _SLOT = tl.constexpr(WHAT), tl.constexpr(SLOT)
OF_CONTEXT, OF_TAIL = tl.constexpr(CONTEXT), tl.constexpr(TAIL)


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
                yield Task(place, 1, row, part, parts, TAIL, self.parts + part, tail / parts)


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
        contexts = [task for each in apart for task in each.context_tasks(CONTEXT)]
        contexts += [task for each in joined for task in each.context_tasks(CONTEXT | TAIL)]
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
