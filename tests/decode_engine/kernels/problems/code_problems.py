"""Small batches for the product-code kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.codes.reference import CodeSequence, search_codes_reference
from decode_engine.kernels.codes.search import CodeShape, CodeSizes, CodeWork, search_codes
from decode_engine.kernels.records import records_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = CodeShape(tile_keys=512, samplers=2, sample_keys=256, sample_warps=4)
KV_HEADS = 2


def make_plan(
    group: int,
    head_dim: int,
    subspaces: int,
    codewords: int,
    *,
    strided: bool = True,
    max_keys: int = 2048,
    shape: CodeShape = SMALL,
) -> CodeSizes:
    return CodeSizes(KV_HEADS, group, head_dim, subspaces, codewords, max_keys, strided, shape)


def make_sequence(plan: CodeSizes, keys: int, first: int, end: int, keep: int) -> CodeSequence:
    """Random codes and codewords."""
    shape = (plan.kv_heads, plan.subspaces, plan.codewords, plan.head_dim // plan.subspaces)
    codes = torch.randint(0, plan.codewords, (plan.kv_heads, keys, plan.subspaces), dtype=torch.uint8)
    return CodeSequence(codes.to(DEVICE), torch.randn(shape).to(DEVICE), first, end, keep)


def make_queries(plan: CodeSizes, dtype: torch.dtype, size: int) -> Tensor:
    return (2.0 * torch.randn(size, plan.kv_heads, plan.group, plan.head_dim)).to(dtype).to(DEVICE)


def poisoned(plan: CodeSizes, size: int) -> tuple[CodeWork, KeyLists]:
    """Buffers in which what is not written shows: nan, and ids and counts that no list can have."""
    work = CodeWork.make(plan, size, DEVICE)
    for floats in (work.units_RG, work.peaks_RSG, work.masses_RSG, work.normalisers_RG):
        floats.fill_(torch.nan)
    work.cuts_RX.fill_(-(2**30))
    lists = KeyLists.allocate(size * plan.kv_heads, 1, plan.max_keys, DEVICE)
    work.ids_RPK.fill_(-(2**30))
    work.counts_RP.fill_(2**30)
    lists.ids_RPW.fill_(-(2**30))
    lists.counts_RP.fill_(2**30)
    return work, lists


def searched(plan: CodeSizes, q_BHGD: Tensor, sequences: Sequence[CodeSequence | None]) -> KeyLists:
    """What the kernels list."""
    work, lists = poisoned(plan, len(sequences))
    search_codes(q_BHGD, records_of(sequences, DEVICE), plan, work, lists)
    assert not work.arrivals_R.any()
    return lists


def listed_keys(lists: KeyLists, row: int) -> list[int]:
    """A row's keys, ascending, each once."""
    assert int(lists.counts_RP[row].min()) >= 0
    assert int(lists.counts_RP[row].max()) <= lists.ids_RPW.shape[2]
    keys: list[int] = sorted(lists.of_row(row).tolist())
    assert len(set(keys)) == len(keys)
    return keys


def assert_equals_reference(
    plan: CodeSizes, dtype: torch.dtype, sequences: Sequence[CodeSequence | None]
) -> None:
    """The kernels list what the reference lists, but for keys at the very edge of what is kept."""
    q = make_queries(plan, dtype, len(sequences))
    lists = searched(plan, q, sequences)
    _, reference = poisoned(plan, len(sequences))
    search_codes_reference(q, sequences, plan, reference)
    for row in range(len(sequences) * plan.kv_heads):
        sequence = sequences[row // plan.kv_heads]
        kept, expected = listed_keys(lists, row), listed_keys(reference, row)
        if sequence is None:
            assert not kept
            continue
        other = len(set(kept) ^ set(expected))
        assert other <= 1 + 0.03 * len(expected), (row, len(kept), len(expected), other)
        assert all(sequence.first <= key < sequence.end for key in kept)
        if sequence.keep >= sequence.end - sequence.first:
            assert kept == list(range(sequence.first, sequence.end))
        if sequence.keep == 0:
            assert not kept
