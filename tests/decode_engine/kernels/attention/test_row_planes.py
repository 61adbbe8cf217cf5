"""Attention over rows in two planes equals that over the decoded rows, and decoding equals `TwoPlanes` bit for bit.

Without a CUDA device kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.online_softmax import (
    AttendConstants,
    Partials,
    merge_partials,
    merge_partials_reference,
)
from decode_engine.kernels.attention.row_planes import load_part, plane_pointers
from decode_engine.kernels.attention.shared_attention import (
    RowGroups,
    Seat,
    attend_dense_reference,
    attend_shared,
    shared_shape,
)
from decode_engine.kernels.attention.sparse_attention import (
    SUMS,
    ClusterScores,
    TakeOut,
    attend_lists,
    attend_lists_reference,
    list_programs,
)
from decode_engine.kernels.clusters.lookup import correct_clusters, look_up, lookup_slots
from decode_engine.kernels.clusters.reference import remainder_reference
from decode_engine.kernels.record_fields import KV, head_rows
from tests.decode_engine.kernels.problems.cluster_problems import (
    Problem,
    make_problem,
    random_lists,
    relative_error,
)
from tests.decode_engine.kernels.problems.plane_problems import low_slots, with_planes
from tests.support.devices import DEVICE, DTYPES

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else [pytest.mark.usefixtures("watched")]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@triton.jit
def decode_kernel(
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    count: tl.tensor,
    K: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    entry = tl.arange(0, K.TILE)
    there = entry < count
    ids = tl.load(ids_ptr + head * count + entry, mask=there, other=0)
    low_ptr = head_rows(records_ptr, 0, head.to(tl.int64), KV, tl.uint32)
    pointers = plane_pointers(records_ptr, 0, head, K)
    at = ids.to(tl.int64) * (K.DIM // 4)
    element: tl.constexpr = out_ptr.dtype.element_ty
    keys = load_part(low_ptr, at, pointers, ids, there, False, K, element)
    values = load_part(low_ptr, at, pointers, ids, there, True, K, element)
    into = out_ptr + (head * count + entry)[:, None] * (2 * K.DIM) + tl.arange(0, K.DIM)[None, :]
    tl.store(into, keys, mask=there[:, None])
    tl.store(into + K.DIM, values, mask=there[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decoding_equals_two_planes(head_dim: int, dtype: torch.dtype) -> None:
    """Bit for bit; of float16 what code 128 stands for may be rounded before."""
    problem, planes = with_planes(make_problem([300], heads=2, head_dim=head_dim, device=DEVICE))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 300, (2, 100), generator=generator, dtype=torch.int32).to(DEVICE)
    out = torch.full((2, 100, 2, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    constants = AttendConstants.of(out[:, 0], 2, 128, 1, planes=True)
    decode_kernel[(2,)](problem.records_BF, ids, out, 100, K=constants)
    expected = planes[0].pick(ids)
    if dtype == torch.float32:
        assert torch.equal(out, expected)
    else:
        assert ((out - expected).abs() <= 2.0**-11 * (expected.abs() + expected.abs().amax())).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "tails", "group", "head_dim", "segments", "located"),
    [
        ([170, 0, 5], (1, 0, 130), 1, 64, 3, False),
        ([300], (40,), 4, 128, 1, True),
        ([140, 9], (0, 3), 4, 64, 2, True),
        ([140], (3,), 9, 256, 2, True),
        ([90, 5], (0, 70), 16, 256, 1, False),
    ],
)
def test_listed_keys(
    dtype: torch.dtype,
    lengths: list[int],
    tails: tuple[int, ...],
    group: int,
    head_dim: int,
    segments: int,
    located: bool,
) -> None:
    """Beside sinks, recent window and tail. Located rows are partly in slots, where alone they are right."""
    problem, planes = with_planes(
        make_problem(lengths, group=group, head_dim=head_dim, tails=tails, dtype=dtype, device=DEVICE)
    )
    lists = random_lists(problem, 0.6, segments)
    programs = list_programs(problem.rows, lists)
    partials = Partials.allocate(problem.rows, programs, group, head_dim, problem.q_RGD.device)
    kept_RX = torch.full((problem.rows, programs), -1, dtype=torch.int32, device=DEVICE)
    joined_RN = torch.full((problem.rows, max(lengths)), -1, dtype=torch.int32, device=DEVICE)
    given, locations_RN, slots = problem.records_BF, None, []
    if located:
        given, locations_RN, slots = low_slots(problem, planes, lists, joined_RN)
        assert slots
    attend_lists(
        problem.q_RGD,
        given,
        lists,
        joined_RN,
        partials,
        problem.scale,
        kept_RX=kept_RX,
        locations_RN=locations_RN,
        planes=True,
    )
    out, lse = merge_partials(partials)
    expected = attend_lists_reference(problem.q_RGD, problem.sequences, lists, problem.scale)
    assert relative_error(out, expected.out) < TOLERANCE[dtype]
    torch.testing.assert_close(lse, expected.lse, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for row in range(problem.rows):
        assert int(kept_RX[row].sum()) == len(lists.of_row(row))
        if problem.sequences[row // problem.heads] is None:
            assert (out[row] == 0).all()


def test_keys_leave_their_clusters() -> None:
    problem, _ = with_planes(make_problem([200, 0, 31], group=3, tails=(2, 0, 70), device=DEVICE))
    lists = random_lists(problem, 0.3, 2)
    rows, group, head_dim = problem.q_RGD.shape
    programs, splits = list_programs(rows, lists), lookup_slots(rows, problem.width)
    partials = Partials.allocate(rows, splits + 2 * programs, group, head_dim, problem.q_RGD.device)
    joined_RN = torch.full((rows, 200), -1, dtype=torch.int32, device=DEVICE)
    scores = ClusterScores.allocate(rows, problem.width, group, True, DEVICE)
    given = (problem.q_RGD, problem.records_BF)
    look_up(*given, scores, partials, problem.scale)
    attend_lists(
        *given,
        lists,
        joined_RN,
        partials,
        problem.scale,
        first_slot=splits,
        take_out=TakeOut(scores, SUMS),
        planes=True,
    )
    correct_clusters(*given, lists, joined_RN, scores, partials, splits + programs, planes=True)
    out, lse = merge_partials(partials)
    expected = attend_lists_reference(problem.q_RGD, problem.sequences, lists, problem.scale).merge(
        remainder_reference(problem.q_RGD, problem.sequences, lists, problem.scale, "centred")
    )
    assert relative_error(out, expected.out) < 2e-4
    torch.testing.assert_close(lse, expected.lse, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "tails", "context_of", "group", "head_dim"),
    [
        ([300, 63], (130, 0), [0, None, 1], 1, 64),
        ([140], (3, 64, 0, 9, 1), [0] * 9, 4, 128),
        ([129], (70,), [0], 4, 64),
        ([300], (3, 64, 0), [0] * 9, 4, 64),
        ([129], (70, 9), [0] * 4, 9, 128),
        ([140], (3, 64, 0), [0] * 3, 16, 128),
        ([129], (70, 9), [0] * 2, 9, 256),
    ],
)
def test_everything_is_attended_once_for_all_sessions(
    dtype: torch.dtype,
    lengths: list[int],
    tails: tuple[int, ...],
    context_of: list[int | None],
    group: int,
    head_dim: int,
) -> None:
    """Nine sessions of four heads are a large tile."""
    made, _ = with_planes(
        make_problem(
            lengths, heads=2, group=group, head_dim=head_dim, tails=tails, dtype=dtype, device=DEVICE
        )
    )
    check_shared(made, context_of, tails, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sessions", [1, 9])
@pytest.mark.parametrize("case", ["offsets", "large", "tiny", "mixed", "dominant", "flat"])
def test_hard_rows(case: str, sessions: int, dtype: torch.dtype) -> None:
    """Channels far from zero, large, small, or both beside each other; one key with all the weight, or none."""
    made = make_problem([300], heads=2, group=4, head_dim=128, tails=(0,), dtype=dtype, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    sequence = made.sequences[0]
    keys, values = sequence.kv_HN2D.float().unbind(2)
    factors = {"large": 200.0, "tiny": 1e-3}.get(case, 1.0)
    if case == "offsets":
        keys, values = keys + 10 * torch.randn(128, generator=generator).to(DEVICE), values + 10
    elif case == "mixed":
        factors = torch.exp(3 * torch.randn(128, generator=generator)).to(DEVICE)
        values = values * torch.exp(2 * torch.randn(300, 1, generator=generator)).to(DEVICE)
    elif case == "dominant":
        keys[:, 140] += 30 * made.q_RGD[:, 0].float() / made.q_RGD[:, 0].float().norm(dim=1, keepdim=True)
    elif case == "flat":
        keys = keys * 1e-2
    rows = torch.stack([keys * factors, values * (factors if case != "mixed" else 1.0)], dim=2).to(dtype)
    made = replace(made, sequences=(replace(sequence, kv_HN2D=rows),))
    coded, _ = with_planes(made)
    tolerance = TOLERANCE[dtype]
    if case == "offsets" and dtype == torch.float16:
        tolerance = 2.0**-7  # to which float16 rounds numbers from 16 to 32, as most offsets of keys are
    check_shared(coded, [0] * sessions, (0,), tolerance, 1.0 / factors)


def check_shared(
    made: Problem,
    context_of: list[int | None],
    tails: tuple[int, ...],
    tolerance: float,
    factors: float | Tensor = 1.0,
) -> None:
    """Attention to everything is that to the decoded rows. factors: of queries."""
    heads, (_, group, head_dim) = made.heads, made.q_RGD.shape
    batch = Shared.of(made, context_of, tails)
    batch.q_BHGD.copy_(batch.q_BHGD * factors)
    shape = shared_shape(group, head_dim, True, len(context_of))
    groups = RowGroups.allocate(len(context_of), 2, group, shape.rows, batch.q_BHGD.device)
    groups.arrange(batch.seats())
    rows = len(context_of) * heads
    partials = Partials.allocate(rows, groups.slots, group, head_dim, batch.q_BHGD.device)
    attend_shared(batch.q_BHGD, batch.records_BF, groups, partials, made.scale, shape, planes=True)
    out, lse = merge_partials_reference(partials, slots_B=groups.slots_B)
    out, lse = out.view(batch.q_BHGD.shape), lse.view(batch.q_BHGD.shape[:3])
    for b, context in enumerate(context_of):
        if context is None:
            assert not out[b].any()
            continue
        sequence = made.sequences[context]
        rows_HN2D = torch.cat([sequence.kv_HN2D.to(batch.q_BHGD), batch.tails[b]], dim=1)
        expected = attend_dense_reference(batch.q_BHGD[b], rows_HN2D, made.scale)
        assert relative_error(out[b], expected.out) < tolerance
        torch.testing.assert_close(lse[b], expected.lse, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Shared:
    """Sessions with tails of their own on the contexts of a problem; those on none are idle."""

    q_BHGD: Tensor
    tails: list[Tensor]
    records_BF: Tensor
    context_of: list[int | None]
    keys: list[int]

    @classmethod
    def of(cls, made: Problem, context_of: list[int | None], tails: tuple[int, ...]) -> Shared:
        generator = torch.Generator().manual_seed(7)
        _, group, head_dim = made.q_RGD.shape
        dtype, rows, own = made.q_RGD.dtype, [], []
        for b, context in enumerate(context_of):
            count = tails[min(b, len(tails) - 1)]
            tail = torch.randn(made.heads, count, 2, head_dim, generator=generator).to(DEVICE, dtype)
            record = torch.zeros(records.RECORD_FIELDS, dtype=torch.int64)
            if context is not None:
                record = made.records_BF[context].cpu().clone()
                record[records.TAIL] = tail.data_ptr()
                record[records.TAIL_HEAD] = tail.stride(0) * tail.element_size()
                record[records.TAIL_KEYS] = count
            rows.append(record)
            own.append(tail)
        q_BHGD = 2 * torch.randn(len(context_of), made.heads, group, head_dim, generator=generator)
        keys = [0 if sequence is None else sequence.kv_HN2D.shape[1] for sequence in made.sequences]
        return cls(q_BHGD.to(DEVICE, dtype), own, torch.stack(rows).to(DEVICE), context_of, keys)

    def seats(self) -> list[Seat]:
        return [
            Seat(b, context, self.keys[context], self.tails[b].shape[1])
            for b, context in enumerate(self.context_of)
            if context is not None
        ]
