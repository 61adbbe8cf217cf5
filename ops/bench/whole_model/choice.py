"""What requests get that name no method, against the faster of the two that it is chosen from, measured.

usage: python ops/bench/whole_model/choice.py [--lengths 4k,16k,32k] [--sessions 1,2,4,16] [--method refined] [--bars]
       python ops/bench/whole_model/choice.py --device cuda --lengths 8k,32k,128k --sessions 1,2,4,16,64

Regime: a server's own measurement first (`decode_engine.model.method_choice`), once, as when it starts: steps of full
attention and of the method at two lengths, with one session and with sixteen. Then steps of both on made-up contexts of
every length, which all sessions share, turn by turn. On a CPU the packaged reader; on a GPU transformers' Llama in the
shape of Llama-3.1-8B with random weights, in captured steps, contexts in the GPU's memory.

`full_ms` and `own_ms` are medians of a step; `chosen` is what a request would get, `ratio` its time over that of the
faster one (bar: 1.05; full attention with drafts counts as without), and `told_ms` what the choice took it for.

One JSON line per shape; the exit code is 1 when --bars is given and one misses its bar.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.made_up.contexts import DTYPE, make_model
from harness.parsing import parse_counts
from harness.report import CheckFailedError, reporting
from harness.steps.prompts_at_once import read_prompts
from torch import Tensor

from decode_engine.engine.requests import Found
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import Chosen
from decode_engine.evaluation.tasks.documents import parse_length
from decode_engine.layers.session import Session
from decode_engine.model.method_choice import StepCosts, label, measure_steps
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.settings.command_options import Prompts
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod, Method
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import resolve_model

BAR = 1.05
WARM_UP = 3


class RandomRunner:
    """What the measurement needs of a runner, of a model with random weights on a GPU."""

    def __init__(self, layers: int) -> None:
        self.model, self.identity = make_model(layers, "cuda")
        self.device, self.kv_dtype = torch.device("cuda", 0), DTYPE
        run = step_model(self.model)
        self._stepper = Stepper(run, self.identity, torch.bfloat16, self.device)

    def prepare(
        self, fitted: FittedMethod, sessions: int, placement: Placement, *, beside: bool = False
    ) -> None:
        self._stepper.prepare_beside(fitted, sessions, placement, sessions)

    def start(self, context: ResidentContext, fitted: FittedMethod) -> Session:
        return Session(context, fitted)

    def read(self, sessions: Sequence[Session], token_ids: Sequence[Sequence[int]]) -> list[Tensor]:
        return read_prompts(self.model, sessions, token_ids, Prompts.EXACT)

    def decode(
        self, sessions: Sequence[Session], last_tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> list[Found]:
        return self._stepper.step(sessions, last_tokens, samplers)

    def launch(
        self,
        sessions: Sequence[Session],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]] = (),
    ) -> Chosen:
        return Chosen(self._stepper.step(sessions, last_tokens, samplers, drafts))


def step_times(
    runner: Any, context: ResidentContext, methods: Sequence[Method], count: int, turns: int
) -> list[float]:
    """Median milliseconds of a step of so many sessions on the context by each of the methods, which take turns."""
    batches = []
    for method in methods:
        sessions = [runner.start(context, method.on(context.manifest)) for _ in range(count)]
        runner.read(sessions, [[0]] * count)
        batches.append((sessions, [Sampler(SamplingParameters()) for _ in sessions]))
    times: list[list[float]] = [[] for _ in methods]
    for _ in range(WARM_UP + turns):
        for found, (sessions, samplers) in zip(times, batches, strict=True):
            begin = time.perf_counter()
            for result in runner.decode(sessions, [0] * count, samplers):
                if isinstance(result, Exception):
                    raise CheckFailedError(str(result))
            found.append(time.perf_counter() - begin)
    for sessions, _ in batches:
        for session in sessions:
            session.close()
    return [statistics.median(found[WARM_UP:]) * 1e3 for found in times]


def figures(
    runner: Any, costs: StepCosts, own: Method, lengths: Sequence[int], counts: Sequence[int], turns: int
) -> Iterator[dict[str, Any]]:
    """A row for every length and number of sessions."""
    full = METHODS["full"]
    for length in lengths:
        context = made_up_context(runner.identity, runner.kv_dtype, own, length, device=runner.device)
        for count in counts:
            chosen, _ = costs.choose(
                own, context.manifest, Placement.DEVICE, count, ready=lambda method: False
            )
            full_ms, own_ms = step_times(runner, context, (full, own), count, turns)
            taken = own_ms if chosen.sparse else full_ms
            told = costs.times.get((label(chosen), Placement.DEVICE))
            yield {
                "tokens": length,
                "sessions": count,
                "method": label(own),
                "full_ms": full_ms,
                "own_ms": own_ms,
                "chosen": chosen.name,
                "ratio": taken / min(full_ms, own_ms),
                "told_ms": None if told is None else told.seconds(length, count) * 1e3,
            }
        context.release()


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    method: Annotated[str, typer.Option(help="A context's own method.")] = "refined",
    lengths: Annotated[str, typer.Option(help="Of contexts, comma-separated.")] = "4k,16k,32k",
    sessions: Annotated[str, typer.Option(help="Numbers of sessions, comma-separated.")] = "1,2,4,16",
    turns: Annotated[int, typer.Option(help="Timed steps of each method.")] = 15,
    layers: Annotated[int, typer.Option(help="Layers of the model, on a GPU.")] = 32,
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a choice misses its bar.")] = False,
) -> None:
    """Compares the measured choice of a method with what steps take."""
    with reporting("choice", bars, gpu=device != "cpu") as report:
        own = get_method(method)
        runner: Any = ModelRunner(resolve_model("reader"), "cpu") if device == "cpu" else RandomRunner(layers)
        costs = measure_steps(runner, [own], [Placement.DEVICE])
        if not costs.times:
            raise CheckFailedError(f"no steps of {label(own)} were timed")
        for row in figures(
            runner,
            costs,
            own,
            [parse_length(each) for each in lengths.split(",")],
            parse_counts(sessions),
            turns,
        ):
            missed = row["ratio"] > BAR
            what = f"{row['tokens']} tokens, {row['sessions']} sessions: {row['chosen']} takes {row['ratio']:.2f}x"
            report.add(row | {"device": device}, *([what] if missed else []))


if __name__ == "__main__":
    typer.run(main)
