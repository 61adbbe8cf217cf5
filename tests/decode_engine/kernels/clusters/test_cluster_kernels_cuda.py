"""What only a CUDA device can show of the kernels over lists and clusters: captured graphs and long contexts."""

from __future__ import annotations

import pytest
import torch

from decode_engine.kernels.attention.sparse_attention import KeyLists, attend_lists_reference
from decode_engine.kernels.clusters.lookup import DeviceClusters
from decode_engine.kernels.clusters.reference import (
    ClusteredSequence,
    remainder_reference,
)
from decode_engine.kernels.records import records_of
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_attention import StepAttention, StepPlan
from index_store.indexes.key_clusters.build import divide_keys
from index_store.indexes.key_clusters.build_triton import build_device_clusters
from index_store.methods.presets import get_method
from tests.decode_engine.kernels.problems.cluster_problems import (
    Problem,
    make_problem,
    random_lists,
    relative_error,
)
from tests.decode_engine.steps.attention.layer_steps import GivenLists, GivenSteps, model_of
from tests.support.devices import ON_GPU

pytestmark = ON_GPU

H, G, D = 2, 4, 128


def plan(expression: str, size: int, max_keys: int) -> StepPlan:
    return StepPlan(
        model_of(G, D), get_method(expression), size, max_keys, torch.bfloat16, torch.device("cuda")
    )


def make_steps(problem: Problem, expression: str, max_keys: int) -> StepAttention:
    size = len(problem.sequences)
    if expression == "multipole":
        return ListedSteps(plan(expression, size, max_keys))
    return given_steps(plan(expression, size, max_keys), random_lists(problem, 0.3, 4))


def given_steps(plan: StepPlan, lists: KeyLists) -> GivenSteps:
    GivenLists.lists = lists
    return GivenSteps(plan)


EXPRESSIONS = ["multipole", "csattention+dropped", "csattention+monopole", "csattention"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_replayed_graph_equals_eager_launches(expression: str) -> None:
    problem = make_problem(
        [900, 0, 333], heads=H, group=G, head_dim=D, per_cluster=16, budget=100, tails=(70, 0, 5), recent=20,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    steps = make_steps(problem, expression, 1024)
    q = problem.q_RGD.view(-1, H, G, D).clone()
    steps.attend(0, q, problem.records_BF)
    steps.attend(1, q, problem.records_BF)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [steps.attend(layer, q, problem.records_BF).clone() for layer in range(2)]
    for turn in range(3):
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(turn)))
        graph.replay()
        replayed = [out.clone() for out in outs]
        kept = steps.kept_B()
        expected = steps.attend(0, q, problem.records_BF)
        for found in replayed:
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        assert (expected[1] == 0).all()
        assert int(kept[1]) == 0 < int(kept[0])


@pytest.mark.parametrize("expression", ["multipole", "csattention"])
def test_another_context_is_served_by_other_records(expression: str) -> None:
    problem = make_problem(
        [500, 400], heads=H, group=G, head_dim=D, per_cluster=16, dtype=torch.bfloat16, device="cuda"
    )
    steps = make_steps(problem, expression, 512)
    q = problem.q_RGD.view(-1, H, G, D)
    records = problem.records_BF.clone()
    steps.attend(0, q, records)
    expected = steps.attend(0, q, records).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps.attend(0, q, records)
    records.copy_(problem.records_BF.flip(0))
    q.copy_(q.flip(0))
    if isinstance(steps, GivenSteps) and isinstance(steps.selection, GivenLists):
        for tensor in (steps.selection.lists.ids_RPW, steps.selection.lists.counts_RP):
            tensor.copy_(tensor.view(2, H, -1).flip(0).reshape(tensor.shape))
    graph.replay()
    torch.testing.assert_close(out.flip(0), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("length", [2**20, 2**21])
def test_contexts_of_a_million_tokens_and_more(length: int) -> None:
    heads = 8 if length == 2**20 else 2
    kv = torch.empty(heads, length, 2, D, dtype=torch.bfloat16, device="cuda").normal_()
    arrays = build_device_clusters(
        kv, divide_keys(length, 16, 8192, 8), metric="cosine", iterations=1, moments="diagonal", seed=0
    )
    tail = torch.randn(heads, 3000, 2, D, device="cuda").to(torch.bfloat16)
    clusters = DeviceClusters.of(arrays, 8, torch.bfloat16, "cuda")
    sequence = ClusteredSequence(kv, tail, 3000, 8, length - 100, 5000, clusters)
    records = records_of([sequence], "cuda")
    q = 2 * torch.randn(1, heads, G, D, device="cuda").to(torch.bfloat16)
    problem = Problem(q[0], (sequence,), records, [arrays], heads, length // 16)
    model = model_of(G, D, heads)
    options = (1, length, torch.bfloat16, torch.device("cuda"))
    multipole = ListedSteps(StepPlan(model, get_method("multipole"), *options))
    lists = random_lists(problem, 0.002, 3)
    centred = given_steps(StepPlan(model, get_method("csattention"), *options), lists)
    given: list[tuple[StepAttention, KeyLists, str]] = [
        (multipole, multipole.selection.lists, "monopole"),
        (centred, lists, "centred"),
    ]
    for steps, listed, kind in given:
        found = steps.attend(0, q, records)
        kept = int(listed.counts_RP.sum()) / heads
        assert 0 < kept <= max(5000, 0.003 * length)
        # Clusters are of 8,192 keys each: of several such stretches one is listed.
        assert max(int(listed.of_row(row).max()) for row in range(heads)) > length - 2**16
        expected = attend_lists_reference(q[0], [sequence], listed, D**-0.5)
        expected = expected.merge(remainder_reference(q[0], [sequence], listed, D**-0.5, kind))
        assert relative_error(found[0], expected.out) < 1e-2
