"""Small batches for the kernels over coarse copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import Partials, merge_partials
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.coarse.reference import (
    CoarseSequence,
    attend_others_reference,
    find_cuts_reference,
    weigh_keys_reference,
)
from decode_engine.kernels.coarse.search import find_cuts
from decode_engine.kernels.coarse.sizes import CoarseShape, CoarseSizes, CoarseWork
from decode_engine.kernels.coarse.warp_pass import weigh_keys
from decode_engine.kernels.coarse.warp_values import attend_others
from decode_engine.kernels.records import records_of
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.parameters import BLOCK
from tests.support.devices import DEVICE

SMALL = CoarseShape(programs=4, samplers=8, runs=4)


def make_sizes(
    group: int,
    head_dim: int,
    key_bits: int = 4,
    value_bits: int = 4,
    value_groups: int = 1,
    *,
    shape: CoarseShape = SMALL,
    max_keys: int = 512,
    kv_heads: int = 1,
) -> CoarseSizes:
    return CoarseSizes(kv_heads, group, head_dim, key_bits, value_bits, value_groups, max_keys, shape)


def make_sequence(
    sizes: CoarseSizes, keys: int, first: int, end: int, keep: int, offset: float = 3.0
) -> CoarseSequence:
    """Random rows; channels of keys have scales of their own, and lie apart by offsets of about that size."""
    generator = torch.Generator().manual_seed(keys + first)
    kv = torch.randn(sizes.kv_heads, keys, 2, sizes.head_dim, generator=generator)
    spread = 0.2 + torch.rand(sizes.head_dim, generator=generator)
    kv[:, :, 0] = kv[:, :, 0] * spread + offset * torch.randn(sizes.head_dim, generator=generator)
    rows = code_rows(kv.to(DEVICE), 0, sizes.key_bits, sizes.value_bits, sizes.value_groups)
    return CoarseSequence(rows, first, end, keep)


def make_queries(sizes: CoarseSizes, dtype: torch.dtype, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(sizes.group)
    shape = (size, sizes.kv_heads, sizes.group, sizes.head_dim)
    return (2.0 * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


class Searched:
    """What kernels find about a batch, in buffers in which what is not written shows."""

    def __init__(
        self, sizes: CoarseSizes, q_BHGD: Tensor, sequences: Sequence[CoarseSequence | None], *, apart: bool
    ) -> None:
        """apart: keys are listed first by a launch that leaves no weights."""
        rows = len(sequences) * sizes.kv_heads
        self.work = CoarseWork.make(sizes, len(sequences), DEVICE)
        for floats in (self.work.sampled_RGM, self.work.normalisers_RG):
            floats.fill_(torch.nan)
        self.work.cuts_RX.fill_(-(2**30))
        self.lists = KeyLists.allocate(rows, sizes.splits(rows), sizes.width(rows), DEVICE)
        self.lists.ids_RPW.fill_(-(2**30))
        self.lists.counts_RP.fill_(2**30)
        device = torch.device(DEVICE)
        # One slot more than is filled.
        self.partials = Partials.allocate(
            rows, sizes.value_programs(rows) + 1, sizes.group, sizes.head_dim, device
        )
        self.partials.sums_RSGD.fill_(torch.nan)
        self.partials.peaks_RSG.fill_(-torch.inf)
        self.partials.totals_RSG.fill_(torch.nan)
        records_BF = records_of(sequences, DEVICE)
        find_cuts(q_BHGD, records_BF, sizes, self.work)
        alone: list[list[int]] = []
        if apart:
            weigh_keys(q_BHGD, records_BF, sizes, self.work, self.lists, weigh=False)
            alone = [listed_keys(self.lists, row) for row in range(rows)]
            self.lists.counts_RP.fill_(2**30)
        weigh_keys(q_BHGD, records_BF, sizes, self.work, self.lists)
        attend_others(q_BHGD, records_BF, sizes, self.work, self.lists, self.partials)
        assert not apart or alone == [listed_keys(self.lists, row) for row in range(rows)]
        self.out_RGD, self.lse_RG = merge_partials(self.partials)


def listed_keys(lists: KeyLists, row: int) -> list[int]:
    """A row's keys, ascending, each once; programs have listed theirs so, or block by block from the last one on."""
    counts = lists.counts_RP[row].tolist()
    assert min(counts) >= 0
    assert max(counts) <= lists.ids_RPW.shape[2]
    segments = [ids[:count].tolist() for ids, count in zip(lists.ids_RPW[row], counts, strict=True)]
    for segment in segments:
        assert segment in (sorted(segment), sorted(segment, key=lambda key: (-(key // BLOCK), key)))
    keys = sorted(key for segment in segments for key in segment)
    assert len(keys) == len(set(keys))
    return keys


def assert_differs_at_the_edge(
    q_BHGD: Tensor,
    sequence: CoarseSequence,
    row: int,
    work: CoarseWork,
    kept: set[int],
    expected: set[int],
    tolerance: float,
) -> None:
    """Rounding exchanges few keys, and only such as are about as good as the worst one that the reference keeps.

    work: the reference's. Queries are rounded to 8 bits, so that up to 15 % of the keys may be others.
    """
    other = sorted(kept ^ expected)
    # Two of them are one key in another one's place.
    assert len(other) <= 2 + 0.15 * len(expected), (row, len(kept), len(expected), other)
    if not other:
        return
    b, head = divmod(row, q_BHGD.shape[1])
    logits = sequence.logits(q_BHGD[b, head], head)
    weights_N = torch.exp2(logits - work.normalisers_RG[row][:, None]).sum(0).log2()
    edge = weights_N[sorted(expected or kept)].min()
    distances = (weights_N[other] - edge).abs()
    assert float(distances.max()) < 20 * tolerance, (row, other, distances)


def assert_equals_reference(
    sizes: CoarseSizes,
    dtype: torch.dtype,
    sequences: Sequence[CoarseSequence | None],
    *,
    apart: bool,
    tolerance: float,
) -> Searched:
    """The kernels list what the reference lists, but for keys at the very edge, and attend to all others."""
    q = make_queries(sizes, dtype, len(sequences))
    found = Searched(sizes, q, sequences, apart=apart)
    rows = len(sequences) * sizes.kv_heads
    work = CoarseWork.make(sizes, len(sequences), DEVICE)
    lists = KeyLists.allocate(rows, *found.lists.ids_RPW.shape[1:], DEVICE)
    find_cuts_reference(q, sequences, sizes, work)
    weigh_keys_reference(q, sequences, sizes, work, lists)
    for row in range(rows):
        sequence = sequences[row // sizes.kv_heads]
        kept, expected = listed_keys(found.lists, row), listed_keys(lists, row)
        if sequence is None or sequence.end <= sequence.first:
            assert not kept
            continue
        torch.testing.assert_close(
            found.work.normalisers_RG[row], work.normalisers_RG[row], rtol=0, atol=20 * tolerance
        )
        assert_differs_at_the_edge(q, sequence, row, work, set(kept), set(expected), tolerance)
        assert all(sequence.first <= key < sequence.end for key in kept)
        if sequence.keep >= sequence.end - sequence.first:
            assert kept == list(range(sequence.first, sequence.end))
        if sequence.keep == 0:
            assert not kept
    expected_state = attend_others_reference(q, sequences, found.lists)
    torch.testing.assert_close(found.out_RGD, expected_state.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.lse_RG, expected_state.lse, rtol=tolerance, atol=20 * tolerance)
    return found
