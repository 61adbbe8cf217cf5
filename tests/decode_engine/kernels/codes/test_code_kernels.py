"""The search over product codes by kernels equals its eager reference, and finds what the general path's search finds.

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
from decode_engine.kernels.codes.reference import estimated_logits
from decode_engine.kernels.codes.search import CodeShape, code_shape, make_tables, make_tables_reference
from decode_engine.kernels.records import records_of
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.selections import CodeSelection
from decode_engine.steps.attention.step_attention import KeySelection, StepPlan
from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.methods.method import Method
from index_store.methods.presets import METHODS
from index_store.selection.budgets import Mass, Ratio, TokenCount
from index_store.store.description.context_id import ModelIdentity
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

# keys, first, end, keep
SHORT, LONG, LATE = (259, 3, 250, 20), (1500, 4, 1437, 150), (1500, 530, 1491, 90)
ALL_KEPT, MORE_THAN_ALL, NONE_KEPT, NONE_SEARCHED = (
    (300, 0, 300, 300),
    (300, 7, 290, 5000),
    (300, 7, 290, 0),
    (70, 10, 10, 5),
)
IDENTITY = ModelIdentity("tiny", "LlamaForCausalLM", "f", "t", 2, 6, 2, 64, 100, 2**20)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("group", "head_dim", "subspaces", "bits", "strided", "sizes"),
    [
        (4, 128, 8, 8, True, [LONG, None, LATE]),
        (1, 64, 4, 6, False, [SHORT]),
        (2, 64, 32, 3, True, [LATE, SHORT]),
        (3, 64, 16, 5, False, [None, LONG]),
        (5, 128, 16, 4, True, [LONG]),
        (8, 128, 32, 2, True, [MORE_THAN_ALL, NONE_SEARCHED]),
        (7, 64, 8, 1, True, [NONE_KEPT, ALL_KEPT]),
    ],
)
def test_kernels_list_what_the_reference_lists(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    subspaces: int,
    bits: int,
    strided: bool,
    sizes: list[tuple[int, int, int, int] | None],
) -> None:
    torch.manual_seed(group + bits)
    plan = make_plan(group, head_dim, subspaces, 2**bits, strided=strided)
    sequences = [None if size is None else make_sequence(plan, *size) for size in sizes]
    assert_equals_reference(plan, dtype, sequences)


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize(("group", "head_dim", "subspaces", "codewords"), [(3, 64, 8, 32), (6, 128, 4, 256)])
def test_tables_equal_the_reference(
    group: int, head_dim: int, subspaces: int, codewords: int, strided: bool
) -> None:
    torch.manual_seed(1)
    plan = make_plan(group, head_dim, subspaces, codewords, strided=strided)
    sequences = [make_sequence(plan, 20, 0, 20, 5), make_sequence(plan, 30, 1, 30, 5)]
    q = make_queries(plan, torch.float16, 2)
    work, _ = poisoned(plan, 2)
    make_tables(q, records_of(sequences, DEVICE), plan, work)
    for row in range(4):
        b, h = divmod(row, 2)
        words, units = make_tables_reference(q[b, h], sequences[b].codebooks_HMWE[h], plan)
        shifts = 8 * torch.arange(4, device=DEVICE)[:, None, None]
        levels, expected = (
            ((each >> shifts) & 255).transpose(0, 1).flatten(0, 1)[:group]
            for each in (work.tables_ROX[row], words)
        )
        assert int((levels - expected).abs().max()) <= 1
        assert float((levels != expected).float().mean()) < 0.01
        assert int(levels.max()) == 127
        torch.testing.assert_close(work.units_RG[row], units)


def test_rounded_logits_are_near_the_exact_ones() -> None:
    torch.manual_seed(2)
    plan = make_plan(4, 128, 8, 256)
    sequence = make_sequence(plan, 400, 0, 400, 5)
    q = make_queries(plan, torch.float32, 1)[0, 0]
    products = torch.einsum("gem,mwe->gmw", q.view(4, 16, 8), sequence.codebooks_HMWE[0]) * plan.scale
    index = sequence.codes_HNM[0].t().long().expand(4, -1, -1)
    exact = products.gather(2, index).sum(1)
    rounded = estimated_logits(q, sequence, 0, plan) / 1.4426950408889634
    error = (rounded - exact) - (rounded - exact).mean(1, keepdim=True)
    assert float(error.std() / exact.std()) < 0.03


def test_a_batch_equals_its_sequences_one_by_one() -> None:
    torch.manual_seed(4)
    plan = make_plan(4, 64, 8, 16)
    sequences = [make_sequence(plan, *sizes) for sizes in (SHORT, LATE)]
    q = make_queries(plan, torch.float16, 2)
    together = searched(plan, q, sequences)
    for b, sequence in enumerate(sequences):
        alone = searched(plan, q[b : b + 1].contiguous(), [sequence])
        assert torch.equal(alone.counts_RP, together.counts_RP[2 * b : 2 * b + 2])
        for h in range(2):
            assert torch.equal(alone.of_row(h), together.of_row(2 * b + h))


def test_how_work_is_cut_makes_no_difference() -> None:
    torch.manual_seed(5)
    plan = make_plan(4, 64, 8, 16)
    q, sequence = make_queries(plan, torch.float16, 1), make_sequence(plan, *LONG)
    other = replace(plan, shape=replace(SMALL, tile_keys=256, warps=8))
    lists = [searched(each, q, [sequence]) for each in (plan, other)]
    for h in range(2):
        assert listed_keys(lists[0], h) == listed_keys(lists[1], h)


def test_a_sample_of_all_keys_keeps_about_as_many_as_wanted() -> None:
    torch.manual_seed(6)
    plan = make_plan(4, 64, 8, 64, shape=replace(SMALL, samplers=16))
    sequence = make_sequence(plan, *LONG)
    lists = searched(plan, make_queries(plan, torch.float16, 1), [sequence])
    assert (lists.counts_RP.sum(1) - sequence.keep).abs().max() <= 0.04 * sequence.keep


def method_of(budget: Ratio | TokenCount | Mass, **parameters: int | str) -> Method:
    method = METHODS["pq"].without_remainder()
    assert method.index is not None
    return replace(method, budget=budget, index=method.index.with_parameters(iterations=3, **parameters))


def captured(q_HGD: Tensor, keys_HND: Tensor, kept_HN: Tensor) -> Tensor:
    """Attention mass of the kept keys, mean over all heads."""
    logits = torch.einsum("hgd,hnd->hgn", q_HGD.float() / q_HGD.shape[-1] ** 0.5, keys_HND.float())
    return (logits.softmax(-1) * kept_HN[:, None]).sum(-1).mean()


@pytest.mark.parametrize("split", ["strided", "contiguous"])
def test_selections_are_those_of_the_general_path(split: str) -> None:
    torch.manual_seed(7)
    method = method_of(TokenCount(90), bits=5, subspaces=8, split=split)
    context = made_up_context(IDENTITY, "float16", method, 1100, distinct=2, device=DEVICE)
    plan = StepPlan(IDENTITY, method, 2, 2048, torch.float16, DEVICE)
    first, end, keep = 8, 1036, 90
    rows = torch.zeros(2, records.RECORD_FIELDS, dtype=torch.int64)
    counts = {records.KEYS: 1100, records.FIRST: first, records.END: end, records.KEEP: keep}
    for field, value in {**CodeSelection.fields(context, method, 1), **counts}.items():
        rows[1, field] = value
    q = torch.randn(2, 2, 3, 64, device=DEVICE).half() * 2.0
    lists = CodeSelection(plan).select(1, q, rows.to(DEVICE))
    assert lists.ids_RPW.shape == (4, 1, 2048)
    assert not lists.counts_RP[:2].any()
    index = context.index("product_codes", 1)
    ranking = index.rank(q[1].float()[:, None] / 8.0, first, end, None, method.search)
    scores_HM = ranking.scores()[:, 0]
    kept_HN = torch.zeros(2, 1100, dtype=torch.bool, device=DEVICE)
    best_HN = torch.zeros_like(kept_HN)
    for h in range(2):
        kept = torch.tensor(listed_keys(lists, 2 + h), device=DEVICE)
        best = scores_HM[h].topk(len(kept)).indices + first
        kept_HN[h, kept], best_HN[h, best] = True, True
        assert 0.8 * keep < len(kept) < 1.25 * keep
        assert int((kept_HN[h] & best_HN[h]).sum()) > 0.9 * len(kept)
        assert kept_HN[h, best[: len(best) // 2]].all()
    keys = context.keys(1)
    assert captured(q[1], keys, kept_HN) > 0.98 * captured(q[1], keys, best_HN)


def test_methods_that_kernels_cannot_search_are_refused() -> None:
    context = made_up_context(IDENTITY, "float16", method_of(Ratio(0.1), bits=2, subspaces=4), 40)

    def refusal(method: Method) -> str | None:
        return CodeSelection.refusal(method, context.manifest)

    assert refusal(method_of(Ratio(0.1))) is None
    assert refusal(method_of(TokenCount(7), subspaces=32, bits=1)) is None
    assert "no product codes" in str(refusal(METHODS["multipole"]))
    assert "2 subspaces" in str(refusal(method_of(Ratio(0.1), subspaces=2)))
    with pytest.raises(MethodUnsupportedError, match="no product codes"):
        CodeSelection(StepPlan(IDENTITY, METHODS["multipole"], 1, 512, torch.float16, DEVICE))
    with pytest.raises(MethodUnsupportedError, match="no product codes"):
        CodeSelection.fields(context, METHODS["full"], 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 9}, "groups of 1 to 8"),
        ({"head_dim": 96}, "dimensions 64 and 128"),
        ({"max_keys": 2**21 + 1}, "up to 2097152 keys"),
        ({"subspaces": 2}, "2 subspaces"),
        ({"codewords": 512}, "512 codewords"),
        ({"shape": CodeShape(tile_keys=768)}, "power of two"),
    ],
)
def test_sizes_that_kernels_cannot_do_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replace(make_plan(2, 64, 8, 4), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("subspaces", [4, 8, 16, 32])
@pytest.mark.parametrize("max_keys", [100, 4096, 2**21])
def test_launch_shapes_are_valid(max_keys: int, subspaces: int, group: int) -> None:
    shape = code_shape(max_keys, subspaces, group)
    plan = make_plan(group, 64, subspaces, 256, max_keys=max_keys, shape=shape)
    assert plan.tiles * shape.tile_keys >= max_keys
    assert shape.samplers * shape.sample_keys == 8192


class CodeSteps(ListedSteps):
    """Attends to what product codes select."""

    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = {"product_codes": CodeSelection}


def test_steps_attend_to_what_is_listed() -> None:
    torch.manual_seed(8)
    method = method_of(TokenCount(40), bits=4, subspaces=8)
    context = made_up_context(IDENTITY, "float16", method, 500, device=DEVICE)
    tail = torch.randn(2, 6, 2, 64, device=DEVICE).half()
    first, end, tail_keys = 8, 436, 5
    fields = {
        **CodeSteps.fields(context, method, 0),
        records.KV: context.kv(0).data_ptr(),
        records.KV_HEAD: context.kv(0).stride(0) * 2,
        records.TAIL: tail.data_ptr(),
        records.TAIL_HEAD: tail.stride(0) * 2,
        records.KEYS: 500,
        records.FIRST: first,
        records.END: end,
        records.TAIL_KEYS: tail_keys,
        records.KEEP: 40,
    }
    rows = torch.zeros(2, records.RECORD_FIELDS, dtype=torch.int64)
    for field, value in fields.items():
        rows[0, field] = value
    rows = rows.to(DEVICE)
    q = torch.randn(2, 2, 3, 64, device=DEVICE).half() * 2.0
    steps = CodeSteps(StepPlan(IDENTITY, method, 2, 512, torch.float16, DEVICE))
    out = steps.attend(0, q, rows)
    lists = steps.selection.select(0, q, rows)
    assert steps.kept_B().tolist() == [int(lists.counts_RP[:2].sum()), 0]
    assert not out[1].any()
    for h in range(2):
        always = [*range(first), *range(end, 500)]
        ids = torch.tensor(always + listed_keys(lists, h), device=DEVICE)
        kv = torch.cat([context.kv(0)[h, ids], tail[h, :tail_keys]]).float()
        expected = (q[0, h].float() @ kv[:, 0].t() / 8.0).softmax(-1) @ kv[:, 1]
        torch.testing.assert_close(out[0, h].float(), expected, rtol=3e-3, atol=3e-3)
