"""The index of coarse rows: what it scores, what sessions append, what it holds, and what it stands for."""

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.value_sums_numba import NEGLIGIBLE
from index_store.indexes.interface.index_kind import Growth
from index_store.indexes.interface.layer_index import LayerSource
from index_store.methods.index_specs import INDEX_SPECS
from index_store.selection.budgets import REMAINDERS
from index_store.selection.remainder_states import ExactKeys, remainder_state
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample
from tests.index_store.indexes.coarse_rows.test_scalar_rows import random_rows

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
    assert part is not None
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
    nothing = CoarseRows.appended_bytes(PARAMETERS[name], DIM, Growth(300, 0, block))
    assert appended.nbytes == nothing == 0
    new = random_rows(1100, DIM, seed=2)
    end = 300
    while end < 1100:
        begin, end = end, (end // block + 1) * block
        appended.append(new[:, begin - 300 : end - 300])
        said = CoarseRows.appended_bytes(PARAMETERS[name], DIM, Growth(300, end - 300, block))
        assert appended.nbytes == HEADS * said
