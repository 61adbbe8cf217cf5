"""The index of coarse rows: what it scores, what sessions append, what it holds, and what it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.parameters import BITS, BLOCK, CoarseParameters, row_bytes, value_groups
from index_store.indexes.coarse_rows.planes_numba import decode_listed, decode_run
from index_store.indexes.coarse_rows.reference import attend_values_reference, score_keys_reference
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows, code_rows_reference, pack, unpack
from index_store.indexes.coarse_rows.two_planes import (
    TwoPlanes,
    decode_listed_reference,
    decode_run_reference,
    find_low_plane,
)
from index_store.indexes.coarse_rows.value_sums_numba import NEGLIGIBLE
from index_store.indexes.interface.index_kind import Growth
from index_store.indexes.interface.layer_index import LayerSource
from index_store.methods.method import INDEX_SPECS
from index_store.selection.budgets import REMAINDERS
from index_store.selection.remainder_states import ExactKeys, remainder_state
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample
from tests.support.devices import crossed

HEADS, DIM, GROUP = 2, 32, 3
PARAMETERS = {name: INDEX_SPECS[name].parameters for name in ("coarse_rows", "coarse_rows_3")}
NO_QUERIES = QuerySample(torch.empty(HEADS, 0, GROUP, DIM), torch.empty(0, dtype=torch.int64))

ROUNDING = {"coarse_rows": 0.1, "coarse_rows_3": 0.2}
"""What rounding queries to 8 bits may do on a CPU to these logits, which reach 30."""

every_width = pytest.mark.parametrize("name", PARAMETERS)


def build(name: str, kv: torch.Tensor, **changes: Scalar) -> CoarseRows:
    return CoarseRows.build({**PARAMETERS[name], "iterations": 2, **changes}, LayerSource(kv, NO_QUERIES), 0)


def queries(positions: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(HEADS, positions, GROUP, DIM, generator=generator) / DIM**0.5


@every_width
def test_it_is_built_without_queries_where_keys_and_values_are(name: str) -> None:
    kv = random_rows(300, DIM, dtype=torch.bfloat16)
    index = build(name, kv)
    assert not CoarseRows.needs_queries
    ranking = index.rank(queries(), 5, 290, None, {})
    keys = index.rows.decode_keys(5, 290)
    torch.testing.assert_close(
        ranking.logits_HTGM, torch.einsum("htgd,hnd->htgn", queries(), keys), rtol=1e-4, atol=ROUNDING[name]
    )
    error = (keys - kv[:, 5:290, 0].float()).norm() / kv[:, 5:290, 0].float().norm()
    assert float(error) < 0.15


@pytest.mark.parametrize("name", ["coarse_rows", "coarse_rows_3"])
def test_appended_rows_equal_those_of_one_context_where_a_block_ends(name: str) -> None:
    kv = random_rows(700, DIM)
    index, longer = build(name, kv[:, :384]), build(name, kv)
    appended = index.start_appending()
    for piece in kv[:, 384:].split(50, dim=1):
        appended.append(piece)
    one = index.rank(queries(), 8, 700, appended, {})
    other = longer.rank(queries(), 8, 700, None, {})
    assert torch.equal(one.logits_HTGM, other.logits_HTGM)
    assert torch.equal(appended.rows.decode_values(0, 316), longer.rows.decode_values(384, 700))


@every_width
def test_a_range_is_scored_wherever_it_lies(name: str) -> None:
    index = build(name, random_rows(200, DIM))
    appended = index.start_appending()
    appended.append(random_rows(100, DIM, seed=2))
    everything = index.rank(queries(), 0, 300, appended, {})
    for first, end in ((0, 300), (10, 150), (150, 250), (200, 300), (230, 260), (40, 40)):
        part = index.rank(queries(), first, end, appended, {})
        torch.testing.assert_close(part.logits_HTGM, everything.logits_HTGM[..., first:end])
        pieces = index.pieces(queries(), first, end, appended)
        assert sum(piece.logits_HTGX.shape[-1] for piece in pieces) == end - first
        for piece in pieces:
            begin = piece.first_id
            same = everything.logits_HTGM[..., begin : begin + piece.logits_HTGX.shape[-1]]
            torch.testing.assert_close(piece.logits_HTGX, same)


def test_a_search_and_its_remainder_share_their_logits() -> None:
    index = build("coarse_rows", random_rows(200, DIM))
    ranking = index.rank(queries(), 8, 200, None, {})
    (piece,) = ranking.pieces
    assert piece.logits_HTGX.data_ptr() == ranking.logits_HTGM.data_ptr()


def leave_out_light_runs(logits: torch.Tensor, every: torch.Tensor, first: int) -> None:
    """Where the first run has so many keys. every: logits before those of exact keys were taken out."""
    count, whole = logits.shape[-1], every.logsumexp(-1, keepdim=True)
    for run in logits.split([first, count - first], dim=-1):
        light = (run - whole).exp().sum(-1) < NEGLIGIBLE / count * run.shape[-1]
        run[light] = -torch.inf


@every_width
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_not_exact_counts_by_its_coarse_copy(name: str, shared: bool) -> None:
    """Also of some KV heads and positions, and of a part that is nothing but exact keys."""
    positions = 4
    index = build(name, random_rows(150, DIM))
    appended = index.start_appending()
    appended.append(random_rows(40, DIM, seed=2))
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(182, generator=generator)[:90] + 8 for _ in range(HEADS * positions)])
    ids = ids.view(HEADS, positions, 90).to(torch.int32)
    ids[0, 1, :40] = torch.arange(150, 190)
    if shared:
        ids = ids[:, 1:2]
    valid = torch.rand(ids.shape, generator=generator) < 0.7
    valid[0, : None if shared else 2] = True
    unused = torch.zeros(0)
    remainder = REMAINDERS["coarse"]
    q = queries(positions)
    pieces = index.pieces(q, 8, 190, appended)
    state = remainder_state(remainder, pieces, [ExactKeys(ids, valid, unused, unused)])
    assert state is not None
    keys = torch.cat([index.rows.decode_keys(8, 150), appended.rows.decode_keys(0, 40)], 1)
    values = torch.cat([index.rows.decode_values(8, 150), appended.rows.decode_values(0, 40)], 1)
    logits = torch.einsum("htgd,hnd->htgn", q, keys)
    every = logits.clone()
    for head in range(HEADS):
        for position in range(positions):
            row = 0 if shared else position
            out = ids[head, row][valid[head, row]].long() - 8
            logits[head, position, :, out] = -torch.inf
    leave_out_light_runs(logits[..., :142], every[..., :142], 120)
    leave_out_light_runs(logits[..., 142:], every[..., 142:], 40)
    torch.testing.assert_close(state.lse, logits.logsumexp(-1), rtol=1e-4, atol=ROUNDING[name])
    expected = torch.einsum("htgn,hnd->htgd", logits.softmax(-1), values)
    # Rounding of weights stays below half of that of a value.
    quarter_step = float(index.rows.value_scales_HNV.max()) / 4
    torch.testing.assert_close(state.out, expected, rtol=1e-4, atol=quarter_step)
    some = [piece.part(slice(1, 2), slice(2, 4)) for piece in index.pieces(q, 8, 190, appended)]
    rows = slice(None) if shared else slice(2, 4)
    part = remainder_state(remainder, some, [ExactKeys(ids[1:, rows], valid[1:, rows], unused, unused)])
    torch.testing.assert_close(part.out, state.out[1:, 2:])


def test_an_appended_key_that_cannot_be_coded_is_refused() -> None:
    appended = build("coarse_rows", random_rows(200, DIM)).start_appending()
    appended.append(random_rows(10, DIM))
    with pytest.raises(InvalidArgumentError, match="float16"):
        appended.append(random_rows(10, DIM) * 1e5)
    assert appended.count == 10


@every_width
@pytest.mark.parametrize("block", [16, 64, 100, 128, 256])
def test_extensions_hold_what_is_said(name: str, block: int) -> None:
    index = build(name, random_rows(300, DIM))
    appended = index.start_appending()
    nothing = CoarseParameters.parse(PARAMETERS[name]).appended_bytes(DIM, Growth(300, 0, block))
    assert appended.nbytes == nothing == 0
    new = random_rows(1100, DIM, seed=2)
    end = 300
    while end < 1100:
        begin, end = end, (end // block + 1) * block
        appended.append(new[:, begin - 300 : end - 300])
        said = CoarseParameters.parse(PARAMETERS[name]).appended_bytes(DIM, Growth(300, end - 300, block))
        assert appended.nbytes == HEADS * said


def random_rows(count: int, head_dim: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[H, count, 2, d] with channels of different means and spreads."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(HEADS, 1, 2, head_dim, generator=generator) * 5
    mean = torch.randn(HEADS, 1, 2, head_dim, generator=generator) * 10
    return (torch.randn(HEADS, count, 2, head_dim, generator=generator) * spread + mean).to(dtype)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_packed_codes_come_back(bits: int, head_dim: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 5, head_dim), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, row_bytes(head_dim, bits))
    assert torch.equal(unpack(packed, bits), codes)


def test_the_layout_of_packed_codes() -> None:
    codes = torch.tensor([5, 1, 2, 7, 3, 6, 0, 4], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [5 | 3 << 4, 1 | 6 << 4, 2 | 0 << 4, 7 | 4 << 4]
    two = codes & 3
    low = [int(two[j]) | int(two[j + 2]) << 2 | int(two[j + 4]) << 4 | int(two[j + 6]) << 6 for j in (0, 1)]
    assert pack(two, 2).tolist() == low
    top = sum((int(code) >> 2) << place for place, code in enumerate(codes))
    assert pack(codes, 3).tolist() == [*low, top]


@pytest.mark.parametrize(("bits", "narrowest"), [(4, 2), (2, 4), (3, 8)])
def test_heads_whose_codes_fill_no_bytes_are_refused(bits: int, narrowest: int) -> None:
    assert row_bytes(narrowest, bits) == narrowest * bits // 8
    with pytest.raises(InvalidArgumentError, match=f"multiple of {narrowest}"):
        row_bytes(narrowest // 2, bits)


@pytest.mark.parametrize("bits", BITS)
def test_steps_are_as_fine_as_the_range_allows(bits: int) -> None:
    kv = random_rows(256, 64)
    rows = code_rows(kv, 0, bits, bits, 1)
    blocks = kv[:, :, 0].view(HEADS, 2, BLOCK, 64)
    wanted = (blocks.amax(2) - blocks.amin(2)) / (2**bits - 1)
    # An offset below 64 is rounded by up to 2^-6, which the steps have to make up for, twice.
    assert (rows.key_scales_HBD.float() <= wanted * 1.002 + 2**-5).all()


@pytest.mark.parametrize("code", [code_rows, code_rows_reference])
def test_numbers_that_float16_cannot_hold_are_refused(code: Callable[..., ScalarRows]) -> None:
    for bad in (70_000.0, float("inf"), float("nan")):
        for place in (0, 1):
            kv = random_rows(3, 16)
            kv[1, 2, place, 3] = bad
            with pytest.raises(InvalidArgumentError, match="float16"):
                code(kv, 0, 4, 4, 1)


@crossed(
    {
        "bits": [(4, 4), (3, 2), (2, 3)],
        "head_dim, groups": [(8, 1), (40, 5), (96, 3), (128, 1)],
        "count, first_id": [(1, 127), (63, 100), (500, 0), (300, 77)],
    }
)
def test_compiled_codes_equal_the_reference(
    bits: tuple[int, int], head_dim: int, groups: int, count: int, first_id: int
) -> None:
    kv = random_rows(count, head_dim, dtype=torch.bfloat16)
    kv[:, ::3] = kv[:, :1].clone()  # ties
    kv[0, :, :, 1] = 7.0  # no range
    kv[:, :, :, 2] = 0.0
    if count > 5:
        kv[:, 5] = -3.0
    found = code_rows(kv, first_id, *bits, groups)
    expected = code_rows_reference(kv, first_id, *bits, groups)
    for field in fields(ScalarRows):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("first_id", [0, 100, 128, 333])
def test_blocks_lie_at_multiples_of_128_positions(first_id: int) -> None:
    """Rows are coded as if their blocks were coded one by one."""
    kv = random_rows(500, 32)
    rows = code_rows(kv, first_id, 4, 3, 1)
    assert rows.key_scales_HBD.shape[1] == (first_id + 499) // BLOCK - first_id // BLOCK + 1
    first = 0
    while first < 500:
        end = min(500, (first_id + first) // BLOCK * BLOCK + BLOCK - first_id)
        alone = code_rows(kv[:, first:end], first_id + first, 4, 3, 1)
        assert alone.key_scales_HBD.shape[1] == 1
        assert torch.equal(alone.decode_keys(0, end - first), rows.decode_keys(first, end))
        assert torch.equal(alone.decode_values(0, end - first), rows.decode_values(first, end))
        first = end


def test_long_contexts_are_coded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_rows(700, 32)
    whole, low = code_rows(kv, 50, 4, 4, 1), planes_of(kv).low_HN2C
    monkeypatch.setattr("index_store.indexes.coarse_rows.scalar_rows._CODED_BYTES", 1)
    parts = code_rows(kv, 50, 4, 4, 1)
    assert torch.equal(whole.decode_keys(0, 700), parts.decode_keys(0, 700))
    assert torch.equal(whole.decode_values(0, 700), parts.decode_values(0, 700))
    assert torch.equal(planes_of(kv).low_HN2C, low)


def test_value_groups_are_few_and_even() -> None:
    assert [value_groups(dim, 128) for dim in (64, 128, 160, 192, 256)] == [1, 1, 2, 2, 2]
    assert value_groups(96, 64) == 2
    assert value_groups(80, 64) == 2


@pytest.mark.parametrize("first_id", [0, 77])
def test_eager_scores_and_sums_are_those_of_decoded_rows(
    first_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = code_rows(random_rows(301, 40), first_id, 4, 2, 5)
    queries = torch.randn(HEADS, 3, 40, generator=torch.Generator().manual_seed(1)) / 40**0.5
    monkeypatch.setattr("index_store.indexes.coarse_rows.reference._TILE_BYTES", 4 * 40 * HEADS * 50)
    logits = torch.full((HEADS, 3, 200), torch.nan)
    score_keys_reference(rows, queries, 60, 260, logits)
    torch.testing.assert_close(logits, queries @ rows.decode_keys(60, 260).transpose(1, 2))
    logits[:, 1, 20:] = -torch.inf
    logits[:, 2] = -torch.inf
    state = attend_values_reference(rows, logits, 60)
    values = rows.decode_values(60, 260)
    weights = logits.softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(state.out, weights @ values)
    torch.testing.assert_close(state.lse, logits.logsumexp(-1))


def test_some_heads_alone_and_no_rows_at_all() -> None:
    rows: ScalarRows = code_rows(random_rows(130, 16), 0, 3, 4, 1)
    assert torch.equal(rows.heads(slice(1, 2)).decode_keys(0, 130), rows.decode_keys(0, 130)[1:])
    state = attend_values_reference(rows, torch.empty(HEADS, 3, 0), 130)
    assert torch.equal(state.out, torch.zeros(HEADS, 3, 16))
    assert torch.isneginf(state.lse).all()


def planes_of(kv: torch.Tensor, groups: int = 1) -> TwoPlanes:
    coarse = code_rows(kv, 0, 4, 4, groups)
    return TwoPlanes(coarse, find_low_plane(kv, coarse), kv.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [*BITS, 8])
def test_decoded_numbers_are_within_half_a_step(bits: int, dtype: torch.dtype) -> None:
    """Of the planes in 8 bits a step is a 16th of a coarse one."""
    kv = random_rows(300, 64, dtype=dtype)
    kv[:, :, :, 3] = 7.0  # exact in float16
    kv[:, :, :, 5] *= 1e-6
    kv[:, 7, :, 9] = 60_000.0  # an outlier, beside which float32 itself rounds by 1/512
    rows = planes_of(kv, 2).coarse if bits == 8 else code_rows(kv, 0, bits, bits, 2)
    parts, slack = (16, 1.01) if bits == 8 else (1, 1.0002)
    if bits == 8:
        keys, values = planes_of(kv, 2).decode(0, 300).unbind(2)
    else:
        keys, values = rows.decode_keys(0, 300), rows.decode_values(0, 300)
    raw_keys, raw_values = kv.float().unbind(2)
    steps = rows.key_scales_HBD.float().repeat_interleave(BLOCK, dim=1)[:, :300] / parts
    assert ((keys - raw_keys).abs() <= steps * 0.5001 + 1e-6).all()
    steps = rows.value_scales_HNV.float().repeat_interleave(32, dim=2) / parts
    assert ((values - raw_values).abs() <= steps * 0.5 * slack + 1e-6).all()
    assert torch.equal(keys[..., 3], raw_keys[..., 3])


def test_the_high_plane_is_the_coarse_copy() -> None:
    """A number lies in the cell of its coarse level, in one of 16 parts that the low plane names in order."""
    kv = random_rows(200, 32)
    planes = planes_of(kv)
    coarse = torch.stack([planes.coarse.decode_keys(0, 200), planes.coarse.decode_values(0, 200)], dim=2)
    steps = torch.stack(
        [
            planes.coarse.key_scales_HBD.float().repeat_interleave(BLOCK, dim=1)[:, :200],
            planes.coarse.value_scales_HNV.float().expand(-1, -1, 32),
        ],
        dim=2,
    )
    parts = ((planes.decode(0, 200) - coarse) / steps + 0.5) * 16
    assert (parts > 0.49).all()
    assert (parts < 15.51).all()
    assert torch.allclose(parts, parts.floor() + 0.5, atol=5e-3)
    # Values' own ends are levels, in the middle of whose cells they lie: all that is between occurs.
    assert parts.floor().unique().tolist() == list(range(16))


@crossed(
    {
        "head_dim, groups": [(8, 1), (40, 5), (96, 3), (128, 1)],
        "count": [1, 63, 100, 500],
    }
)
def test_compiled_loops_equal_the_references(head_dim: int, groups: int, count: int) -> None:
    kv = random_rows(count, head_dim, dtype=torch.bfloat16)
    kv[0, :, :, 1] = 7.0
    planes = planes_of(kv, groups)
    coarse, low = planes.coarse, planes.low_HN2C
    whole = decode_run(coarse, low, 0)
    assert torch.equal(whole, decode_run_reference(coarse, low, 0))
    first = count // 3
    assert torch.equal(decode_run(coarse, low[:, first:], first), whole[:, first:])
    ids = torch.randint(0, count, (len(kv), 37), dtype=torch.int32)
    listed = decode_listed(coarse, low, ids)
    assert torch.equal(listed, decode_listed_reference(coarse, low, ids))
    assert torch.equal(listed[1], whole[1, ids[1].long()])


def test_heads_may_be_farther_apart_than_their_rows() -> None:
    kv = random_rows(150, 64)
    planes = planes_of(kv)
    room = torch.full((2, 400, 2, 32), 255, dtype=torch.uint8)
    room[:, :150] = planes.low_HN2C
    apart = TwoPlanes(planes.coarse, room[:, :150], torch.float32)
    assert torch.equal(apart.decode(20, 140), planes.decode(20, 140))
    ids = torch.tensor([[3, 149], [0, 77]], dtype=torch.int32)
    assert torch.equal(apart.pick(ids), planes.pick(ids))
    assert torch.equal(apart.heads(slice(1, 2)).pick(ids[1:]), planes.pick(ids)[1:])
    fetched = planes.low_HN2C[torch.arange(2)[:, None], ids.long()]
    assert torch.equal(planes.refine_listed(ids, fetched), planes.pick(ids))
