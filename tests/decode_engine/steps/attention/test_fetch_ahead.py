"""Rows that are fetched before a layer's turn change no bit of any step, and are found when it comes.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.kernels.slots.slot_cache import SlotCache
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.settings.command_options import Compilation
from decode_engine.steps.attention.fetch_ahead import FetchAhead
from decode_engine.steps.attention.step_attention import SideStream, StepAttention, StepPlan
from decode_engine.steps.attention.step_batch import StepBatch
from decode_engine.steps.layer_ahead import foretell_queries, predicted_queries
from decode_engine.steps.operator import foresees, register_batch
from decode_engine.steps.step_model import step_model
from decode_engine.steps.stepper import Stepper
from index_store.errors import MethodUnsupportedError
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from index_store.store.description.manifest import Manifest
from tests.decode_engine.kernels.problems.cluster_problems import make_problem, random_lists
from tests.decode_engine.steps.attention.test_hybrid_steps import (
    GivenHybridSteps,
    GivenLists,
    attend,
    in_host_memory,
    make_steps,
)
from tests.support.models import write_model_folder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
if DEVICE == "cpu":
    pytestmark.append(pytest.mark.usefixtures("few_programs"))
LAYERS, STEPS = 2, 2


def new_runner(folder: Path, family: str = "llama") -> ModelRunner:
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    path = write_model_folder(folder, family, layers=LAYERS, head_dim=64, max_positions=8192, dtype=dtype)
    return ModelRunner(resolve_model(str(path)), DEVICE)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return new_runner(tmp_path_factory.mktemp("model"))


def make_stepper(runner: ModelRunner, prefetch: bool) -> Stepper:
    weights = next(runner.model.parameters())
    model = step_model(runner.model, Compilation.OFF, prefetch)
    return Stepper(model, runner.identity, weights.dtype, weights.device)


def decode(
    runner: ModelRunner, stepper: Stepper, method: Method, placement: Placement, steps: int = STEPS
) -> tuple[list[Tensor], Session]:
    """Logits of a few steps of a session, and the session."""
    context = made_up_context(
        runner.identity, runner.kv_dtype, method, 140, device=DEVICE, placement=placement
    )
    session = runner.start(context, method.on(context.manifest))
    runner.forward([session], [[5, 9, 2]])
    token, logits = 3, []
    for _ in range(steps):
        (result,) = stepper.step([session], [token], [Sampler(SamplingParameters())])
        assert isinstance(result, int)
        token = result
        logits.append(stepper.graph([session]).logits_BV[:1].clone())
    return logits, session


def small(expression: str) -> Method:
    return replace(get_method(expression, 0.1), recent=16, append_block=16)


@pytest.mark.parametrize(("expression", "steps"), [("pq+dropped", STEPS), ("csattention", 1)])
def test_steps_change_no_bit(runner: ModelRunner, expression: str, steps: int) -> None:
    method = small(expression)
    plain, without = decode(runner, make_stepper(runner, False), method, Placement.HYBRID, steps)
    stepper = make_stepper(runner, True)
    ahead, session = decode(runner, stepper, method, Placement.HYBRID, steps)
    for one, other in zip(plain, ahead, strict=True):
        if DEVICE == "cpu" or method.drops_remainder:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    (batch,) = stepper.graph([session]).batch.attentions
    assert isinstance(batch, StepAttention)
    assert fetched_ahead(batch) > 0
    assert session.figures.kept == without.figures.kept
    assert session.figures.rows_reused > without.figures.rows_reused
    assert session.figures.host_bytes_read >= without.figures.host_bytes_read


def fetched_ahead(attention: StepAttention) -> int:
    ahead = vars(attention)["_ahead"]
    assert isinstance(ahead, FetchAhead)
    found_LRX2 = ahead.rows.found_LRX2
    assert int(found_LRX2[0].sum()) == 0  # nobody foretells the first layer's queries
    return int(found_LRX2[1:, ..., 0].sum())


def test_contexts_on_the_device_are_left_alone(runner: ModelRunner) -> None:
    method = small("pq+dropped")
    stepper = make_stepper(runner, True)
    plain, _ = decode(runner, make_stepper(runner, False), method, Placement.DEVICE, 1)
    found, session = decode(runner, stepper, method, Placement.DEVICE, 1)
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one, other)
    assert not foresees(register_batch(stepper.graph([session]).batch))


@pytest.mark.parametrize("right", [True, False])
def test_what_was_foretold_is_found(right: bool) -> None:
    """Two layers whose lists are given: all of the second's rows are there before its turn, or none but the others."""
    problem = make_problem([90, 33], per_cluster=16, tails=(5, 0), dtype=DTYPE, device=DEVICE, recent=10)
    layers = [
        [SlotCache.make((n,), problem.heads, 90, 128, 64, DTYPE, DEVICE) for _ in range(2)] for n in (0, 1)
    ]
    placed = [in_host_memory(problem, list(layers[n]), n) for n in (0, 1)]
    hybrid = make_steps(GivenHybridSteps, problem, "csattention+dropped")
    lists = [random_lists(problem, 0.3, 2, seed=seed) for seed in (0, 1, 2)]
    uncached, _copies = in_host_memory(problem, [None, None], 1)
    expected = attend(hybrid, 1, problem, lists[1], uncached)
    q_BHGD = problem.q_RGD.view(2, problem.heads, *problem.q_RGD.shape[1:])
    hybrid.foresee(1, q_BHGD, placed[1][0])
    foreseen = vars(hybrid)["_ahead"]._selection
    assert isinstance(foreseen, GivenLists)
    foreseen.lists = lists[1 if right else 2]
    attend(hybrid, 0, problem, lists[0], placed[0][0])
    before = layers[1][0].counts()
    assert before.fetched > 0
    assert torch.equal(attend(hybrid, 1, problem, lists[1], placed[1][0]), expected)
    after = layers[1][0].counts()
    assert (after.fetched == before.fetched) == right
    assert after.bypassed == 0


