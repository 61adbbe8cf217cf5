"""The table of row groups gives every key of every row to one task, and programs equal shares."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from decode_engine.kernels.attention import shared_attention as row_groups
from decode_engine.kernels.attention.shared_attention import (
    READS_CONTEXT,
    READS_TAIL,
    RowGroups,
    Seat,
    load_task,
    member_rows,
    part_of,
    tail_parts,
    task_count,
)
from tests.support.devices import DEVICE

CPU = torch.device("cpu")
TILE = 64


@dataclass(frozen=True)
class Entry:
    """A task of a table, with the rows of its members."""

    rows: tuple[int, ...]
    part: int
    parts: int
    what: int
    slot: int

    def keys_of(self, keys: int) -> range:
        tiles = -(-keys // TILE)
        return range(
            self.part * tiles // self.parts * TILE, min(keys, (self.part + 1) * tiles // self.parts * TILE)
        )


def read(groups: RowGroups) -> tuple[list[Entry], list[Entry], list[int], list[int]]:
    """Tasks of contexts and the others, then parts and slots of every row."""
    table, size = groups.table.tolist(), groups.size
    begin = row_groups.HEADER
    order, parts, slots = (table[begin + size * n : begin + size * (n + 1)] for n in range(3))
    entries = []
    for number in range(table[0]):
        at = begin + 3 * size + number * row_groups.TASK_FIELDS
        first, members, leader, part, count, what, slot = table[at : at + 7]
        rows = tuple(order[first : first + members])
        assert rows[0] == leader
        entries.append(Entry(rows, part, count, what, slot))
    return entries[: table[1]], entries[table[1] :], parts, slots


def covered(parts: Sequence[range]) -> int:
    """How many keys there are in parts that follow one another from key 0 on."""
    keys = 0
    for part in sorted((part for part in parts if len(part)), key=lambda part: part.start):
        assert part.start == keys
        keys = part.stop
    return keys


def random_seats(seed: int, size: int) -> list[Seat]:
    choose = random.Random(seed)
    contexts = [choose.choice([1, 63, 64, 1000, 32768, 131072]) for _ in range(choose.randint(1, size))]
    rows = choose.sample(range(size), choose.randint(1, size))
    numbers = [choose.randrange(len(contexts)) for _ in rows]
    return [
        Seat(row, number, contexts[number], choose.choice([1, 64, 5000]))
        for row, number in zip(rows, numbers, strict=True)
    ]


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("group", [1, 4, 7, 9, 16])
def test_every_key_of_every_row_is_in_one_task(group: int, steady: bool) -> None:
    for seed in range(12):
        size, programs = (1, 16, 64)[seed % 3], (1, 5, 33)[seed // 4]
        groups = RowGroups.allocate(size, programs, group, 64, CPU)
        seats = random_seats(seed, size)
        groups.arrange(random_seats(seed + 1, size))  # what was there before is gone
        groups.arrange(seats, steady=steady)
        contexts, tails, parts, slots = read(groups)
        limit = 16 // group if steady else max(16 // group, 64 // group)
        filled: dict[int, list[int]] = defaultdict(list)
        found: dict[tuple[int, int], list[range]] = defaultdict(list)
        by_row = {seat.row: seat for seat in seats}
        for entry in (*contexts, *tails):
            assert len({by_row[row].context for row in entry.rows}) == 1
            assert len(entry.rows) <= (limit if entry.what == READS_CONTEXT else 1)
            for row in entry.rows:
                filled[row].append(entry.slot)
                if entry.what & READS_CONTEXT:
                    found[row, READS_CONTEXT].append(entry.keys_of(by_row[row].keys))
                if entry.what & READS_TAIL:
                    found[row, READS_TAIL].append(entry.keys_of(by_row[row].tail))
        assert all(entry.what & READS_CONTEXT for entry in contexts)
        assert all(entry.what == READS_TAIL for entry in tails)
        for seat in seats:
            assert sorted(filled[seat.row]) == list(range(slots[seat.row]))
            assert covered(found[seat.row, READS_CONTEXT]) == seat.keys
            assert covered(found[seat.row, READS_TAIL]) == seat.tail
            assert parts[seat.row] <= slots[seat.row] <= groups.slots
        assert sum(slots) == sum(slots[seat.row] for seat in seats)


def test_a_steady_row_is_divided_as_when_it_is_alone() -> None:
    groups = RowGroups.allocate(16, 33, 4, 64, CPU)
    seats = random_seats(5, 16)

    def own(row: int) -> list[tuple[int, int, int, int]]:
        contexts, tails, _, _ = read(groups)
        return sorted((e.what, e.part, e.parts, e.slot) for e in (*contexts, *tails) if row in e.rows)

    groups.arrange(seats, steady=True)
    together = {seat.row: own(seat.row) for seat in seats}
    for seat in seats:
        groups.arrange([seat], steady=True)
        assert own(seat.row) == together[seat.row]


@pytest.mark.parametrize(
    ("members", "least"),
    [([1], 0.98), ([16], 0.98), ([64], 0.95), ([1] * 16, 0.95), ([8, 4, 2, 1, 1], 0.93), ([1] * 20, 0.9)],
)
def test_programs_have_equal_shares(members: Sequence[int], least: float) -> None:
    """The mean program reads at least that share of what the one with most to do reads."""
    groups = RowGroups.allocate(64, 33, 4, 64, CPU)
    contexts = [number for number, count in enumerate(members) for _ in range(count)]
    groups.arrange([Seat(row, context, 131072, 1) for row, context in enumerate(contexts)])
    tasks, _, _, _ = read(groups)
    reads = [sum(len(task.keys_of(131072)) for task in tasks[program::33]) for program in range(33)]
    assert sum(reads) / 33 >= least * max(reads)


def test_tasks_that_read_the_same_keys_stand_together() -> None:
    groups = RowGroups.allocate(64, 33, 4, 64, CPU)
    groups.arrange([Seat(row, "same", 32768, 1) for row in range(64)])
    tasks, tails, _, _ = read(groups)
    assert [task.part for task in tasks] == [part for part in range(8) for _ in range(4)]
    assert sorted(len(task.rows) for task in tasks) == [16] * 32
    assert len(tails) == 64


@triton.jit
def read_kernel(table_ptr: tl.tensor, out_ptr: tl.tensor, SIZE: tl.constexpr) -> None:
    """Program n writes what kernels read of task n, and the first rows of its members."""
    task, count = tl.program_id(0), task_count(table_ptr)
    first, members, leader, part, parts, what, slot = load_task(table_ptr, task, count, SIZE)
    at = out_ptr + task * 16
    tl.store(at, count)
    tl.store(at + 3, leader)
    begin, end = part_of(first * 0 + 1000, part, parts, 64)
    tl.store(at + 4, tl.where(members > 0, begin, -1))
    tl.store(at + 5, tl.where(members > 0, end, -1))
    tl.store(at + 6, what)
    tl.store(at + 7, slot)
    n = tl.arange(0, 8)
    tl.store(at + 8 + n, member_rows(table_ptr, first + n, n < members), mask=n < members)


def test_kernels_read_what_the_table_says() -> None:
    groups = RowGroups.allocate(16, 3, 2, 64, torch.device(DEVICE))
    groups.arrange([Seat(row, row % 3, 1000, 70) for row in range(1, 12)], steady=True)
    contexts, tails, _, _ = read(groups)
    tasks = [*contexts, *tails]
    out = torch.full((len(tasks) + 1, 16), -1, dtype=torch.int32, device=DEVICE)
    read_kernel[(len(tasks) + 1,)](groups.table, out, SIZE=16)
    *found, behind = out.tolist()
    for task, values in zip(tasks, found, strict=True):
        tiles = -(-1000 // 64)
        begin = task.part * tiles // task.parts * 64
        end = min((task.part + 1) * tiles // task.parts * 64, 1000)
        head = [len(tasks), -1, -1, task.rows[0], begin, end, task.what, task.slot]
        assert values == [*head, *task.rows, *[-1] * (8 - len(task.rows))]
    assert behind[3:] == [0, -1, -1, 0, 0] + [-1] * 8


def test_long_tails_are_divided() -> None:
    assert tail_parts(64, 4096.0) == 1
    assert tail_parts(16384, 4096.0) == 4
    assert tail_parts(2**20, 4096.0) == row_groups.TAIL_SLOTS
