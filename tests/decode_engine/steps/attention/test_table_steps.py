"""Decode steps over query tables, through contexts and records: what they keep, count and refuse.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.records import records_of
from decode_engine.kernels.tables.reference import TableSequence, attend_exactly, kept_mask
from decode_engine.kernels.tables.sizes import TableContext, padded_rows
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.selections import TableSelection
from decode_engine.steps.attention.step_attention import StepPlan
from index_store.errors import MethodUnsupportedError
from index_store.memory.resident import ResidentContext
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import METHODS
from index_store.store.description.context_id import ModelIdentity
from tests.decode_engine.kernels.problems.table_problems import DEVICE

IDENTITY = ModelIdentity("tiny", "LlamaForCausalLM", "f", "t", 2, 6, 2, 64, 100, 2**20)
LENGTHS = (300, 700)
SINKS, RECENT, TAIL, KEEP = 8, 20, 5, 30
TABLE_FIELDS = (records.TABLES, records.TABLE_ROW, records.CENTROIDS, records.SCALES)


def method_of(group: str, subspaces: int = 8, split: str = "strided") -> Method:
    tables = INDEX_SPECS["query_tables"].with_parameters(subspaces=subspaces, centroids=6, split=split)
    method = METHODS["csattention"].without_remainder()
    return replace(method, index=tables, search={"group": group, "weights": "projection"})


def plan_of(method: Method, size: int) -> StepPlan:
    return StepPlan(IDENTITY, method, size, 4096, torch.float16, DEVICE)


class Batch:
    """One layer of two contexts with tails, and an idle row."""

    def __init__(self, method: Method, layer: int) -> None:
        self.contexts = [
            made_up_context(IDENTITY, "float16", method, length, distinct=2, device=DEVICE, seed=seed)
            for seed, length in enumerate(LENGTHS)
        ]
        self.indexes = [context.index(method.index.name, layer) for context in self.contexts]
        self.sequences: list[TableSequence | None] = []
        for context, index in zip(self.contexts, self.indexes, strict=True):
            arrays, kv = index.arrays(), context.kv(layer)
            tables = TableContext(kv, padded_rows(arrays["scores"]), arrays["centroids"], arrays["scales"])
            tail = torch.randn(2, TAIL + 3, 2, 64, device=DEVICE).half()
            self.sequences.append(TableSequence(tables, tail, SINKS, kv.shape[1] - RECENT, TAIL, KEEP))
        self.sequences.append(None)
        self.records = records_of(self.sequences, DEVICE)
        for row, context in enumerate(self.contexts):
            fields = ListedSteps.fields(context, method, layer)
            assert set(fields) == set(TABLE_FIELDS)
            for field, value in fields.items():
                self.records[row, field] = value
        self.q = (2.0 * torch.randn(3, 2, 3, 64, device=DEVICE)).half()

    def scores(self, row: int, method: Method) -> Tensor:
        """By the search of the general path: [H, searched keys], higher is better."""
        sequence = self.sequences[row]
        queries_HTGD = self.q[row].float()[:, None] / 8.0
        ranking = self.indexes[row].rank(queries_HTGD, SINKS, sequence.end, None, method.search)
        return ranking.scores()[:, 0]


@pytest.mark.parametrize(
    ("group", "subspaces", "split"), [("pooled", 8, "contiguous"), ("per_head", 16, "strided")]
)
def test_steps_attend_to_what_the_search_of_the_cpu_finds(group: str, subspaces: int, split: str) -> None:
    torch.manual_seed(subspaces)
    method = method_of(group, subspaces, split)
    batch = Batch(method, 1)
    lists = TableSelection(plan_of(method, 3)).select(1, batch.q, batch.records)
    steps = ListedSteps(plan_of(method, 3))
    assert steps.selection.attends_alone
    assert not ListedSteps(replace(plan_of(method, 3), planes=True)).attends_alone
    out = steps.attend(1, batch.q, batch.records)
    assert not out[2].any()
    counts_B = lists.counts_RP.view(3, -1).sum(1)
    assert steps.kept_B().tolist() == counts_B.tolist()
    assert int(counts_B[2]) == 0
    for row, sequence in enumerate(batch.sequences[:2]):
        assert sequence is not None
        best_HN = batch.scores(row, method)
        for h in range(2):
            segment = row * 2 + h
            kept = kept_mask(lists.ids_RPW[segment], lists.counts_RP[segment], LENGTHS[row])
            count = int(kept.sum())
            assert KEEP * 0.5 < count < KEEP * 1.5
            best = best_HN[h].topk(count).indices + SINKS
            assert int(kept[best].sum()) >= 0.9 * count - 1
            expected, _ = attend_exactly(batch.q[row, h].float(), sequence, kept, 0.125, h)
            assert float((out[row, h] - expected).norm() / expected.norm()) < 2e-3


def test_kept_keys_are_counted_over_layers() -> None:
    torch.manual_seed(0)
    method = method_of("pooled")
    batch = Batch(method, 0)
    steps = ListedSteps(plan_of(method, 3))
    assert steps.kept_B().tolist() == [0, 0, 0]
    steps.attend(0, batch.q, batch.records)
    once = steps.kept_B()
    steps.attend(1, batch.q, batch.records)
    assert steps.kept_B().dtype == torch.int64
    assert torch.equal(steps.kept_B(), 2 * once)
    steps.attend(0, batch.q, torch.zeros_like(batch.records))
    assert torch.equal(steps.kept_B(), once)


def test_rows_that_are_not_padded_are_copied_once() -> None:
    method = method_of("pooled")
    context = made_up_context(IDENTITY, "float16", method, 300, device=DEVICE)
    stored = context.index(method.index.name, 0).arrays()["scores"]
    first, again = (TableSelection.fields(context, method, 0) for _ in range(2))
    assert first == again
    assert first[records.TABLES] != stored.data_ptr()
    assert first[records.TABLE_ROW] == 512
    whole = made_up_context(IDENTITY, "float16", method, 512, device=DEVICE)
    stored = whole.index(method.index.name, 0).arrays()["scores"]
    assert TableSelection.fields(whole, method, 0)[records.TABLES] == stored.data_ptr()


def clause(method: Method, context: ResidentContext) -> str | None:
    return TableSelection.refusal(method, context.manifest)


def test_what_kernels_cannot_search_is_refused() -> None:
    method = method_of("per_head")
    context = made_up_context(IDENTITY, "float16", method, 300)
    assert clause(method, context) is None
    assert ListedSteps.refusal(method, context.manifest) is None
    for other, message in (
        (METHODS["multipole"], "no query tables"),
        (METHODS["full"], "no query tables"),
        (METHODS["csattention-paper"], "lists"),
        (replace(method, search={"group": "pooled", "weights": "uniform"}), "weighted uniform"),
        (replace(method, index=method.index.with_parameters(subspaces=1)), "1 subspaces"),
        (replace(method, index=method.index.with_parameters(centroids=300)), "300 centroids"),
    ):
        assert message in str(clause(other, context))
    assert clause(METHODS["csattention"], context) is None
    wide = replace(context.manifest.model, query_heads=18)
    assert "groups of 1 to 8" in str(clause(method, made_up_context(wide, "float16", method, 300)))


def test_a_method_without_tables_has_no_plan() -> None:
    with pytest.raises(MethodUnsupportedError, match="no query tables"):
        TableSelection(plan_of(METHODS["full"], 1))
    context = made_up_context(IDENTITY, "float16", METHODS["full"], 300)
    with pytest.raises(MethodUnsupportedError, match="no query tables"):
        TableSelection.fields(context, METHODS["full"], 0)
