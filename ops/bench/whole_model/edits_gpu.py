"""What penalties, biases, minimum lengths, grammars and log probabilities cost a step on a GPU: of all, and of one.

usage: python ops/bench/whole_model/edits_gpu.py [--bars] [--shape 131072x16@1] [--method full] [--turns 60]

Regime: transformers' Llama in the shape of Llama-3.1-8B with random weights, bfloat16; sessions in flight, as when they
are served (each step is launched before the tokens of the one before are read; where a grammar waits for these, its
layers are). `plain` is greedy without edits. Of each other kind once all sessions have it (`each`), once the first one
alone (`one`). Grammars are over a made-up vocabulary of as many words as the model has tokens.

Times are medians of steps, `ratio` of the kind's and of plain steps right before it, bar 1.1. Before that the same
sessions take their first steps again, one after the other, without edits and with the tokens that were said, and the
eager reference chooses from the logits on the device: `alike` is the share of sessions of which all tokens, and all log
probabilities to 1e-3, are the same. Those with a seed have it there too: their steps round otherwise than others, and
tokens drawn from flat random logits have intervals as short as that. Fewer than --alike are an error: logits that are
almost equal may change places.
`choose_ms` is the choice alone, replayed.

One JSON line per kind; the exit code is 1 when a check fails, or when --bars is given and a ratio misses its bar.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.made_up.contexts import PlacedContexts, make_model, release
from harness.made_up.random_constraints import make_grammar
from harness.parsing import parse_method, parse_shared_shapes
from harness.report import CheckFailedError, reporting
from harness.steps.captured_steps import SteppedSessions, tidy_up
from harness.steps.general_steps import first_tokens
from harness.timing import event_ms

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.sampling.grammar import Grammar
from decode_engine.engine.stepping import Flight, choose_together
from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.orders.events import TokenLogprob
from decode_engine.orders.order import Constraint
from decode_engine.steps.step_graph import StepGraph, step_model
from decode_engine.steps.stepper import FIXED_ROWS
from index_store.memory.placement import Placement
from index_store.methods.method import Method

BAR = 1.1
WARM_UP, CHECKED, REPLAYS = 8, 12, 25
SCHEMA = (
    '{"type": "array", "minItems": 300, "items": {"type": "object", "properties": {"name": {"type": "string"}, '
    '"count": {"type": "integer"}, "kind": {"enum": ["first", "second"]}}, "required": ["name", "count", "kind"], '
    '"additionalProperties": false}}'
)


def kinds(grammar: Grammar, vocabulary: int) -> Mapping[str, SamplingParameters]:
    """What is measured, by name."""
    bias = {token: (-1.0) ** token * 5 for token in range(7, vocabulary, -(-vocabulary // 300))}
    return {
        "penalties": SamplingParameters(presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.1),
        "bias": SamplingParameters(logit_bias=bias),
        "min_tokens": SamplingParameters(min_tokens=10_000),
        "logprobs": SamplingParameters(top_logprobs=5),
        "logprobs_20": SamplingParameters(top_logprobs=20),
        "schema": SamplingParameters(grammar=grammar),
        "drawn": SamplingParameters(0.8, seed=3, frequency_penalty=0.3, top_logprobs=5),
        "filtered": SamplingParameters(0.8, 0.9, 50, seed=3, frequency_penalty=0.3),
    }


@dataclass
class Flown:
    """Steps in flight: the tokens of each, log probabilities, and seconds."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[TokenLogprob | None]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def make_samplers(parameters: SamplingParameters | None, count: int, edited: int) -> list[Sampler]:
    """Samplers of which the first so many have these parameters."""
    plain = SamplingParameters()
    given = [parameters or plain] * edited + [plain] * (count - edited)
    return [Sampler(each, prompt=range(100, 300), end_ids=[0, 5]) for each in given]


def fly(stepped: SteppedSessions, method: Method, samplers: Sequence[Sampler], turns: int) -> Flown:
    """Steps of new sessions. Raises CheckFailedError where one fails, or steps do not fly."""
    stepped.start(method)
    flight: Flight[Session] = Flight(stepped.stepper)
    flown, tokens = Flown(), first_tokens(stepped.contexts)
    for turn in range(turns):
        begin = time.perf_counter()
        results = flight.step(stepped.sessions, tokens, samplers, follow=turn + 1 < turns)
        flown.seconds.append(time.perf_counter() - begin)
        tokens = [result for result in results if isinstance(result, int)]
        if len(tokens) < len(results) or (turn + 1 < turns and not flight.flies):
            raise CheckFailedError(f"steps in flight failed: {results}")
        flown.tokens.append(tokens)
        flown.logprobs.append([sampler.logprob for sampler in samplers])
    return flown


def graph_of(stepped: SteppedSessions, samplers: Sequence[Sampler]) -> StepGraph:
    """What steps of the sessions with these samplers run in."""
    return stepped.stepper.graph(stepped.sessions, repeatable=any(sampler.repeatable for sampler in samplers))


