"""Method `exact` beside `full` on a GPU, through the engine, with drafts of which a told share is right.

usage: python ops/bench/whole_model/exact_gpu.py [--shapes 131072x1,131072x4,32768x16]

The model is a Llama in the shape of Llama-3.1-8B with random weights; contexts are random, one for each session or
fewer (`LENGTHxBATCH@CONTEXTS`). Behind each step's logits, in the same graph, a told token gets the largest one, so
that answers are known, and so is which drafts are right; all else is what a server does. Kinds of answers:

- `copied:C`: a passage of the context, in which every token is another one with a chance of 1 - C: drafts are found by
  suffixes. Behind another token two plain steps go by until two tokens stand in the context again.
- `method:C`: text that stands nowhere; `refined` drafts, and says the told token with chance C.
- `bad`: text that stands nowhere, and no method drafts.

`full` says nothing but `bad`, before and after all others: its steps take as long for any text.

Bars hold for the kinds and numbers of sessions that are named in BARS. One JSON line for each kind.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakKeyDictionary

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import numpy as np
import torch
import typer
from harness.made_up.contexts import PlacedContexts, make_model, release
from harness.parsing import parse_shared_shapes
from harness.report import CheckFailedError, reporting
from harness.steps.answers import Answer, ask
from harness.steps.captured_steps import tidy_up
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.engine.drafting import MOST, ContextSuffixes
from decode_engine.engine.engine import Engine
from decode_engine.layers.session import Session
from decode_engine.model.ranks import Alone
from decode_engine.model.runner import ModelRunner
from decode_engine.orders.order import Order
from decode_engine.settings.command_options import Prompts
from decode_engine.steps.attention.step_batch import StepBatch
from decode_engine.steps.step_graph import StepModel, step_model
from decode_engine.steps.stepper import MAX_ROWS, Stepper, batch_size
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod
from index_store.methods.presets import METHODS
from index_store.store.description.context_id import ModelIdentity

BARS = {
    ("copied:.95", 1): 2.5, ("copied:.95", 4): 2.5, ("copied:.95", 16): 2.5,
    ("method:.99", 1): 1.2, ("method:.99", 4): 1.6, ("method:.99", 16): 2.0,
    ("method:0", 1): 0.97, ("method:0", 4): 0.97, ("method:0", 16): 0.97,
    ("bad", 1): 0.97, ("bad", 4): 0.97, ("bad", 16): 0.97,
}  # fmt: skip
"""Of the time of a token by `full`, divided by that of `exact`."""

PROMPT = 32
LARGEST = 1e4
"""Logit of the told token."""


class Told:
    """Behind a context of so many tokens: the answer, and what a method drafts in its place."""

    def __init__(self, length: int, tokens: int, vocabulary: int, device: torch.device) -> None:
        """tokens: of an answer."""
        self._generator = np.random.default_rng(7)
        self._vocabulary, self._begin = vocabulary, length + PROMPT
        self.text = self._generator.integers(vocabulary, size=length)
        self.suffixes = ContextSuffixes(self.text)
        # Steps that are launched ahead go a few tokens further.
        self._said = torch.zeros(tokens + 4 * MOST, dtype=torch.int64, device=device)
        self._drafted = self._said.clone()

    def tell(self, kind: str) -> list[int]:
        """Makes up an answer of a kind; returns its prompt."""
        name, _, chance = kind.partition(":")
        count = len(self._said)
        begin = int(self._generator.integers(len(self.text) - PROMPT - count))
        passage = self.text[begin : begin + PROMPT + count]
        said = (
            passage[PROMPT:] if name == "copied" else self._generator.integers(self._vocabulary, size=count)
        )
        if name == "copied":
            said = self._changed(said, float(chance))
        self._said.copy_(torch.from_numpy(said))
        self._drafted.copy_(torch.from_numpy(self._changed(said, float(chance or 0))))
        return [int(token) for token in passage[:PROMPT]]

    def _changed(self, tokens: NDArray[np.int64], chance: float) -> NDArray[np.int64]:
        """With each token another one unless a chance falls."""
        others = (tokens + self._generator.integers(1, self._vocabulary, size=len(tokens))) % self._vocabulary
        return np.where(self._generator.random(len(tokens)) < chance, tokens, others)

    def answer(self, count: int) -> tuple[int, ...]:
        """Its first tokens."""
        return tuple(self._said[:count].tolist())

    def behind(self, run: StepModel) -> StepModel:
        """Steps of a model that say what is told."""

        def told(tokens: Tensor, positions: Tensor, batch: StepBatch) -> Tensor:
            logits_BV = run(tokens, positions, batch)
            searches = batch.plan.method.index is not None
            places = (positions + (1 - self._begin)).clamp(0, len(self._said) - 1)
            return logits_BV.scatter(1, (self._drafted if searches else self._said)[places], LARGEST)

        return told

    def first(self, logits_1V: Tensor) -> Tensor:
        """Logits that say the answer's first token."""
        return logits_1V.scatter(1, self._said[None, :1], LARGEST)


