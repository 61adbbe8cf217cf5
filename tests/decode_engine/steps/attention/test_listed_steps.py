"""One layer's step through records equals the general path with the same selection, of every search.

Without a CUDA device the kernels run in interpreters.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_engine.kernels.coarse.sizes import CoarseWork
from decode_engine.steps.attention.listed_steps import HybridSteps, ListedSteps
from decode_engine.steps.attention.selections import ClusterSelection, CoarseSelection
from decode_engine.steps.attention.step_attention import StepPlan
from index_store.attention.attention_state import AttentionState
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.memory.placement import Placement
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import get_method
from index_store.selection.budgets import Ratio, TokenCount
from tests.decode_engine.steps.attention.layer_steps import HEADS, GivenSteps, Run, model_of, run
from tests.decode_engine.steps.sessions import DTYPE, SMALL
from tests.support.devices import DEVICE, nightly

pytestmark = [pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.usefixtures("few_programs")]
THREE, LENGTHS = (300, 77, 20), (200, 77)
SHAPES = ((3, 64), (16, 64), (7, 256))
"""Query heads of a KV head, and channels."""
COARSE = 2e-2
"""Queries times scales are rounded to bytes."""
ROUNDED = 2e-2 if DEVICE == "cuda" else 0.0


def method_of(expression: str, budget: Ratio | TokenCount, *, given: bool = False) -> Method:
    """given: by lists that the general path has found in exact products."""
    method = replace(get_method(expression), budget=budget, recent=32, append_block=16)
    if method.index is not None and method.index.kind == "key_clusters":
        method = replace(method, index=method.index.with_parameters(**SMALL))
    if given:
        method = replace(method, index=INDEX_SPECS["exact"], search={})
    if method.partition is not None and method.partition.kind == "key_clusters":
        method = replace(method, partition=method.partition.with_parameters(**SMALL))
    return method


@pytest.mark.parametrize("remainder", ["dropped", "monopole", "centred"])
def test_lists_of_any_search(remainder: str) -> None:
    made = run(method_of(f"csattention+{remainder}", Ratio(0.1), given=True), GivenSteps, THREE)
    # Variances are stored in bytes.
    least = max(ROUNDED, 2e-3 if remainder == "centred" else 2e-5)
    torch.testing.assert_close(made.out_BHGD[:3], made.expected_BHGD, rtol=max(ROUNDED, 2e-3), atol=least)
    assert (made.out_BHGD[3] == 0).all()
    kept = [int(observed.selection.counts_HT.sum()) for observed in made.observations]
    assert made.batch.kept_B().tolist() == [*kept, *[0] * (4 - len(kept))]


@pytest.mark.parametrize(
    ("expression", "tolerance"),
    [("multipole+dropped", 1e-4), ("multipole", 1e-4), ("csattention", 1e-3), ("refined", COARSE)],
)
def test_a_budget_of_everything_is_dense_attention(expression: str, tolerance: float) -> None:
    lengths = THREE if expression != "refined" else LENGTHS
    made = run(method_of(expression, TokenCount(10_000)), ListedSteps, lengths)
    tolerated = {"rtol": max(tolerance, ROUNDED), "atol": max(tolerance, ROUNDED)}
    torch.testing.assert_close(made.out_BHGD[: len(lengths)], made.expected_BHGD, **tolerated)
    for b, observed in enumerate(made.observations):
        session, q_HGD = made.sessions[b], observed.q_HTGD[:, 0]
        tail = session.layers[1].tail.rows[:, : session.tail_keys + 1]
        kv = torch.cat([session.context.kv(1).to(DEVICE), tail], dim=1).float()
        for head in range(HEADS):
            expected = state(q_HGD[head], kv[head, :, 0], kv[head, :, 1]).out
            torch.testing.assert_close(made.out_BHGD[b, head], expected, **tolerated)
    # The last of three contexts is too short to be searched.
    kept = [int(observed.selection.counts_HT.sum()) for observed in made.observations]
    assert made.batch.kept_B().tolist() == [*kept, *[0] * (len(lengths) + 1 - len(kept))]


def test_clusters_are_selected_as_on_a_cpu() -> None:
    made = run(method_of("multipole", TokenCount(60)), ListedSteps, (300, 200))
    assert isinstance(made.attention.selection, ClusterSelection)
    kept = made.batch.kept_B().tolist()
    for b, observed in enumerate(made.observations):
        listed = [made.listed(b, head).tolist() for head in range(HEADS)]
        assert sum(map(len, listed)) == kept[b]
        for head, ids in enumerate(listed):
            count = int(observed.selection.counts_HT[head, 0])
            # The last cluster is cut on a CPU, and left out here.
            assert set(ids) <= set(observed.selection.ids_HTK[head, 0, :count].tolist())
            assert 20 < len(ids) <= count


def expected_out(made: Run, b: int, *, coarse: bool) -> Tensor:
    """Attention [HEADS, G, d] to the keys that kernels listed and those always attended, and to all others coarsely."""
    session, observed = made.sessions[b], made.observations[b]
    context, layer = session.context, session.layers[1]
    q_HGD = observed.q_HTGD[:, 0]
    index = context.index(session.method.index.name, 1) if session.method.index else None
    assert isinstance(index, CoarseRows)
    first, end = session.method.searched_range(session.position, context.manifest.token_count)
    end = min(end, context.manifest.token_count)
    outs = []
    for head in range(HEADS):
        exact_N = torch.ones(context.manifest.token_count, dtype=torch.bool, device=DEVICE)
        exact_N[first:end] = False
        exact_N[made.listed(b, head).to(DEVICE)] = True
        kv = torch.cat(
            [context.kv(1)[head].to(DEVICE)[exact_N], layer.tail.rows[head, : session.tail_keys + 1]]
        ).float()
        states = [state(q_HGD[head], kv[:, 0], kv[:, 1])]
        if coarse and not exact_N.all():
            keys, values = (
                decode(0, len(exact_N))[head][~exact_N]
                for decode in (index.rows.decode_keys, index.rows.decode_values)
            )
            states.append(state(q_HGD[head], keys, values))
        merged = states[0]
        for other in states[1:]:
            merged = merged.merge(other)
        outs.append(merged.out)
    return torch.stack(outs)


def state(q_GD: Tensor, keys_ND: Tensor, values_ND: Tensor) -> AttentionState:
    logits = q_GD @ keys_ND.t()
    return AttentionState(logits.softmax(-1) @ values_ND, logits.logsumexp(-1))


@pytest.mark.parametrize(
    ("expression", "shape"),
    [
        ("refined", SHAPES[0]),
        ("refined+dropped", SHAPES[0]),
        *nightly(*(("refined", shape) for shape in SHAPES[1:])),
    ],
)
def test_listed_keys_are_exact_and_all_others_coarse(expression: str, shape: tuple[int, int]) -> None:
    made = run(method_of(expression, Ratio(0.1)), ListedSteps, LENGTHS, shape=shape)
    for b, length in enumerate(LENGTHS):
        expected = expected_out(made, b, coarse=expression != "refined+dropped")
        torch.testing.assert_close(made.out_BHGD[b], expected, rtol=COARSE, atol=COARSE)
        for head in range(HEADS):
            assert len(made.listed(b, head)) == pytest.approx(0.1 * length, rel=0.3)
    assert (made.out_BHGD[len(LENGTHS) :] == 0).all()
    kept = [sum(len(made.listed(b, head)) for head in range(HEADS)) for b in range(len(LENGTHS))]
    assert made.batch.kept_B().tolist() == [*kept, 0]


def test_the_same_keys_are_listed_as_on_the_general_path() -> None:
    """Where all searched keys are sampled, but for the border, whose keys a draw tells apart."""
    made = run(method_of("refined", TokenCount(25)), ListedSteps, LENGTHS)
    for b, observed in enumerate(made.observations):
        for head in range(HEADS):
            count = int(observed.selection.counts_HT[head, 0])
            best = set(observed.selection.ids_HTK[head, 0, :count].tolist())
            listed = set(made.listed(b, head).tolist())
            assert len(listed & best) > 0.8 * count
            assert len(listed) < 1.2 * count


@pytest.mark.parametrize("shape", [SHAPES[0], *nightly(*((shape,) for shape in SHAPES[1:]))])
def test_hybrid_equals_device(shape: tuple[int, int]) -> None:
    """Though listing and attending are one launch on a device, and two where rows are fetched between them.

    Bit for bit, unless that launch attends to listed keys as well: sums are in another order then.
    """
    method = method_of("refined", Ratio(0.1))
    device = run(method, ListedSteps, LENGTHS, shape=shape)
    hybrid = run(method, HybridSteps, LENGTHS, Placement.HYBRID, shape)
    selection = device.attention.selection
    assert isinstance(selection, CoarseSelection)
    rounding = COARSE if selection.attends_alone else 0.0
    torch.testing.assert_close(device.out_BHGD, hybrid.out_BHGD, rtol=rounding, atol=rounding)
    assert torch.equal(device.batch.kept_B(), hybrid.batch.kept_B())
    fetched = hybrid.batch.fetched_B2()
    assert fetched.sum() > 0


def test_the_next_layers_search_has_buffers_of_its_own() -> None:
    method = method_of("refined", Ratio(0.1))
    plan = StepPlan(model_of(*SHAPES[0]), method, 3, 512, DTYPE, torch.device(DEVICE))
    steps = HybridSteps(plan)
    selection = steps.selection
    assert isinstance(selection, CoarseSelection)
    again = type(selection)(plan)
    assert again.work.cuts_RX.data_ptr() != selection.work.cuts_RX.data_ptr()


def test_weights_are_left_only_where_others_are_attended_to() -> None:
    """Twelve bytes for each key and KV head of a batch, which a search that only lists has no use for."""
    plan = StepPlan(
        model_of(*SHAPES[0]), method_of("refined", Ratio(0.1)), 3, 512, DTYPE, torch.device(DEVICE)
    )
    attending, listing = HybridSteps(plan).selection, CoarseSelection(plan)
    assert isinstance(attending, CoarseSelection)
    held = [sum(tensor.nbytes for tensor in weights_of(each.work)) for each in (attending, listing)]
    assert held[0] >= 3 * HEADS * 512 * 2 * SHAPES[0][0]
    assert held[1] == 0


def weights_of(work: CoarseWork) -> tuple[Tensor, ...]:
    return work.weights_RSX, work.tiles_RSX, work.weighed_RS, work.left_RSG
