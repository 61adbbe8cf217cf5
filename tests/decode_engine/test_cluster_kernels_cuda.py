"""What only a CUDA device can show of the kernels over lists and clusters: captured graphs and long contexts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decode_engine.kernels.cluster_attention import attend_clusters
from decode_engine.kernels.key_values import KeyValues
from decode_engine.kernels.sparse_attention import attend_listed, attend_listed_reference
from index_store.kernels.device_clusters import build_device_clusters, divide_keys
from tests.decode_engine.cluster_problems import make_problem, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_replayed_graph_equals_eager_launches() -> None:
    problem = make_problem([900, 333], head_dim=128, dtype=torch.bfloat16, device="cuda", budget=100)
    q = problem.q_RGD.clone()

    def step() -> tuple[Tensor, Tensor, Tensor]:
        return attend_clusters(q, q, problem.kv, problem.tables, problem.budgets_R, 200, problem.scale)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, counts = step()
    for turn in range(3):
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(turn)))
        graph.replay()
        replayed = (out.clone(), lse.clone(), counts.clone())
        for found, expected in zip(replayed, step(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_another_context_is_served_by_new_addresses() -> None:
    problem = make_problem([500, 400], head_dim=64, dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(300, dtype=torch.int32, device="cuda").repeat(4, 1)
    counts = torch.tensor([300, 1, 150, 0], dtype=torch.int32, device="cuda")
    first, second = problem.kv.tensors
    other = KeyValues.of([second, first])
    kv = KeyValues.of([first, second])
    graph = torch.cuda.CUDAGraph()
    attend_listed(problem.q_RGD, kv, ids, counts, problem.scale)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out, _ = attend_listed(problem.q_RGD, kv, ids, counts, problem.scale)
    kv.addresses_B.copy_(other.addresses_B)
    kv.head_rows_B.copy_(other.head_rows_B)
    graph.replay()
    expected = attend_listed(problem.q_RGD, other, ids, counts, problem.scale)[0]
    assert torch.equal(out, expected)


def test_a_context_of_two_million_tokens() -> None:
    length = 2**21
    kv = torch.empty(2, length, 2, 128, dtype=torch.bfloat16, device="cuda").normal_()
    stored = KeyValues.of([kv])
    q = torch.randn(2, 4, 128, device="cuda").to(torch.bfloat16)
    ids = torch.randint(length - 5000, length, (2, 700), device="cuda").to(torch.int32)
    counts = torch.full((2,), 700, dtype=torch.int32, device="cuda")
    found = attend_listed(q, stored, ids, counts, 128**-0.5)
    expected = attend_listed_reference(q, stored, ids, counts, 128**-0.5)
    assert relative_error(found[0], expected[0]) < 1e-2
    arrays = build_device_clusters(
        kv, divide_keys(length, 16, 8192, 8), metric="cosine", iterations=1, moments="none", seed=0
    )
    assert int(arrays["assignment"].max()) < arrays["means"].shape[1]
    assert (arrays["counts"].sum(1) == length - 8).all()
    torch.testing.assert_close(arrays["value_sums"].sum(1), kv[:, 8:, 1].float().sum(1), rtol=1e-3, atol=1.0)
