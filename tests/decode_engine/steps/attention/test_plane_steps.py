"""Captured steps over contexts with rows in 8 bits: wherever the low plane is, bits are the same.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured.
"""

from __future__ import annotations

import pytest
import torch

from decode_engine.kernels import records
from decode_engine.kernels.slots.slot_cache import SlotCache
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import slot_cache
from decode_engine.steps.attention.selections import CoarseSelection
from decode_engine.steps.batch_kinds import BatchKinds
from index_store.memory.placement import Placement, slot_bytes
from index_store.store.description.dtypes import AS_DTYPE, INT8
from tests.decode_engine.steps.sessions import (
    DTYPE,
    Case,
    begin,
    make_contexts,
    make_stepper,
    method_of,
    step_logits,
)
from tests.support.devices import DEVICE, nightly

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else [pytest.mark.usefixtures("few_programs", "watched")]


@pytest.mark.parametrize("expression", ["refined", *nightly("multipole", "csattention+dropped")])
def test_where_low_rows_lie_changes_no_bit(
    runner: ModelRunner, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In device memory, in slots, or in host memory alone; also where one launch could do the whole attention."""
    monkeypatch.setattr(CoarseSelection, "attends_alone", property(lambda self: True))
    method, found = method_of(expression, 0.1), []
    for placement, slots in (
        (Placement.DEVICE, True),
        (Placement.HYBRID, False),
        (Placement.HYBRID, True),
    ):
        contexts = make_contexts(runner, Case(method=expression, keep=0.1, placement=placement, rows=INT8))
        with pytest.MonkeyPatch.context() as patched:
            if not slots:
                patched.setattr(SlotCache, "fields", lambda self, layer: {})
            stepper, sessions = make_stepper(runner), begin(runner, contexts, method)
            steps = [step_logits(stepper, sessions, [3 + step, 4, 5])[2] for step in range(2)]
        found.append(torch.stack(steps))
        reused = sum(session.figures.rows_reused for session in sessions)
        assert (reused > 0) == (placement is Placement.HYBRID and slots)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    # Slots and PCIe see low rows only.
    layers, keys = runner.identity.layers, contexts[0].manifest.token_count
    caches = [slot_cache(contexts[0], layer) for layer in range(layers)]
    assert sum(cache.nbytes for cache in caches) == slot_bytes(contexts[0].manifest)
    assert caches[0].rows_LHS2D.shape[3:] == (2, runner.identity.head_dim // 2)
    read = sum(session.figures.host_bytes_read for session in sessions)
    assert 0 < read < 2 * 3 * layers * runner.identity.kv_heads * keys * runner.identity.head_dim


def test_rows_in_planes_and_in_one_piece_never_share_a_batch(runner: ModelRunner) -> None:
    method, kinds = method_of("refined", 0.1), BatchKinds(DTYPE)
    found = []
    for rows in (AS_DTYPE, INT8):
        context = made_up_context(
            runner.identity, runner.kv_dtype, method, 140, rows=rows, placement=Placement.HYBRID
        )
        kind = kinds.sort(method.on(context.manifest), Placement.HYBRID)
        assert not isinstance(kind, str)
        found.append(kind)
    one, other = found
    assert one.key != other.key
    assert (one.planes, other.planes) == (False, True)
    assert (one.row_bytes, other.row_bytes) == (2 * 64 * DTYPE.itemsize, 64)


def test_records_point_to_both_planes_whatever_is_searched(runner: ModelRunner) -> None:
    case = Case(method="csattention+dropped", keep=0.1, rows=INT8)
    contexts = make_contexts(runner, case)
    sessions = begin(runner, contexts, method_of(case.method, case.keep))
    graph, *_ = step_logits(make_stepper(runner), sessions, [3, 4, 5])
    record, context = graph.batch._records_LBF[1, 0], contexts[0]
    planes = context.rows(1)
    low = context.stored_rows(1)
    assert record[records.KV] == low.data_ptr() == planes.data_ptr()
    assert record[records.KV_HEAD] == low.stride(0) == low.shape[1] * runner.identity.head_dim
    arrays = context.index("coarse_rows", 1).arrays()
    assert record[records.KEY_CODES] == arrays["key_codes"].data_ptr()
    assert record[records.VALUE_OFFSETS] == arrays["value_offsets"].data_ptr()
