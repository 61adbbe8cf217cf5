"""Captured steps over contexts with rows in 8 bits equal the general path, wherever the low plane is.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.kernels import records
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import slot_cache
from decode_engine.steps.attention.selections import CoarseSelection
from decode_engine.steps.batch_kinds import BatchKinds, step_attention_for
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement, slot_bytes
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.models.resolve import resolve_model
from index_store.store.description.dtypes import AS_DTYPE, INT8
from tests.support.devices import nightly
from tests.support.models import HEAD_SHAPES, write_model_folder

pytestmark = [pytest.mark.usefixtures("few_programs", "watched")]
LENGTHS = (150, 60)
SMALL = {"keys_per_cluster": 8, "block": 128, "iterations": 3}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(tmp_path_factory.mktemp("model"), {"kv_heads": 1, "query_heads": 2, "head_dim": 64})


def make_runner(folder: Path, heads: Mapping[str, int]) -> ModelRunner:
    return ModelRunner(resolve_model(str(write_model_folder(folder, max_positions=8192, **heads))))


def small(expression: str, share: float) -> Method:
    if expression == "full":
        return METHODS["full"]
    method = replace(get_method(expression, share), recent=16, append_block=16, partition_optional=False)
    if method.index is not None and method.index.kind == "key_clusters":
        method = replace(method, index=method.index.with_parameters(**SMALL))
    if method.partition is not None and method.partition.kind == "key_clusters":
        method = replace(method, partition=method.partition.with_parameters(**SMALL))
    return method


def make_contexts(
    runner: ModelRunner, method: Method, placement: Placement = Placement.DEVICE
) -> list[ResidentContext]:
    return [
        made_up_context(
            runner.identity, runner.kv_dtype, method, length, seed=length, placement=placement, rows=INT8
        )
        for length in LENGTHS
    ]


def begin(runner: ModelRunner, contexts: list[ResidentContext], method: Method) -> list[Session]:
    """Two sessions of one context and one of another, with prompts read."""
    sessions = [
        runner.start(context, method.on(context.manifest))
        for context in (contexts[0], contexts[0], contexts[1])
    ]
    for row, session in enumerate(sessions):
        runner.forward([session], [[5 + row, 9, 2]], exact=True)
    return sessions


def make_stepper(runner: ModelRunner, threads: SearchThreads | None = None) -> Stepper:
    model = step_model(runner.model)
    return Stepper(model, runner.identity, torch.float32, torch.device("cpu"), searching=threads)


def logits_of(runner: ModelRunner, sessions: list[Session], steps: int = 1) -> Tensor:
    """Of the last step."""
    threads = SearchThreads(1)
    stepper = make_stepper(runner, threads)
    assert all(stepper.takes(session) for session in sessions)
    samplers = [Sampler(SamplingParameters())] * len(sessions)
    for step in range(steps):
        assert all(isinstance(token, int) for token in stepper.step(sessions, [3 + step, 4, 5], samplers))
    threads.close()
    return stepper.graph(sessions).logits_BV[: len(sessions)].clone()


@pytest.mark.parametrize(
    ("expression", "placement", "dense"),
    [
        ("full", Placement.DEVICE, ()),
        ("refined", Placement.DEVICE, ()),
        ("csattention", Placement.DEVICE, ()),
        ("csattention+dropped@group=pooled", Placement.DEVICE, (1,)),
        ("multipole", Placement.HYBRID, ()),
        ("refined+dropped", Placement.HYBRID, (0,)),
        ("csattention+dropped@group=pooled", Placement.HOST, ()),
    ],
)
def test_steps_equal_the_general_path(
    runner: ModelRunner, expression: str, placement: Placement, dense: tuple[int, ...]
) -> None:
    """With a budget of all keys. Means of clusters are of rows before they were coded, which `monopole` takes out."""
    check_steps(runner, expression, placement, dense)


@pytest.mark.parametrize("heads", ["large groups", *nightly("long rows")])
@pytest.mark.parametrize(
    ("expression", "placement"),
    [("refined", Placement.HYBRID), *nightly(("full", Placement.DEVICE), ("refined", Placement.DEVICE))],
)
def test_other_heads_step_as_on_the_general_path(
    tmp_path: Path, heads: str, expression: str, placement: Placement
) -> None:
    check_steps(make_runner(tmp_path, HEAD_SHAPES[heads]), expression, placement)


def check_steps(
    runner: ModelRunner, expression: str, placement: Placement, dense: tuple[int, ...] = ()
) -> None:
    method = small(expression, 1.0)
    contexts = make_contexts(runner, method, placement)
    for context in contexts:
        context.manifest = replace(context.manifest, dense_layers=dense)
    sessions, twins = (begin(runner, contexts, method) for _ in range(2))
    found = logits_of(runner, sessions)
    expected = torch.stack([logits[-1] for logits in runner.forward(twins, [[3], [4], [5]])])
    assert float((found - expected).abs().amax() / expected.std()) < (
        2e-2 if expression == "multipole" else 1e-3
    )
    read = sum(session.figures.host_bytes_read for session in sessions)
    assert (read > 0) == placement.kv_on_host


@pytest.mark.parametrize("expression", ["refined", *nightly("multipole")])
def test_hybrid_equals_device_bit_for_bit(
    runner: ModelRunner, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one launch could do the whole attention to rows in one piece."""
    monkeypatch.setattr(CoarseSelection, "attends_alone", property(lambda self: True))
    method, found = small(expression, 0.1), []
    for placement in (Placement.DEVICE, Placement.HYBRID):
        contexts = make_contexts(runner, method, placement)
        sessions = begin(runner, contexts, method)
        found.append(logits_of(runner, sessions, steps=2))
    assert torch.equal(*found)
    counts = slot_cache(contexts[0], 0).counts()
    assert min(counts.reused, counts.fetched) > 0
    # Slots and PCIe see low rows only.
    layers, keys = runner.identity.layers, contexts[0].manifest.token_count
    caches = [slot_cache(contexts[0], layer) for layer in range(layers)]
    assert sum(cache.nbytes for cache in caches) == slot_bytes(contexts[0].manifest)
    assert caches[0].rows_LHS2D.shape[3:] == (2, runner.identity.head_dim // 2)
    read = sum(session.figures.host_bytes_read for session in sessions)
    assert 0 < read < 2 * 3 * layers * runner.identity.kv_heads * keys * runner.identity.head_dim


def test_rows_in_planes_and_in_one_piece_never_share_a_batch(runner: ModelRunner) -> None:
    method, kinds = small("refined", 0.1), BatchKinds(torch.float32)
    found = []
    for rows in (AS_DTYPE, INT8):
        context = made_up_context(
            runner.identity, "float32", method, 140, rows=rows, placement=Placement.HYBRID
        )
        kind = kinds.sort(method.on(context.manifest), Placement.HYBRID)
        assert not isinstance(kind, str)
        found.append(kind)
    one, other = found
    assert one.key != other.key
    assert (one.planes, other.planes) == (False, True)
    assert (one.row_bytes, other.row_bytes) == (2 * 64 * 4, 64)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("refined", "ListedSteps"),
        ("csattention+dropped@group=pooled", "ListedSteps"),
        ("full", "DenseSteps"),
        ("refined-3", "a record has room for one coarse copy"),
    ],
)
def test_who_reads_planes(runner: ModelRunner, expression: str, expected: str) -> None:
    method = get_method(expression)
    manifest = made_up_context(runner.identity, "float32", method, 140, rows=INT8).manifest
    found = step_attention_for(method, manifest)
    assert expected in (found if isinstance(found, str) else found.__name__)


def test_records_point_to_both_planes_whatever_is_searched(runner: ModelRunner) -> None:
    method = small("csattention+dropped", 0.1)
    context = make_contexts(runner, method)[0]
    sessions = begin(runner, [context, context], method)
    stepper = make_stepper(runner)
    stepper.step(sessions, [3, 4, 5], [Sampler(SamplingParameters())] * 3)
    record = stepper.graph(sessions).batch._records_LBF[1, 0]
    planes = context.rows(1)
    low = context.stored_rows(1)
    assert record[records.KV] == low.data_ptr() == planes.data_ptr()
    assert record[records.KV_HEAD] == low.stride(0) == low.shape[1] * runner.identity.head_dim
    arrays = context.index("coarse_rows", 1).arrays()
    assert record[records.KEY_CODES] == arrays["key_codes"].data_ptr()
    assert record[records.VALUE_OFFSETS] == arrays["value_offsets"].data_ptr()
