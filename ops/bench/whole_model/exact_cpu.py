"""Method `exact` beside `full` on a CPU, in turns through the engine: what a token takes, and which drafts were right.

usage: python ops/bench/whole_model/exact_cpu.py --out DIR [--model smollm2] [--context-length 6k] [--sessions 1,4]
       python ops/bench/whole_model/exact_cpu.py --out DIR --kinds ordinary --turns 1000 --tokens 24

Packaged novels are the context. Kinds of answers:

- `copied`: greedy behind a passage of the context, as an answer that extracts would go on;
- `ordinary`: greedy behind passages of the novel that follow the context;
- `drawn`: the same, drawn at a temperature of .7;
- `bad`: drawn at 1.5, of which next to nothing can be drafted.

Methods take turns, the one that begins, too, and draw with the same seed: both must say the same tokens, or the
benchmark fails. `alike` counts the answers that were compared. `times` is the median over pairs of answers of `full`'s
time a token divided by that of `exact`, and `cpu_times` the same by the seconds of this process's cores, which others
disturb less. Bars hold for `times`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.parsing import parse_counts
from harness.report import CheckFailedError, reporting
from harness.steps.answers import Answer, ask

from decode_engine.engine.engine import Engine
from decode_engine.evaluation.prefill_command import PrefillCommand
from decode_engine.evaluation.tasks.documents import parse_length, source_text
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.orders.fields import Sampling
from decode_engine.orders.order import Order
from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.methods.presets import METHODS
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store

BARS = {"copied": 2.5, "ordinary": 1.3, "bad": 0.97}
"""Of the time of a token by `full`, divided by that of `exact`."""

TEMPERATURES = {"copied": 0.0, "ordinary": 0.0, "drawn": 0.7, "bad": 1.5}
PASSAGE = 48

Asking = Callable[[str, Sequence[Sequence[int]], Order], list[Answer]]
"""Answers of a method to prompts that are asked at once."""


def prefill(runner: ModelRunner, model: str, length: int, out: Path) -> tuple[str, Sequence[int]]:
    """Has the first tokens of the packaged text prefilled; returns the context's id and the tokens that follow."""
    ids = runner.tokenizer.encode(source_text(()))
    body = length - len(runner.tokenizer.prefix_ids)
    document = out / "context.txt"
    document.write_text(runner.tokenizer.decode(ids[:body]), encoding="utf-8")
    report = PrefillCommand(model, out / "store", ["refined"]).run(document, "exact")
    return str(report["id"]), ids[body:]


def passages(text: Sequence[int], count: int) -> list[Sequence[int]]:
    """So many passages, evenly over a text."""
    return [text[begin : begin + PASSAGE] for begin in range(0, len(text) - PASSAGE, len(text) // count)][
        :count
    ]


def compare(
    asking: Asking, kind: str, prompts: Sequence[Sequence[int]], at_once: int, tokens: int
) -> dict[str, Any]:
    """A row of prompts, so many of which are asked at once. Raises CheckFailedError where methods differ.

    The first ones are not timed: they compile, and learn what drafts cost.
    """
    pairs: list[tuple[Answer, Answer]] = []
    alike = 0
    for first in range(0, len(prompts), at_once):
        temperature = TEMPERATURES[kind]
        seed = first if temperature else None
        order = Order(max_tokens=tokens, sampling=Sampling(temperature=temperature, seed=seed))
        names = ("full", "exact") if first // at_once % 2 else ("exact", "full")
        said = {name: asking(name, prompts[first : first + at_once], order) for name in names}
        found = list(zip(said["full"], said["exact"], strict=True))
        alike += sum(one.tokens == other.tokens for one, other in found)
        pairs += found if first else []
    if alike < len(prompts):
        raise CheckFailedError(f"{kind}: {alike} of {len(prompts)} answers are alike")
    drafted = sum(other.drafted for _, other in pairs)
    return {
        "full_ms": round(statistics.median(one.token_ms for one, _ in pairs), 2),
        "exact_ms": round(statistics.median(other.token_ms for _, other in pairs), 2),
        "times": round(statistics.median(one.token_ms / other.token_ms for one, other in pairs), 3),
        "cpu_times": round(statistics.median(one.cpu_ms / other.cpu_ms for one, other in pairs), 3),
        "drafted": drafted // len(pairs),
        "accepted": round(sum(other.accepted for _, other in pairs) / max(1, drafted), 3),
        "alike": alike,
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder for the store.")],
    model: Annotated[str, typer.Option(help="Packaged model, a fetched one, or a folder.")] = "reader",
    context_length: Annotated[str, typer.Option(help="Tokens of the context.")] = "8k",
    kinds: Annotated[str, typer.Option(help="Of answers, comma-separated.")] = ",".join(TEMPERATURES),
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 96,
    turns: Annotated[int, typer.Option(help="Answers of each kind by each method.")] = 5,
    sessions: Annotated[str, typer.Option(help="That ask at once, comma-separated.")] = "1",
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a bar is missed.")] = False,
) -> None:
    """Times both methods in turns; one JSON line per kind of answer and number of sessions."""
    with reporting("exact_cpu", bars, gpu=False) as report:
        out.mkdir(parents=True, exist_ok=True)
        runner = ModelRunner(resolve_model(model))
        id_, after = prefill(runner, model, parse_length(context_length), out)
        store = Store(out / "store")
        with Arena(placed_bytes(store.manifest(id_))).acquire(store, id_) as context:
            ids = context.tokens().tolist()
            for count in parse_counts(sessions):
                engine: Engine[Session] = Engine(runner, max_sessions=max(16, count))

                def asking(
                    method: str,
                    prompts: Sequence[Sequence[int]],
                    order: Order,
                    engine: Engine[Session] = engine,
                ) -> list[Answer]:
                    on = (context, METHODS[method].on(context.manifest))
                    return ask(engine, runner, [on] * len(prompts), prompts, order)

                for kind in kinds.split(","):
                    text = ids if kind == "copied" else after[: 4 * len(ids)]
                    prompts = passages(text, count * (turns + 1))
                    row: dict[str, Any] = {
                        "model": model, "kind": kind, "sessions": count, "context": len(ids)
                    }  # fmt: skip
                    row |= compare(asking, kind, prompts, count, tokens)
                    missed = row["times"] < BARS.get(kind, 0.0)
                    report.add(row, *([f"{kind}, {count} sessions: {row['times']:.2f}x"] if missed else []))


if __name__ == "__main__":
    typer.run(main)
