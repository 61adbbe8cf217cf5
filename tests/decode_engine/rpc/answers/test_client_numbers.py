"""Numbers that clients send, in expressions and in fields: whatever they are, they are refused or decode."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decode_engine.core.service import choose_method
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.orders.fields import MAX_METHOD_CHARACTERS
from decode_engine.rpc.generation_service import parse_order
from decode_engine.rpc.transport.status import code_of
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import resolve_model
from index_store.selection.budgets import REMAINDERS
from sparsekv.v1 import generation_pb2
from tests.support.models import write_model_folder

HUGE = "1" + 24 * "0"
POSITIONS = 2048


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, ResidentContext]:
    """A runner, and a context with the indexes of all methods."""
    folder: Path = tmp_path_factory.mktemp("numbers") / "model"
    runner = ModelRunner(
        resolve_model(str(write_model_folder(folder, layers=2, head_dim=32, max_positions=POSITIONS)))
    )
    also = [*METHODS.values(), get_method("multipole+dipole")]
    return runner, made_up_context(runner.identity, runner.kv_dtype, METHODS["csattention"], 160, also=also)


_NUMBERS = "0 1 -1 2 8 16 33 160 0.5 1.0 1.5 -0.1 1e-320 1e24 1e400 nan inf -inf"
_WORDS = "x pooled per_head uniform projection"
_LARGE = [POSITIONS, POSITIONS + 1, 2**31, 2**63, HUGE, f"-{HUGE}"]
_VALUES = st.sampled_from([*_NUMBERS.split(), *map(str, _LARGE), *_WORDS.split()])
_WINDOWS = "sinks recent append_block period"
_SEARCH = "coarse_keep backoff_cosine backoff_centroids group weights colour"
_NAMES = st.sampled_from([*_WINDOWS.split(), *_SEARCH.split()])
_OPTIONS = st.builds("@{}={}".format, _NAMES, _VALUES)
_EXPRESSIONS = st.builds(
    lambda preset, remainder, options: preset + remainder + "".join(options),
    st.sampled_from([*METHODS, "quickest"]),
    st.sampled_from(["", *(f"+{name}" for name in REMAINDERS)]),
    st.lists(_OPTIONS, max_size=3),
).filter(lambda text: len(text) <= MAX_METHOD_CHARACTERS)
_BUDGETS = st.one_of(
    st.just({}),
    st.builds(lambda ratio: {"keep_ratio": ratio}, st.floats()),
    st.builds(lambda mass: {"target_mass": mass}, st.floats()),
    st.builds(lambda tokens: {"token_budget": tokens}, st.integers(-(2**31), 2**31 - 1)),
    st.sampled_from(
        [{"keep_ratio": 0.3}, {"keep_ratio": 1e-320}, {"target_mass": 1e-320}, {"target_mass": 1.0}]
    ),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(method=_EXPRESSIONS, budget=_BUDGETS, period=st.sampled_from([0, 0, 1, 64, 65, -1]))
@example(method=f"csattention+dropped@recent={HUGE}", budget={}, period=0)
@example(method=f"multipole@append_block={HUGE}", budget={"token_budget": 2**31 - 1}, period=64)
@example(method=f"quest@sinks={POSITIONS}@recent={POSITIONS}@append_block={POSITIONS}", budget={}, period=0)
@example(method="csattention-paper@backoff_centroids=64@backoff_cosine=1", budget={}, period=0)
def test_every_expression_is_refused_or_decodes(
    served: tuple[ModelRunner, ResidentContext], method: str, budget: dict[str, float], period: int
) -> None:
    runner, context = served
    request = generation_pb2.GenerateRequest(
        context="contexts/" + "0" * 64, text="Who?", method=method, search_period=period, **budget
    )
    try:
        fitted = choose_method(parse_order(request), context.manifest).on(context.manifest)
    except SparseKVError as error:
        if code_of(error) is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return
    session = runner.start(context, fitted)
    runner.read([session], [[1, 2, 3]])
    runner.read([session], [[4]])
    (token,) = runner.decode([session], [5], [Sampler(SamplingParameters())])
    assert isinstance(token, int)
    session.close()


@pytest.mark.parametrize(("option", "least"), [("@sinks", 0), ("@recent", 1), ("@append_block", 1)], ids=str)
def test_a_refused_window_names_option_value_and_range(
    served: tuple[ModelRunner, ResidentContext], option: str, least: int
) -> None:
    _, context = served
    with pytest.raises(InvalidArgumentError) as caught:
        get_method(f"csattention+dropped{option}={HUGE}").on(context.manifest)
    assert f"{option} is {HUGE}, expected {least} to {POSITIONS}, the positions" in str(caught.value)
    get_method(f"csattention+dropped{option}={POSITIONS}").on(context.manifest)