class Echo(StepAttention):
    """Gives queries back."""

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        return None

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return {}

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        return q_BHGD.clone()

    def kept_B(self) -> Tensor:
        return torch.zeros(1)


class Foreseer(Echo):
    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.told: dict[int, Tensor] = {}

    @property
    def foresees(self) -> bool:
        return True

    def foresee(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> None:
        self.told[layer] = q_BHGD.clone()


def echo_batch(runner: ModelRunner, *kinds: type[StepAttention]) -> StepBatch:
    dtype = next(runner.model.parameters()).dtype
    return StepBatch(
        StepPlan(runner.identity, small("pq+dropped"), 1, 256, dtype, torch.device(DEVICE)), kinds
    )


def test_only_layers_of_one_kind_foretell(runner: ModelRunner) -> None:
    batch = echo_batch(runner, Echo, Foreseer, Foreseer)
    q_BHGD = torch.zeros(1, 2, 2, 64, dtype=batch.plan.dtype, device=DEVICE)
    for layer in range(3):
        batch.attend(layer, q_BHGD, q_BHGD[:, :, 0], q_BHGD[:, :, 0], q_BHGD)
    echo, foreseer = batch.attentions
    assert isinstance(foreseer, Foreseer)
    assert foreseer.told.keys() == {2}
    with pytest.raises(TypeError, match="Echo does not use"):
        echo.foresee(1, q_BHGD, q_BHGD)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_compiler_takes_the_hooks(tmp_path: Path, family: str) -> None:
    """In one piece, and what is foretold is what the general path predicts."""
    runner = new_runner(tmp_path, family)
    foretell_queries(runner.model)
    foretell_queries(runner.model)
    batch = echo_batch(runner, *[Foreseer] * LAYERS)
    number = register_batch(batch)

    def run(foretell: bool) -> Tensor:
        tokens = torch.tensor([[7]], device=DEVICE)
        out = runner.model(
            input_ids=tokens, position_ids=tokens, use_cache=False, step_batch=number, foretell=foretell
        )
        return out.logits

    (foreseer,) = batch.attentions
    assert isinstance(foreseer, Foreseer)
    predicted: dict[int, Tensor] = {}
    with torch.inference_mode():
        with predicted_queries(runner.model, predicted):
            expected = run(False)
        assert foreseer.told == {}
        whole = torch.compile(run, backend="eager", fullgraph=True)
        # A compiled model does not multiply rows one by one.
        torch.testing.assert_close(whole(True), expected, rtol=1e-4, atol=1e-4)
    assert foreseer.told.keys() == predicted.keys() == set(range(1, LAYERS))
    for layer, told in foreseer.told.items():
        torch.testing.assert_close(told.flatten(1, 2), predicted[layer][:, :, 0], rtol=1e-4, atol=1e-4)


def test_unknown_models_are_refused() -> None:
    with pytest.raises(MethodUnsupportedError, match="does not know the layers of Linear"):
        foretell_queries(nn.Linear(2, 2))


def test_a_side_stream_may_be_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few streams that are handed out in turn; launches do not run beside each other then."""
    handles = iter((7, 8))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=next(handles)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    same, other = SideStream(torch.device("cuda")), SideStream(torch.device("cuda"))
    assert [same.beside, other.beside, SideStream(torch.device("cpu")).beside] == [False, True, False]
