"""Steps of a batch give the logits of the general path, of every method, model, placement and kind of rows.

With a budget of all keys, but where both are given the same lists: of fewer, the two keep others near the border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.layers.dense_layer import keys_in_window
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.steps.attention.listed_steps import WindowSteps
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.store.description.dtypes import INT8
from tests.decode_engine.steps.sessions import (
    PAST_A_WINDOW,
    PROMPTS,
    Case,
    begin,
    general_logits,
    make_contexts,
    make_runner,
    make_stepper,
    method_of,
    step_logits,
)
from tests.support.devices import DEVICE, nightly
from tests.support.layers import presets_with_kernels
from tests.support.models import HEAD_SHAPES, STATEFUL
from tests.support.tiny_model import IDENTITY

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else [pytest.mark.usefixtures("few_programs", "watched")]
HYBRID, HOST = Placement.HYBRID, Placement.HOST
POOLED = "csattention+dropped@group=pooled"
USUAL = replace(IDENTITY, query_heads=4, kv_heads=2, head_dim=64)
WINDOWS = (90, 9)
"""A context that is longer than a window, and one that is not."""
STATES = (90, 0, 30)
STEPS = 2


def in_the_interpreter() -> list[Any]:
    return [
        Case(method="multipole+dropped", placement=HYBRID, dense=(0,)),
        Case(method=POOLED, placement=HOST, keep=0.05, lengths=(230, 130, 130)),
        *(Case(method=name, rows=INT8) for name in ("full", "refined", "csattention")),
        Case(method=POOLED, rows=INT8, dense=(1,)),
        Case(method="multipole", rows=INT8, placement=HYBRID),
        Case(method="refined+dropped", rows=INT8, placement=HYBRID, dense=(0,)),
        Case(method=POOLED, rows=INT8, placement=HOST),
        Case(method="refined", rows=INT8, placement=HYBRID, heads="large groups", lengths=(90, 40)),
        Case(method="csattention+dropped", model="windows", lengths=WINDOWS),
        Case(method="csattention", model="windows only", lengths=WINDOWS),
        *(Case(model=each, lengths=WINDOWS) for each in ("sinks", "experts", "another scale", "chunks")),
        Case(method="multipole", model="sinks", lengths=WINDOWS),
        Case(method="multipole+dropped", model="sinks", lengths=WINDOWS, placement=HYBRID),
        Case(method="refined", model="windows", heads="long rows", placement=HYBRID, lengths=(90, 40)),
        # Two without a context are a group that shares no keys; beside one on a context they share its batch.
        Case(model="windows", lengths=(0, 0)),
        Case(model="sinks", lengths=(90, 0)),
        *(Case(model=each, lengths=STATES) for each in ("qwen3_next", "granitemoehybrid")),
        Case(method="csattention", model="lfm2", lengths=(90, 12, 30)),
        *nightly(
            *(Case(method=name, rows=INT8, heads=heads) for name in ("full", "refined") for heads in HEAD_SHAPES),
            Case(method="refined", rows=INT8, placement=HYBRID, heads="long rows"),
            *(
                Case(method=name, model="windows", heads=heads, lengths=(90, 40))
                for name in ("full", "refined")
                for heads in HEAD_SHAPES
            ),
            Case(method="refined", model="windows", heads="large groups", placement=HYBRID, lengths=(90, 40)),
            *(Case(model=each, lengths=(0, 0)) for each in ("windows only", "sinks")),
            *(Case(model=each, lengths=(90, 0)) for each in ("windows", "windows only")),
            *(Case(model=each, lengths=STATES) for each in [*STATEFUL][1:] if each != "granitemoehybrid"),
        ),
    ]  # fmt: skip


def with_every_preset(cases: list[Any]) -> list[Any]:
    """And one over the device of each preset that has kernels and no other case."""
    listed = {case.method for case in cases if isinstance(case, Case)}
    return [*cases, *(Case(method=name) for name in presets_with_kernels(USUAL) if name not in listed)]


def on_a_gpu() -> list[Any]:
    methods = ("full", "csattention+dropped", "csattention", "multipole", "multipole+dropped", "refined")
    in_planes = ("full", "refined", "csattention", "csattention+dropped", "multipole")
    kinds = ("windows", "windows only", "chunks", "sinks", "experts", "another scale")
    long = (4000, 150, 2777)  # coarse rows are no shorter
    return [
        *(Case(method=name) for name in (*methods, "csattention+monopole", "refined+dropped")),
        *(Case(method=name, placement=HYBRID, dense=dense) for name, dense in product(methods, [(), (1,)])),
        Case(method=POOLED, placement=HOST, keep=0.05),
        *(
            Case(method=name, rows=INT8, placement=placement, dense=dense)
            for name, dense, placement in product(in_planes, [(), (1,)], [Placement.DEVICE, HYBRID])
        ),
        *(
            Case(method=name, rows=INT8, placement=placement, heads=heads)
            for name, heads, placement in product(("full", "refined"), HEAD_SHAPES, [Placement.DEVICE, HYBRID])
        ),
        *(
            Case(method=name, model=kind, lengths=(4000, 15, 2777))
            for name, kind in product(("full", "csattention", "csattention+dropped", "multipole"), kinds)
        ),
        *(Case(model=kind, lengths=(0, 0, 2777)) for kind in kinds[:-1]),
        *(
            Case(method=name, model="windows", heads=heads, lengths=long)
            for name, heads in product(("full", "refined", "refined+dropped"), HEAD_SHAPES)
        ),
        Case(method="refined-3", model="windows", heads="long rows", lengths=long),
        *(Case(method=name, model=each, lengths=long) for name, each in product(("full", "refined"), STATEFUL)),
        Case(method="csattention+dropped", model="qwen3_next", lengths=long),
    ]  # fmt: skip


Runners = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Runners:
    """Models by what is special about them, each made once."""
    made: dict[tuple[str, ...], ModelRunner] = {}

    def get(model: str, heads: str, wide: str = "") -> ModelRunner:
        if (model, heads, wide) not in made:
            made[model, heads, wide] = make_runner(tmp_path_factory.mktemp("model"), model, heads)
        return made[model, heads, wide]

    return get


@contextmanager
def stepping(runner: ModelRunner) -> Iterator[Stepper]:
    threads = SearchThreads(2)
    yield make_stepper(runner, threads)
    threads.close()


@pytest.mark.parametrize(
    "case", with_every_preset(on_a_gpu() if DEVICE == "cuda" else in_the_interpreter()), ids=str
)
def test_steps_equal_the_general_path(runners: Runners, case: Case) -> None:
    runner, wide = runners(case.model, case.heads), None
    if DEVICE == "cuda" and case.model != "usual":
        wide = in_float32(runners(case.model, case.heads, "wide"))
    worlds = [each for each in (runner, runner, wide) if each is not None]
    method = method_of(case.method, case.keep)
    contexts = make_contexts(runner, case)
    prompts = PROMPTS if case.model == "usual" else PAST_A_WINDOW
    groups = [
        begin(each, contexts if each is runner else make_contexts(each, case), method, prompts)
        for each in worlds
    ]
    (sessions, twins, *_), tokens = groups, [3, 4, 5][: len(contexts)]
    before = [session.figures.attended for session in sessions]
    compared = []
    with stepping(runner) as stepper:
        assert all(map(stepper.takes, sessions))
        for _ in range(STEPS):
            graph, chosen, found = step_logits(stepper, sessions, tokens)
            others = zip(worlds[1:], groups[1:], strict=True)
            compared.append([found, *(general_logits(each, group, tokens) for each, group in others)])
            tokens = chosen
        if case.model == "windows":  # windows stay on the device where other keys are in host memory
            assert [type(each) is WindowSteps for each in graph.batch._layers] == [True, False, True]
    check_logits(case, *(torch.cat(parts) for parts in zip(*compared, strict=True)))
    for session, twin in zip(sessions, twins, strict=True):
        one, other = session.figures, twin.figures
        assert (session.position, one.available) == (twin.position, other.available)
        assert one.attended == other.attended
    if case.placement is HOST:
        assert all(session.figures.searches >= STEPS for session in sessions)
    if case.placement.kv_on_host:
        check_rows(case, sessions, before)
    if sessions[0].states is not None:
        check_states(*groups)


def in_float32(runner: ModelRunner) -> ModelRunner:
    runner.model.float()
    runner._compute_dtype = torch.float32  # of states
    return runner


def check_logits(case: Case, found: Tensor, expected: Tensor, wide: Tensor | None = None) -> None:
    """Of captured steps, of the general path, and on a GPU of that in float32."""
    if wide is not None:
        # Runs in 16 bits whose rounding has nothing in common are the square root of two times that far apart. Experts
        # may be chosen otherwise here and there: then most rows must still be about equal.
        of = torch.median if case.model == "experts" else torch.max
        rounding = distances(expected, wide)
        assert float(of(distances(found, expected))) < 2**0.5 * float(of(rounding))
        assert float(rounding.median()) < 0.2
    elif DEVICE == "cuda" or (case.method, case.rows) == ("multipole", INT8):
        # Sums in 16 bits in another order: up to .12 were found, by those of dropped remainders. Means
        # of clusters are of rows before they were coded, which `monopole` takes out.
        assert float((found - expected).abs().amax() / expected.std()) < (0.2 if DEVICE == "cuda" else 2e-2)
    else:
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def distances(left_BX: Tensor, right_BX: Tensor) -> Tensor:
    """[B]: the root mean square of each row's differences, as a share of the numbers' spread."""
    return (left_BX - right_BX).pow(2).mean(1).sqrt() / right_BX.std()


def check_rows(case: Case, sessions: list[Session], before: list[int]) -> None:
    """Rows in host memory that were attended to were read, or found in slots; tails and windows are on the device."""
    assert sum(session.figures.host_bytes_read for session in sessions) > 0
    sparse = case.method != "full"
    assert any(session.figures.rows_reused > 0 for session in sessions) == sparse
    if DEVICE == "cuda" or case.model != "usual" or case.rows == INT8:
        return
    for session, attended in zip(sessions, before, strict=True):
        model, figures = session.context.manifest.model, session.figures
        tails = sum(session.tail_keys - step for step in range(STEPS))
        rows = figures.attended - attended - model.layers * model.kv_heads * tails
        assert figures.host_bytes_read == (rows - figures.rows_reused) * 2 * model.head_dim * 4


def check_states(sessions: list[Session], twins: list[Session], exact: list[Session] | None = None) -> None:
    """What captured steps left is what the general path left, on a GPU as near as that is to the same in float32."""
    for session, twin, wide in zip(sessions, twins, exact or twins, strict=True):
        assert None not in (session.states, twin.states, wide.states)
        parts = zip(session.states.parts, twin.states.parts, wide.states.parts, strict=True)
        for own, other, third in parts:
            if exact is None:
                torch.testing.assert_close(own, other, rtol=2e-3, atol=2e-3)
            else:
                rows = [each.float().flatten(1) for each in (own, other, third)]
                apart, rounding = distances(rows[0], rows[1]), distances(rows[1], rows[2])
                assert float(apart.max()) < max(2**0.5 * float(rounding.max()), 0.01)


def test_capped_logits_take_the_general_path(runners: Runners, caplog: pytest.LogCaptureFixture) -> None:
    runner = runners("caps", "usual")
    session = runner.start(runner.no_context, method_of("full").on(runner.no_context.manifest))
    with stepping(runner) as stepper, caplog.at_level("INFO"):
        assert not stepper.takes(session)
    assert any("the model caps its logits" in record.message for record in caplog.records)


@pytest.mark.parametrize("window", [1, 5, 24])
@pytest.mark.parametrize(("position", "positions"), [(0, 1), (0, 40), (3, 2), (23, 9), (100, 7)])
def test_keys_in_a_window_are_counted(window: int, position: int, positions: int) -> None:
    expected = sum(min(place + 1, window) for place in range(position, position + positions))
    assert keys_in_window(position, positions, window) == expected
