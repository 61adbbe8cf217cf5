"""Attention to everything where sessions share contexts, and to windows: who reads what, and the same as eagerly."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention import shared_attention as row_groups
from decode_engine.kernels.attention.online_softmax import Partials, merge_partials, merge_partials_reference
from decode_engine.kernels.attention.shared_attention import (
    READS_CONTEXT,
    READS_TAIL,
    RowGroups,
    Seat,
    attend_dense_reference,
    attend_shared,
    attend_window,
    load_task,
    member_rows,
    part_of,
    shared_shape,
    tail_parts,
    task_count,
    write_tails,
    write_tails_reference,
)
from tests.decode_engine.kernels.problems.cluster_problems import make_problem, padded, relative_error
from tests.support.devices import DEVICE, DTYPES

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


TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Batch:
    """Rows on contexts that some of them share; those on none are idle. Rows behind contexts and tails hold nan."""

    q_BHGD: Tensor
    kv: list[Tensor]
    context_of: Sequence[int | None]
    tails: list[Tensor]
    records_BF: Tensor

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        context_of: Sequence[int | None],
        tails: Sequence[int],
        *,
        heads: int = 1,
        group: int = 4,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
    ) -> Batch:
        generator = torch.Generator().manual_seed(sum(lengths) + len(tails) + group)

        def rows(count: int) -> Tensor:
            return torch.randn(heads, count, 2, head_dim, generator=generator).to(dtype)

        kv = [padded(rows(length), 3).to(DEVICE)[:, :length] for length in lengths]
        own = [padded(rows(tail), 2).to(DEVICE)[:, :tail] for tail in tails]
        records_BF = torch.zeros(len(tails), records.RECORD_FIELDS, dtype=torch.int64)
        for b, context in enumerate(context_of):
            if context is not None:
                for field, rows_HN2D in ((records.KV, kv[context]), (records.TAIL, own[b])):
                    records_BF[b, field] = rows_HN2D.data_ptr()
                    records_BF[b, field + 1] = rows_HN2D.stride(0) * rows_HN2D.element_size()
                records_BF[b, records.KEYS] = lengths[context]
                records_BF[b, records.TAIL_KEYS] = tails[b]
        q_BHGD = 2 * torch.randn(len(tails), heads, group, head_dim, generator=generator)
        return cls(q_BHGD.to(DEVICE, dtype), kv, context_of, own, records_BF.to(DEVICE))

    def seats(self) -> list[Seat]:
        return [
            Seat(b, context, self.kv[context].shape[1], self.tails[b].shape[1])
            for b, context in enumerate(self.context_of)
            if context is not None
        ]

    def attend(self, groups: RowGroups) -> tuple[Tensor, Tensor]:
        """Out [B, H, G, d] and lse [B, H, G], by the kernels, whose buffers hold nan before."""
        size, heads, group, head_dim = self.q_BHGD.shape
        partials = Partials.allocate(size * heads, groups.slots, group, head_dim, self.q_BHGD.device)
        for buffer in (partials.sums_RSGD, partials.peaks_RSG, partials.totals_RSG):
            buffer.fill_(torch.nan)
        attend_shared(
            self.q_BHGD,
            self.records_BF,
            groups,
            partials,
            head_dim**-0.5,
            shared_shape(group, head_dim, False, size),
        )
        out, lse = merge_partials_reference(partials, slots_B=groups.slots_B)
        return out.view(size, heads, group, head_dim), lse.view(size, heads, group)

    def check(self, out: Tensor, lse: Tensor) -> None:
        limit = TOLERANCE[self.q_BHGD.dtype]
        for b, context in enumerate(self.context_of):
            if context is None:
                assert not out[b].any()
                assert torch.isneginf(lse[b]).all()
                continue
            kv_HN2D = torch.cat([self.kv[context], self.tails[b]], dim=1)
            expected = attend_dense_reference(self.q_BHGD[b], kv_HN2D, self.q_BHGD.shape[3] ** -0.5)
            assert relative_error(out[b], expected.out) < limit
            torch.testing.assert_close(lse[b], expected.lse, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "context_of", "tails", "group", "head_dim", "programs"),
    [
        ([63, 100], [0, None, 1], [1, 0, 130], 1, 64, 3),
        ([500, 1], [0, 0, 1, None, 0, 0, 0], [3, 64, 0, 0, 1, 9, 65], 4, 128, 2),
        ([129], [0] * 11, [5] * 11, 7, 64, 1),
        ([130, 9], [0, 1, 0, 0, 0], [3, 0, 65, 0, 1], 16, 128, 2),
        ([129], [0] * 8, [5] * 8, 9, 128, 1),
        ([70, 5], [0, 0, None, 1, 0], [33, 0, 0, 7, 1], 9, 256, 2),
        ([40], [0, 0, 0], [1, 0, 20], 16, 256, 1),
    ],
)
def test_shared_attention(
    dtype: torch.dtype,
    lengths: list[int],
    context_of: list[int | None],
    tails: list[int],
    group: int,
    head_dim: int,
    programs: int,
) -> None:
    batch = Batch.make(lengths, context_of, tails, group=group, head_dim=head_dim, dtype=dtype)
    many_rows = shared_shape(group, head_dim, False, 5).rows
    groups = RowGroups.allocate(len(tails), programs, group, many_rows, batch.q_BHGD.device)
    groups.arrange(batch.seats())
    batch.check(*batch.attend(groups))


@pytest.mark.parametrize(("group", "head_dim"), [(4, 64), (16, 256)])
def test_steady_attention_is_the_same_bits_beside_others(group: int, head_dim: int) -> None:
    batch = Batch.make([130, 20], [0, 1, 0, 0, 0, 0], [70, 1, 0, 5, 3, 2], group=group, head_dim=head_dim)
    many_rows = shared_shape(group, head_dim, False, 5).rows
    groups = RowGroups.allocate(6, 2, group, many_rows, batch.q_BHGD.device)
    groups.arrange(batch.seats(), steady=True)
    out, lse = batch.attend(groups)
    batch.check(out, lse)
    for number in (0, 5):
        groups.arrange([batch.seats()[number]], steady=True)
        alone, _ = batch.attend(groups)
        assert torch.equal(alone[number], out[number])
        assert not alone[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "tails", "heads", "group", "head_dim", "splits"),
    [
        ([63, 0, 100], (1, 0, 130), 2, 1, 64, 3),
        ([500], (64,), 1, 4, 128, 1),
        ([1, 129], (0, 3), 1, 5, 64, 2),
        ([100], (0,), 3, 8, 64, 5),
        ([70, 0, 33], (1, 0, 40), 1, 16, 128, 2),
        ([40, 100], (70, 0), 2, 9, 256, 3),
    ],
)
def test_attention_to_a_window_over_everything(
    dtype: torch.dtype,
    lengths: list[int],
    tails: tuple[int, ...],
    heads: int,
    group: int,
    head_dim: int,
    splits: int,
) -> None:
    problem = make_problem(
        lengths, heads=heads, group=group, head_dim=head_dim, tails=tails, dtype=dtype, device=DEVICE
    )
    partials = Partials.allocate(problem.rows, splits, group, head_dim, problem.q_RGD.device)
    for buffer in (partials.sums_RSGD, partials.peaks_RSG, partials.totals_RSG):
        buffer.fill_(torch.nan)
    q_BHGD = problem.q_RGD.view(len(lengths), heads, group, head_dim)
    records_BF = problem.records_BF.clone()
    records_BF[:, records.WINDOW] = 1000
    attend_window(q_BHGD, records_BF, partials, problem.scale)
    out, lse = (found.view(len(lengths), heads, *found.shape[1:]) for found in merge_partials(partials))
    for b, sequence in enumerate(problem.sequences):
        if sequence is None:
            assert not out[b].any()
            assert torch.isneginf(lse[b]).all()
            continue
        kv_HN2D = torch.cat([sequence.kv_HN2D, sequence.tail_HT2D[:, : sequence.tail_keys]], dim=1)
        expected = attend_dense_reference(q_BHGD[b], kv_HN2D, problem.scale)
        assert relative_error(out[b], expected.out) < TOLERANCE[dtype]
        torch.testing.assert_close(lse[b], expected.lse, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [1, 32, 40, 500])
def test_attention_to_a_window(window: int, chunked: bool) -> None:
    """Rows that no query sees are not there: what lies before the others must not be read."""
    lengths, tails = [63, 0, 100, 30], (1, 0, 130, 10)
    problem = make_problem(lengths, heads=2, group=4, tails=tails, device=DEVICE)
    records_BF = problem.records_BF.clone()
    records_BF[:, records.WINDOW] = -window if chunked else window
    kept = []
    for b, sequence in enumerate(problem.sequences):
        if sequence is not None:
            kv = sequence.kv_HN2D[:, max(0, sequence.kv_HN2D.shape[1] - window) :].clone()
            kept.append(kv)
            row = kv.stride(1) * kv.element_size()
            records_BF[b, records.KV] = kv.data_ptr() - (sequence.kv_HN2D.shape[1] - kv.shape[1]) * row
            records_BF[b, records.KV_HEAD] = kv.stride(0) * kv.element_size()
    q_BHGD = problem.q_RGD.view(len(lengths), 2, 4, 64)
    partials = Partials.allocate(problem.rows, 3, 4, 64, problem.q_RGD.device)
    attend_window(q_BHGD, records_BF, partials, problem.scale)
    out, lse = (found.view(len(lengths), 2, *found.shape[1:]) for found in merge_partials(partials))
    for b, sequence in enumerate(problem.sequences):
        if sequence is None:
            assert not out[b].any()
            continue
        kv_HN2D = torch.cat([sequence.kv_HN2D, sequence.tail_HT2D[:, : sequence.tail_keys]], dim=1)
        count = kv_HN2D.shape[1]
        kv_HN2D = kv_HN2D[:, (count - 1) // window * window if chunked else max(0, count - window) :]
        expected = attend_dense_reference(q_BHGD[b], kv_HN2D, problem.scale)
        assert relative_error(out[b], expected.out) < TOLERANCE[torch.float32]
        torch.testing.assert_close(lse[b], expected.lse, rtol=2e-5, atol=2e-5)


def test_dense_attention_to_no_keys_is_nothing() -> None:
    nothing = attend_dense_reference(torch.ones(2, 3, 64), torch.ones(2, 0, 2, 64), 1.0)
    assert not nothing.out.any()
    assert torch.isneginf(nothing.lse).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 128), (3, 64), (8, 128), (16, 256)])
def test_tails_get_the_newest_token(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Nothing else of them changes. Keys and values are parts of one wider tensor, as a projection leaves them."""
    problem = make_problem(
        [63, 0, 100, 5], heads=heads, head_dim=head_dim, tails=(1, 0, 33, 0), dtype=dtype, device=DEVICE
    )
    torch.manual_seed(heads)
    qkv = torch.randn(4, 4 * heads, head_dim, dtype=dtype).to(DEVICE)
    k_BHD, v_BHD = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
    tails: list[Tensor] = []
    for sequence in problem.sequences:
        tails.append(torch.empty(heads, 0, 2, head_dim) if sequence is None else sequence.tail_HT2D)
    expected = [tail.clone() for tail in tails]
    write_tails(k_BHD, v_BHD, problem.records_BF)
    counts = [0 if sequence is None else sequence.tail_keys for sequence in problem.sequences]
    write_tails_reference(k_BHD, v_BHD, expected, counts)
    assert torch.equal(tails[0][:, 0, 0], k_BHD[0])
    for tail, wanted in zip(tails, expected, strict=True):
        assert torch.equal(tail.nan_to_num(7.0), wanted.nan_to_num(7.0))