class ToldRunner(ModelRunner):
    """A model in memory that says what is told."""

    def __init__(self, model: Any, identity: ModelIdentity, run: StepModel, told: Told) -> None:
        weights = next(model.parameters())
        self.model, self.identity, self.device = model, identity, weights.device
        self.kv_dtype, self.forms, self.prompts = str(weights.dtype).removeprefix("torch."), (), Prompts.EXACT
        self._compute_dtype, self._suffixes = weights.dtype, WeakKeyDictionary()
        self._told, self.ranks, self._row_layers = told, Alone(), None
        self._stepper = self.stepper = Stepper(told.behind(run), identity, weights.dtype, weights.device)

    def suffixes(self, context: ResidentContext) -> ContextSuffixes:
        """Of the text that is copied from."""
        return self._told.suffixes

    def read(self, *args: Any, **options: Any) -> list[Tensor]:
        """See `ModelRunner.read`."""
        return [self._told.first(logits) for logits in super().read(*args, **options)]

    def capture(self, fitted: FittedMethod, sessions: int) -> None:
        """Steps that come, plain ones and the largest with drafts, before anything is timed."""
        rows = batch_size(sessions)
        drafting = min(MAX_ROWS, rows * (MOST + 1))
        for size in {rows, drafting}:
            self.stepper.prepare_beside(fitted, size, Placement.DEVICE, size)
        if fitted.drafting is not None:
            self.stepper.prepare_beside(fitted.drafting, rows, Placement.DEVICE, rows)


def measure(
    runner: ToldRunner, told: Told, contexts: Sequence[ResidentContext], kinds: Sequence[str], order: Order,
    turns: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each kind. Raises CheckFailedError where an answer is not what was told."""
    engine: Engine[Session] = Engine(runner, max_sessions=max(16, len(contexts)))

    def answers(method: str, kind: str) -> list[Answer]:
        drafts = kind.startswith("method")
        on = [(each, METHODS[method].on(each.manifest)) for each in contexts]
        on = [(each, fitted if drafts else replace(fitted, drafting=None)) for each, fitted in on]
        prompt = told.tell(kind)
        said = ask(engine, runner, on, [prompt] * len(contexts), order)
        if any(each.tokens != told.answer(len(each.tokens)) for each in said):
            raise CheckFailedError(f"{method} did not say what was told")
        return said

    runner.capture(METHODS["exact"].on(contexts[0].manifest), len(contexts))

    def several(method: str, kind: str) -> list[Answer]:
        answers(method, kind)  # compiles, and learns what drafts cost
        return [each for _ in range(turns) for each in answers(method, kind)]

    full = several("full", "bad")
    found = {kind: several("exact", kind) for kind in kinds}
    full_ms = statistics.median(each.token_ms for each in [*full, *several("full", "bad")])
    rows = []
    for kind, every in found.items():
        token_ms = statistics.median(each.token_ms for each in every)
        drafted = sum(each.drafted for each in every)
        row = {"kind": kind, "full_ms": round(full_ms, 3), "exact_ms": round(token_ms, 3)}
        row |= {"times": round(full_ms / token_ms, 3), "drafted": drafted // len(every)}
        rows.append(row | {"accepted": round(sum(each.accepted for each in every) / max(1, drafted), 3)})
    return rows


def main(
    shapes: Annotated[
        str, typer.Option(help="LENGTHxBATCH or LENGTHxBATCH@CONTEXTS, comma-separated.")
    ] = "131072x1,131072x4,32768x16",
    kinds: Annotated[str, typer.Option(help="Of answers, comma-separated.")] = (
        "copied:.95,copied:.8,method:.99,method:.9,method:0,bad"
    ),
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 96,
    turns: Annotated[int, typer.Option(help="Answers of each kind by each method.")] = 2,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a bar is missed.")] = False,
) -> None:
    """Times both methods."""
    with reporting("exact_gpu", bars) as report:
        model, identity = make_model(layers)
        run = step_model(model)
        methods = [METHODS["exact"]]
        for length, batch, count in parse_shared_shapes(shapes):
            told = Told(length, tokens, identity.vocab_size, model.device)
            placed = PlacedContexts(identity, methods, length, count, model.device)
            made = placed.make(Placement.DEVICE)
            placed.release()
            runner = ToldRunner(model, identity, run, told)
            contexts = [made[session % count] for session in range(batch)]
            for row in measure(runner, told, contexts, kinds.split(","), Order(max_tokens=tokens), turns):
                bar = BARS.get((row["kind"], batch), 0.0)
                missed = (
                    [f"{row['kind']}, {batch} sessions: {row['times']:.2f}x"] if row["times"] < bar else []
                )
                shape = {"tokens": length, "sessions": batch, "contexts": count}
                report.add(shape | row, *missed)
            release(made)
            del runner, told, contexts, made, placed
            tidy_up()


if __name__ == "__main__":
    typer.run(main)
