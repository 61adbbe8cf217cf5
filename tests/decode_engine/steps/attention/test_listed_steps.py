"""Decode steps over lists and clusters through records equal the general path with the same selection.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.model.unstored import unstored_manifest
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import DenseSteps, ListedSteps
from decode_engine.steps.attention.selections import ClusterSelection
from decode_engine.steps.attention.step_attention import KeySelection, StepAttention, StepPlan
from decode_engine.steps.attention.step_batch import STEP_COUNTS, StepBatch, step_counts
from decode_engine.steps.batch_kinds import step_attention_for
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import get_method
from index_store.selection.budgets import REMAINDERS, Mass, Ratio, Threshold, TokenCount
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest

H, G, D, N = 2, 3, 64, 300
IDENTITY = ModelIdentity("test", "test", "0" * 16, "0" * 16, 2, H * G, H, D, 2, 4096)
SMALL = {"keys_per_cluster": 8, "block": 128, "iterations": 3}


def method_of(expression: str, budget: Ratio | TokenCount) -> Method:
    method = replace(get_method(expression), budget=budget, recent=32, append_block=16)
    assert method.index is not None
    if method.index.kind == "key_clusters":
        return replace(method, index=method.index.with_parameters(**SMALL))
    if method.partition is None:
        return replace(method, index=INDEX_SPECS["exact"], search={})
    return replace(
        method, index=INDEX_SPECS["exact"], search={}, partition=method.partition.with_parameters(**SMALL)
    )


class ObservedSelection(KeySelection):
    """Lists what sessions' layers have selected."""

    selections: ClassVar[list[Observation]] = []

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.lists = KeyLists.allocate(plan.rows, 2, N, "cpu")

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        return None

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return {}

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        lists = self.lists
        lists.counts_RP.zero_()
        for b, observed in enumerate(self.selections):
            for head in range(H):
                count = int(observed.selection.counts_HT[head, 0])
                ids = observed.selection.ids_HTK[head, 0, :count]
                row = b * H + head
                lists.counts_RP[row, 0], lists.counts_RP[row, 1] = count // 3, count - count // 3
                lists.ids_RPW[row, 0, : count // 3] = ids[: count // 3]
                lists.ids_RPW[row, 1, : count - count // 3] = ids[count // 3 :]
        return lists


class ObservedSteps(ListedSteps):
    """Attends to what sessions' layers have selected."""

    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = {"exact": ObservedSelection}


def run(
    method: Method, kind: type[StepAttention], lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor, list[Observation], StepBatch]:
    """One layer's step of sessions on contexts of those lengths: by kernels and by the general path [B, H, G, d]."""
    generator = torch.Generator().manual_seed(3)
    batch = StepBatch(StepPlan(IDENTITY, method, 4, 512, torch.float32, torch.device("cpu")), [kind, kind])
    outs: list[Tensor] = []
    observations: list[Observation] = []
    counts = torch.zeros(4, STEP_COUNTS, dtype=torch.int64)
    queries = torch.zeros(4, H, G, D)
    for row, length in enumerate(lengths):
        context = made_up_context(IDENTITY, "float32", method, length, seed=row)
        session = Session(context, method.on(context.manifest))
        layer = session.layers[1]
        assert isinstance(layer, SparseLayer)
        layer.observer = observations.append
        for _ in range(row + 1):
            q = 2.0 * torch.randn(H, 1, G, D, generator=generator)
            k, v = (torch.randn(H, 1, D, generator=generator) for _ in range(2))
            observations[row:] = []
            out = layer.attend(q * D**-0.5, k, v, session.position)
            session.position += 1
        session.position -= 1
        batch.place(row, session)
        for field, value in step_counts(session).items():
            counts[row, field - records.STEP_FIELDS[0]] = value
        queries[row] = q[:, 0]
        outs.append(out[:, 0])
    batch.send()
    batch.refresh(counts)
    ObservedSelection.selections = observations
    attention = batch.attentions[0]
    found = attention.attend(1, queries, batch._records_LBF[1])
    return found, torch.stack(outs), observations, batch


@pytest.mark.parametrize("remainder", ["dropped", "monopole", "centred"])
def test_lists_of_any_search(remainder: str) -> None:
    method = method_of(f"csattention+{remainder}", Ratio(0.1))
    found, expected, observations, batch = run(method, ObservedSteps, (N, 77, 20))
    # Variances are stored in bytes.
    torch.testing.assert_close(found[:3], expected, rtol=2e-3, atol=2e-3 if remainder == "centred" else 2e-5)
    assert (found[3] == 0).all()
    kept = [int(observed.selection.counts_HT.sum()) for observed in observations]
    assert batch.kept_B().tolist() == [*kept, *[0] * (4 - len(kept))]


@pytest.mark.parametrize("remainder", ["dropped", "monopole"])
def test_a_budget_of_everything_is_dense_attention(remainder: str) -> None:
    method = method_of(f"multipole+{remainder}", TokenCount(10_000))
    found, expected, _, batch = run(method, ListedSteps, (N, 77, 20))
    torch.testing.assert_close(found[:3], expected, rtol=1e-4, atol=1e-4)
    assert batch.kept_B().tolist()[3] == 0


def test_everything_that_kernels_find_is_dense_attention() -> None:
    method = replace(get_method("csattention"), budget=TokenCount(10_000), recent=32, append_block=16)
    assert method.partition is not None
    method = replace(method, partition=method.partition.with_parameters(**SMALL))
    found, expected, observations, batch = run(method, ListedSteps, (N, 77, 20))
    torch.testing.assert_close(found[:3], expected, rtol=1e-3, atol=1e-3)
    # The last context is too short to be searched.
    kept = [int(observed.selection.counts_HT.sum()) for observed in observations]
    assert batch.kept_B().tolist() == [*kept, 0, 0]


def test_clusters_are_selected_as_on_a_cpu() -> None:
    method = method_of("multipole", TokenCount(60))
    _, _, observations, batch = run(method, ListedSteps, (N, 200))
    attention = batch.attentions[0]
    assert isinstance(attention, ListedSteps)
    assert isinstance(attention.selection, ClusterSelection)
    kept = batch.kept_B().tolist()
    for b, observed in enumerate(observations):
        listed = [attention.selection.lists.of_row(b * H + head).tolist() for head in range(H)]
        assert sum(map(len, listed)) == kept[b]
        for head, ids in enumerate(listed):
            count = int(observed.selection.counts_HT[head, 0])
            # The last cluster is cut on a CPU, and left out here.
            assert set(ids) <= set(observed.selection.ids_HTK[head, 0, :count].tolist())
            assert 20 < len(ids) <= count


@pytest.mark.parametrize(("group", "head_dim"), [(16, 128), (9, 64), (4, 256)])
@pytest.mark.parametrize(
    ("expression", "placement", "expected"),
    [
        ("full", Placement.DEVICE, "DenseSteps"),
        ("refined", Placement.DEVICE, "ListedSteps"),
        ("refined", Placement.HYBRID, "HybridSteps"),
        ("refined", Placement.HOST, "HybridSteps"),
        ("csattention", Placement.DEVICE, "the kernels over key clusters take groups of 1 to 8"),
        ("csattention+dropped", Placement.DEVICE, "the kernels over query tables take groups of 1 to 8"),
        (
            "csattention+dropped@group=pooled",
            Placement.DEVICE,
            "the kernels over query tables take groups of 1 to 8",
        ),
        ("csattention+dropped", Placement.HYBRID, "the kernels over query tables take groups of 1 to 8"),
        ("csattention+dropped", Placement.HOST, "threads on the host search for groups of 1 to 8"),
        ("multipole", Placement.DEVICE, "the kernels over key clusters take groups of 1 to 8"),
        ("multipole+dropped", Placement.HYBRID, "the kernels over key clusters take groups of 1 to 8"),
    ],
)
def test_large_groups_and_long_rows_have_few_kernels(
    expression: str, placement: Placement, expected: str, group: int, head_dim: int
) -> None:
    model = replace(IDENTITY, query_heads=group * H, head_dim=head_dim)
    manifest = unstored_manifest(model, "float32", 4000)
    found = step_attention_for(get_method(expression), manifest, placement)
    assert expected in (found if isinstance(found, str) else found.__name__)


@pytest.mark.parametrize("clustered", ["refined+monopole", "refined+centred"])
def test_a_remainder_over_clusters_has_their_limits(clustered: str) -> None:
    """Whatever the search beside it takes."""
    method = replace(get_method(clustered), partition=INDEX_SPECS["remainder_clusters"])
    for group, expected in ((8, "ListedSteps"), (9, "the kernels over key clusters take groups of 1 to 8")):
        manifest = unstored_manifest(replace(IDENTITY, query_heads=group * H), "float32", 4000)
        found = step_attention_for(method, manifest)
        assert expected in (found if isinstance(found, str) else found.__name__)


@pytest.mark.parametrize(("group", "head_dim"), [(17, 128), (4, 96), (4, 512)])
def test_other_shapes_have_no_kernels(group: int, head_dim: int) -> None:
    manifest = unstored_manifest(replace(IDENTITY, query_heads=group * H, head_dim=head_dim), "float32", 4000)
    expected = (
        f"group {group}, head dimension {head_dim}; kernels that attend take groups of 1 to 16 and dimen"
    )
    assert expected in str(DenseSteps.refusal(get_method("full"), manifest))
    assert expected in str(step_attention_for(get_method("refined"), manifest))


def refusal(method: Method) -> str:
    context = made_up_context(IDENTITY, "float32", method, 20)
    found = step_attention_for(method, context.manifest)
    return found if isinstance(found, str) else found.__name__


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (get_method("full"), "DenseSteps"),
        (get_method("multipole"), "ListedSteps"),
        (get_method("multipole+dropped"), "ListedSteps"),
        (get_method("multipole-windowed"), "windowed RoPE"),
        (get_method("squeezed"), "budget"),
        (get_method("csattention"), "ListedSteps"),
        (get_method("csattention+dropped"), "ListedSteps"),
        (get_method("csattention+monopole"), "ListedSteps"),
        (get_method("csattention+dipole"), "dipole"),
        (get_method("csattention-paper"), "lists"),
        (get_method("multipole-tree"), "no kernels"),
        (get_method("tactic"), "budget"),
        (get_method("quest"), "no kernels"),
        (get_method("oracle"), "no kernels"),
        (replace(get_method("csattention+dropped"), budget=Mass(0.9)), "a ratio or a number of keys"),
        (replace(get_method("refined+dropped"), budget=Mass(0.5)), "a ratio or a number of keys"),
        (replace(get_method("multipole"), budget=Threshold(keep=0.05)), "budget"),
        (get_method("multipole+centred"), "other clusters"),
        (
            replace(
                get_method("multipole"),
                index=INDEX_SPECS["remainder_clusters"],
                remainder=REMAINDERS["centred"],
            ),
            "ListedSteps",
        ),
    ],
)
def test_methods_run_where_their_kernels_are(method: Method, expected: str) -> None:
    assert expected in refusal(method)
