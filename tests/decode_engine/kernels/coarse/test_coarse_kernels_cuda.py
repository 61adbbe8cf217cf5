"""What only a CUDA device can show of the kernels over coarse copies: bfloat16, captured graphs and long contexts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decode_engine.kernels.coarse.reference import CoarseSequence, attend_others_reference
from decode_engine.kernels.coarse.search import find_cuts
from decode_engine.kernels.coarse.sizes import coarse_shape
from decode_engine.kernels.coarse.warp_pass import weigh_keys
from decode_engine.kernels.coarse.warp_values import attend_others
from decode_engine.kernels.records import records_of
from index_store.indexes.coarse_rows.coding_numba import code_rows
from tests.decode_engine.kernels.problems.coarse_problems import (
    Searched,
    assert_equals_reference,
    listed_keys,
    make_queries,
    make_sequence,
    make_sizes,
)
from tests.support.devices import DEVICE, ON_GPU

pytestmark = ON_GPU
LONG, SHORT = (60001, 8, 59900, 600), (259, 3, 250, 20)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("group", "head_dim", "bits", "value_groups"),
    [
        (4, 128, (4, 4), 1),
        (4, 128, (2, 2), 1),
        (4, 128, (3, 3), 1),
        (8, 128, (3, 3), 1),
        (5, 128, (4, 3), 1),
        (6, 128, (3, 2), 1),
        (1, 64, (4, 4), 1),
        (3, 64, (4, 4), 1),
        (7, 64, (4, 4), 1),
        (8, 64, (4, 4), 1),
        (9, 128, (4, 4), 1),
        (16, 128, (3, 3), 1),
        (12, 64, (4, 4), 1),
        (4, 256, (4, 4), 1),
        (8, 256, (2, 2), 1),
        (3, 256, (3, 3), 1),
        (8, 256, (4, 4), 2),
    ],
)
def test_kernels_find_what_the_references_find(
    group: int,
    head_dim: int,
    bits: tuple[int, int],
    value_groups: int,
    apart: bool,
) -> None:
    shape = coarse_shape(torch.device(DEVICE, 0), 65536)
    sizes = make_sizes(group, head_dim, *bits, value_groups, shape=shape, max_keys=65536, kv_heads=2)
    sequences = [make_sequence(sizes, *LONG), None, make_sequence(sizes, *SHORT)]
    found = assert_equals_reference(sizes, torch.bfloat16, sequences, apart=apart, tolerance=3e-2)
    for row in range(2):
        assert 0.6 * LONG[3] < len(listed_keys(found.lists, row)) < 1.6 * LONG[3]


@pytest.mark.parametrize(
    ("group", "head_dim", "bits"), [(4, 64, 4), (4, 128, 4), (4, 128, 3), (16, 128, 4), (4, 256, 4)]
)
def test_sums_over_many_flat_keys_stay_exact(group: int, head_dim: int, bits: int) -> None:
    """Tensor cores drop what is below a sum's last bit."""
    shape = replace(coarse_shape(torch.device(DEVICE, 0), 65536), programs=8)
    sizes = make_sizes(group, head_dim, bits, bits, shape=shape, max_keys=65536, kv_heads=2)
    sequence = make_sequence(sizes, 60001, 0, 60001, 60)
    q = 0.01 * make_queries(sizes, torch.bfloat16, 1)
    found = Searched(sizes, q, [sequence], apart=False)
    expected = attend_others_reference(q, [sequence], found.lists)
    assert float((found.out_RGD - expected.out).norm() / expected.out.norm()) < 1e-2


@pytest.mark.parametrize(
    ("group", "head_dim", "bits"), [(4, 64, 4), (4, 128, 4), (4, 128, 3), (16, 128, 4), (4, 256, 4)]
)
def test_a_captured_search_is_replayed_for_another_context(group: int, head_dim: int, bits: int) -> None:
    shape = coarse_shape(torch.device(DEVICE, 0), 65536)
    sizes = make_sizes(group, head_dim, bits, bits, shape=shape, max_keys=65536, kv_heads=2)
    q = make_queries(sizes, torch.bfloat16, 1)
    first, other = ([make_sequence(sizes, *size)] for size in (SHORT, LONG))
    made = Searched(sizes, q, first, apart=False)
    records_BF = records_of(first, DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        find_cuts(q, records_BF, sizes, made.work)
        weigh_keys(q, records_BF, sizes, made.work, made.lists)
        attend_others(q, records_BF, sizes, made.work, made.lists, made.partials)
    records_BF.copy_(records_of(other, DEVICE))
    graph.replay()
    expected = Searched(sizes, q, other, apart=False)
    for row in range(2):
        assert listed_keys(made.lists, row) == listed_keys(expected.lists, row)
    filled = sizes.value_programs(len(made.partials.totals_RSG))
    peaks, others = (each.partials.peaks_RSG[:, :filled] for each in (made, expected))
    assert torch.equal(peaks, others)
    totals, others = (each.partials.totals_RSG[:, :filled][peaks > -torch.inf] for each in (made, expected))
    assert len(totals)
    assert torch.equal(totals, others)


@pytest.mark.parametrize(("head_dim", "bits", "heads"), [(128, 4, 33), (64, 4, 65), (128, 3, 44)])
def test_a_context_of_a_million_keys(head_dim: int, bits: int, heads: int) -> None:
    """Codes of the last head begin beyond 2^31 bytes."""
    keys, keep = 2**20, 40_000  # about 156 of the 4,096 sampled keys: how many are kept strays by a twelfth
    shape = coarse_shape(torch.device(DEVICE, 0), keys)
    sizes = make_sizes(4, head_dim, bits, bits, shape=shape, max_keys=keys, kv_heads=heads)
    generator = torch.Generator(DEVICE).manual_seed(heads)
    kv = torch.randn(1, keys, 2, head_dim, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    sequence = CoarseSequence(code_rows(kv.expand(heads, -1, -1, -1), 0, bits, bits, 1), 8, keys - 64, keep)
    q = make_queries(sizes, torch.bfloat16, 1)
    q[:, -1] = q[:, 0]
    found = Searched(sizes, q, [sequence], apart=False)
    assert 0.7 * keep < len(listed_keys(found.lists, heads - 1)) < 1.4 * keep
    torch.testing.assert_close(found.lse_RG[-1], found.lse_RG[0], rtol=1e-2, atol=1e-2)