def without_edits(parameters: SamplingParameters) -> SamplingParameters:
    """For steps of the same bits: as repeatable as these, but nothing is done to logits."""
    drawn = parameters.temperature, parameters.top_p, parameters.top_k, parameters.seed
    return SamplingParameters(*drawn)


def share_alike(stepped: SteppedSessions, method: Method, samplers: Sequence[Sampler], flown: Flown) -> float:
    """The share of sessions of which the eager reference chooses and tells what was chosen and told in flight."""
    stepped.start(method)
    bare = [Sampler(without_edits(sampler.parameters)) for sampler in samplers]
    alike = [True] * len(samplers)
    fed = first_tokens(stepped.contexts)
    for tokens, logprobs in zip(flown.tokens[:CHECKED], flown.logprobs, strict=False):
        stepped.stepper.step(stepped.sessions, fed, bare)
        graph = graph_of(stepped, bare)
        rows = [graph.batch.sessions.index(session) for session in stepped.sessions]
        expected = choose_together(graph.logits_BV[rows], samplers)
        for number, sampler in enumerate(samplers):
            same = expected[number] == tokens[number] and tells_alike(sampler.logprob, logprobs[number])
            alike[number] = alike[number] and same
        fed = tokens
    return sum(alike) / len(alike)


def tells_alike(expected: TokenLogprob | None, found: TokenLogprob | None) -> bool:
    """Whether both say the same, but for rounding."""
    if expected is None or found is None:
        return expected is found
    ids = [[each for each, _ in told.alternatives] for told in (expected, found)]
    values = [[told.logprob, *(value for _, value in told.alternatives)] for told in (expected, found)]
    near = all(abs(one - other) < 1e-3 for one, other in zip(*values, strict=True))
    return ids[0] == ids[1] and near


def measure(
    stepped: SteppedSessions,
    method: Method,
    parameters: SamplingParameters,
    edited: int,
    turns: int,
    least_alike: float,
) -> dict[str, Any]:
    """The figures of a kind. Raises CheckFailedError where the reference says something else."""
    count = len(stepped.contexts)
    fly(stepped, method, make_samplers(parameters, count, edited), 2)  # captures
    plain = fly(stepped, method, make_samplers(None, count, 0), WARM_UP + turns)
    flown = fly(stepped, method, make_samplers(parameters, count, edited), WARM_UP + turns)
    graph = graph_of(stepped, make_samplers(parameters, count, edited))
    choose_ms = (
        statistics.median(event_ms(partial(graph.run_choice, graph.choice)) for _ in range(REPLAYS))
        if torch.cuda.is_available()
        else 0.0
    )
    captured = graph.captured
    alike = share_alike(stepped, method, make_samplers(parameters, count, edited), flown)
    if alike < least_alike:
        raise CheckFailedError(f"the reference says what {alike:.0%} of the sessions say")
    plain_ms, step_ms = (statistics.median(each.seconds[WARM_UP:]) * 1e3 for each in (plain, flown))
    return {
        "plain_ms": plain_ms,
        "step_ms": step_ms,
        "ratio": step_ms / plain_ms,
        "slowest_ms": max(flown.seconds[WARM_UP:]) * 1e3,
        "choose_ms": choose_ms,
        "captured": captured,
        "alike": alike,
    }


def main(
    shape: Annotated[str, typer.Option(help="LENGTHxBATCH@CONTEXTS.")] = "131072x16@1",
    method: Annotated[str, typer.Option(help="NAME:KEEP.")] = "full",
    turns: Annotated[int, typer.Option(help="Timed steps of each kind.")] = 60,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    alike: Annotated[float, typer.Option(help="Least share of sessions that say the same.")] = 0.75,
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a ratio misses its bar.")] = False,
) -> None:
    """Times steps with edits against plain ones, and checks what they say."""
    [(length, batch, count)] = parse_shared_shapes(shape)
    taken = parse_method(method)
    if batch > FIXED_ROWS:
        raise typer.BadParameter(
            f"{batch} sessions, expected at most {FIXED_ROWS}: the rows of steps with seeds"
        )
    with reporting("edits_gpu", bars) as report:
        model, identity = make_model(layers)
        placed = PlacedContexts(identity, [taken], length, count, model.device, [])
        made = placed.make(Placement.DEVICE)
        placed.release()
        threads = SearchThreads(1)
        contexts = [made[session % count] for session in range(batch)]
        stepped = SteppedSessions(step_model(model), model, contexts, threads)
        grammar = make_grammar(
            Constraint("json_schema", SCHEMA), identity.vocab_size, min(8, os.cpu_count() or 1)
        )
        for name, parameters in kinds(grammar, identity.vocab_size).items():
            for who, edited in (("each", batch), ("one", 1)):
                row = measure(stepped, taken, parameters, edited, turns, alike)
                missed = [f"{name} of {who}: {row['ratio']:.3f}x, bar {BAR}x"] if row["ratio"] > BAR else []
                report.add({"kind": name, "who": who, "tokens": length, "batch": batch} | row, *missed)
        threads.close()
        release(made)
        tidy_up()


if __name__ == "__main__":
    typer.run(main)
