"""What only a CUDA device can show of the kernels over product codes: bfloat16, captured graphs and long contexts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decode_engine.kernels.codes.reference import CodeSequence, kept_keys
from decode_engine.kernels.codes.search import code_shape, search_codes
from decode_engine.kernels.records import records_of
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.product_codes.index import ProductCodes
from index_store.selection.ranking import Items, Ranking
from index_store.store.stored_context import QuerySample
from tests.decode_engine.kernels.problems.code_problems import (
    DEVICE,
    SMALL,
    assert_equals_reference,
    listed_keys,
    make_plan,
    make_queries,
    make_sequence,
    poisoned,
    searched,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHORT, LONG, ALL_KEPT, NONE_SEARCHED = (
    (259, 3, 250, 20),
    (1500, 4, 1437, 150),
    (300, 0, 300, 400),
    (70, 10, 10, 5),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("group", "head_dim", "subspaces", "codewords", "strided"),
    [(4, 128, 8, 256, True), (1, 64, 4, 16, False), (3, 64, 32, 256, True), (8, 128, 16, 256, False)],
)
def test_kernels_list_what_the_reference_lists(
    dtype: torch.dtype, group: int, head_dim: int, subspaces: int, codewords: int, strided: bool
) -> None:
    torch.manual_seed(group)
    shape = code_shape(16384, subspaces, group)
    plan = make_plan(group, head_dim, subspaces, codewords, strided=strided, max_keys=16384, shape=shape)
    sizes = (SHORT, (16001, 300, 15999, 800), NONE_SEARCHED, ALL_KEPT)
    assert_equals_reference(plan, dtype, [*(make_sequence(plan, *size) for size in sizes), None])


def test_a_replayed_graph_equals_eager_and_follows_its_records() -> None:
    torch.manual_seed(5)
    plan = make_plan(4, 128, 8, 256, shape=SMALL)
    sequences = [make_sequence(plan, *size) for size in (SHORT, LONG, ALL_KEPT)]
    q, rows = make_queries(plan, torch.bfloat16, 3), records_of(sequences, DEVICE)
    work, lists = poisoned(plan, 3)
    search_codes(q, rows, plan, work, lists)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # the next step begins while this one ends
            search_codes(q, rows, plan, work, lists)
    for turned in (sequences, sequences[1:] + sequences[:1]):
        rows.copy_(records_of(turned, DEVICE))
        q.copy_(make_queries(plan, torch.bfloat16, 3))
        lists.ids_RPW.fill_(-1)
        graph.replay()
        eager = searched(plan, q, turned)
        assert torch.equal(lists.counts_RP, eager.counts_RP)
        for row in range(6):
            assert torch.equal(lists.of_row(row), eager.of_row(row))


def test_a_batch_equals_its_sequences_one_by_one() -> None:
    torch.manual_seed(4)
    plan = make_plan(4, 128, 8, 256, max_keys=65536, shape=code_shape(65536, 8, 4))
    sequences = [make_sequence(plan, *size) for size in (SHORT, (60001, 8, 59900, 600), LONG)]
    q = make_queries(plan, torch.bfloat16, 3)
    together = searched(plan, q, sequences)
    for b, sequence in enumerate(sequences):
        alone = searched(plan, q[b : b + 1].contiguous(), [sequence])
        for h in range(2):
            assert torch.equal(alone.of_row(h), together.of_row(2 * b + h))


def test_a_context_of_two_million_keys() -> None:
    torch.manual_seed(6)
    keys, keep = 2**21, 20_000
    plan = make_plan(4, 128, 32, 256, max_keys=keys, shape=code_shape(keys, 32, 4))
    plan = replace(plan, kv_heads=33)  # codes of the last head begin beyond 2^31 bytes
    codes = torch.randint(0, 256, (33, keys, 32), dtype=torch.uint8, device="cuda")
    sequence = CodeSequence(codes, torch.randn(33, 32, 256, 4, device="cuda"), 10, keys - 64, keep)
    q = make_queries(plan, torch.bfloat16, 1)
    lists = searched(plan, q, [sequence])
    for row in (0, 32):
        kept = torch.tensor(listed_keys(lists, row))
        expected = kept_keys(q[0, row], sequence, row, plan).nonzero()[:, 0].cpu()
        common = len(set(kept.tolist()) & set(expected.tolist()))
        assert common > 0.97 * max(len(kept), len(expected))
        assert 0.7 * keep < len(kept) < 1.4 * keep


@pytest.mark.parametrize("sharp", [1.0, 3.0])
def test_selections_are_those_of_the_general_path(sharp: float) -> None:
    """On average: normalisers and cut come from a sample, so that a single list may be a third shorter or longer."""
    torch.manual_seed(7)
    heads, keys, keep, first, end, steps = 2, 65536, 1311, 8, 65472, 12
    centres = torch.randn(heads, 512, 128, device="cuda")
    own = torch.randint(0, 512, (heads, keys), device="cuda")
    kv = torch.randn(heads, keys, 2, 128, device="cuda").bfloat16()
    kv[:, :, 0] = 0.8 * centres.gather(1, own[..., None].expand(-1, -1, 128)) + 0.6 * kv[:, :, 0]
    parameters = {"subspaces": 8, "bits": 8, "split": "strided", "iterations": 10}
    nothing = QuerySample(torch.zeros(heads, 1, 4, 128, device="cuda"), torch.zeros(1).long())
    index = ProductCodes.build(parameters, LayerSource(kv, nothing, torch.ones(64)), 0)
    arrays = index.arrays()
    sequence = CodeSequence(arrays["codes"], arrays["codebooks"], first, end, keep)
    plan = make_plan(4, 128, 8, 256, max_keys=keys, shape=code_shape(keys, 8, 4))
    q = (make_queries(plan, torch.float32, steps) * sharp / 2.0).bfloat16()
    lists = searched(plan, q, [sequence] * steps)
    found = []
    for b in range(steps):
        scaled = q[b].float()[:, None] * plan.scale
        scores = index.rank(scaled, first, end, None, {}).scores()[:, 0]
        logits = torch.einsum("htgd,hnd->htgn", scaled, kv[:, first:end, 0].float())
        shares = Ranking(logits, Items(first, end)).weights()[:, 0]
        for h in range(heads):
            kept = torch.tensor(listed_keys(lists, b * heads + h), device="cuda") - first
            best = scores[h].topk(len(kept)).indices
            common = torch.isin(kept, best).float().mean()
            mass = shares[h, kept].sum() / shares[h, best].sum()
            found.append([len(kept) / keep, float(common), float(mass)])
    kept_of_wanted, common, mass = torch.tensor(found).mean(0).tolist()
    assert 0.85 < kept_of_wanted < 1.15
    assert common > 0.92
    assert mass > 0.96
    assert min(mass for _, _, mass in found) > 0.75
