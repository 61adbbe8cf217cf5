"""Sessions on made-up contexts, and their decode steps: on the general path and in batches.

Without a CUDA device kernels run in Triton's interpreter, over shorter contexts, and no graph is captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.step_graph import StepGraph, StepModel, step_model
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.models.resolve import resolve_model
from index_store.store.description.dtypes import AS_DTYPE
from tests.support.devices import DEVICE
from tests.support.models import HEAD_SHAPES, LAYER_KINDS, STATEFUL, write_model_folder

GREEDY = SamplingParameters()
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LENGTHS = (4000, 4000, 1500) if DEVICE == "cuda" else (150, 150, 60)
PROMPTS = ([5, 9, 2], [7], [1, 2, 3, 4])
PAST_A_WINDOW = ([5, 9, 2], list(range(40)), [7])
SMALL = {"keys_per_cluster": 8, "block": 128, "iterations": 3}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sessions that step together.

    method: which keeps that share of the keys. model: the usual one, or one of `LAYER_KINDS` or `STATEFUL`. heads: the
    usual ones, or some of `HEAD_SHAPES`. dense: layers. lengths: of their contexts; those of one length share one, 0
    stands for none.
    """

    method: str = "full"
    keep: float = 1.0
    model: str = "usual"
    heads: str = "usual"
    placement: Placement = Placement.DEVICE
    rows: str = AS_DTYPE
    dense: tuple[int, ...] = ()
    lengths: tuple[int, ...] = LENGTHS

    def __str__(self) -> str:
        told = [getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default]
        return "-".join(map(str, told)) or self.method


def make_runner(
    folder: Path, model: str = "usual", heads: str = "usual", dtype: torch.dtype = DTYPE
) -> ModelRunner:
    family, settings = LAYER_KINDS.get(model) or (model, STATEFUL.get(model, {}))
    usual = model == "usual"
    shape: Mapping[str, int] = HEAD_SHAPES.get(heads, {"head_dim": 64})
    write_model_folder(
        folder, "llama" if usual else family, layers=2 if usual else 3, max_positions=8192, dtype=dtype,
        **shape, **settings,
    )  # fmt: skip
    return ModelRunner(resolve_model(str(folder)), DEVICE)


def make_stepper(runner: ModelRunner, threads: SearchThreads | None = None) -> Stepper:
    weights = next(runner.model.parameters())
    model = step_model(runner.model)
    return Stepper(
        model, runner.identity, weights.dtype, weights.device, searching=threads, forms=runner.forms
    )


def method_of(expression: str, keep: float = 1.0) -> Method:
    """On a CPU with windows and clusters for short contexts."""
    method = get_method(expression)
    if not method.sparse:
        return method
    method = replace(get_method(expression, keep), partition_optional=False)
    return method if DEVICE == "cuda" else small(method)


def small(method: Method) -> Method:
    method = replace(method, recent=16, append_block=16)
    if method.index is not None and method.index.kind == "key_clusters":
        method = replace(method, index=method.index.with_parameters(**SMALL))
    if method.partition is not None and method.partition.kind == "key_clusters":
        method = replace(method, partition=method.partition.with_parameters(**SMALL))
    return method


def make_contexts(runner: ModelRunner, case: Case) -> list[ResidentContext]:
    """One for each session."""
    made = {0: runner.no_context}
    for length in {*case.lengths} - {0}:
        made[length] = made_up_context(
            runner.identity, runner.kv_dtype, method_of(case.method, case.keep), length,
            distinct=2 if DEVICE == "cuda" else 1, device=DEVICE, seed=length, placement=case.placement,
            rows=case.rows,
        )  # fmt: skip
        made[length].manifest = replace(made[length].manifest, dense_layers=case.dense)
    return [made[length] for length in case.lengths]


def begin(
    runner: ModelRunner,
    contexts: Sequence[ResidentContext],
    method: Method,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[Session]:
    """A session on each, which has read a prompt."""
    sessions = [runner.start(context, method.on(context.manifest)) for context in contexts]
    for session, prompt in zip(sessions, prompts, strict=False):
        runner.forward([session], [prompt], exact=True)
        session.mark()
    return sessions


def step_logits(
    stepper: Stepper, sessions: list[Session], tokens: Sequence[int]
) -> tuple[StepGraph, list[int], Tensor]:
    """A greedy step: the graph, the tokens that it chose, and logits [B, V]."""
    results = stepper.step(sessions, tokens, [Sampler(GREEDY)] * len(sessions))
    chosen = [token for token in results if isinstance(token, int)]
    assert len(chosen) == len(sessions), results
    graph = stepper.graph(sessions)
    assert graph.captured == (DEVICE == "cuda")
    return graph, chosen, graph.logits_BV[: len(sessions)].float().clone()


def general_logits(runner: ModelRunner, sessions: list[Session], tokens: Sequence[int]) -> Tensor:
    """The same step on the general path."""
    found = runner.forward(sessions, [[token] for token in tokens])
    return torch.stack([logits[-1] for logits in found]).float()


def start(
    runner: ModelRunner,
    prompt: list[int],
    length: int = 512,
    *,
    name: str = "full",
    placement: Placement = Placement.DEVICE,
) -> Session:
    """A session on a made-up context that has read a prompt."""
    method = METHODS[name]
    context = made_up_context(runner.identity, runner.kv_dtype, method, length, placement=placement)
    session = runner.start(context, method.on(context.manifest))
    runner.forward([session], [prompt])
    return session


def by_forward(runner: ModelRunner, session: Session, token: int, sampler: Sampler, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        token = sampler.sample(runner.forward([session], [[token]])[0][-1])
        tokens.append(token)
    return tokens


def by_steps(
    stepper: Stepper, sessions: list[Session], tokens: list[int], samplers: list[Sampler], count: int
) -> list[list[int]]:
    histories: list[list[int]] = [[] for _ in sessions]
    for _ in range(count):
        results = stepper.step(sessions, tokens, samplers)
        tokens = [token for token in results if isinstance(token, int)]
        assert len(tokens) == len(results)
        for history, token in zip(histories, tokens, strict=True):
            history.append(token)
    return histories


def successor(tokens: torch.Tensor, positions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """A model that attends to nothing: after token t comes t + 1."""
    return torch.nn.functional.one_hot(tokens[:, 0] + 1, 64).float() * 100


def stepper_of(runner: ModelRunner, model: StepModel = successor) -> Stepper:
    return Stepper(model, runner.identity, torch.float32, torch.device("cpu"))


def seeded(seed: int) -> Sampler:
    return Sampler(SamplingParameters(temperature=1.0, seed=seed))


class OnlyEven:
    """A grammar of even tokens, of which it counts those that were taken."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.ended = False

    def start(self) -> OnlyEven:
        return self

    def allowed(self) -> NDArray[np.int32]:
        return np.full(9, 0x55555555, dtype=np.int32)  # 288 tokens

    def take(self, token: int) -> None:
        self.taken.append(token)
