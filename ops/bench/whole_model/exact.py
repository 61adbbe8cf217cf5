"""Method `exact` beside `full` on a CPU, in turns through the engine: what a token takes, and which drafts were right.

usage: python ops/bench/whole_model/exact.py --out DIR [--model reader] [--context-length 16k] [--sessions 1,4]

Packaged novels are the context. Three kinds of answers: `copied`, greedy behind a passage of the context; `ordinary`,
greedy behind the context's end; `bad`, drawn with temperature 1.5, of which next to nothing can be drafted. Both
methods must say the same tokens; bars hold for each kind.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.checks import CheckFailedError
from harness.parsing import parse_counts
from harness.report import reporting
from harness.steps.answers import Answer, ask

from decode_engine.engine.engine import Engine
from decode_engine.evaluation.prefill_command import PrefillCommand
from decode_engine.evaluation.tasks import parse_length, source_text
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.orders.fields import Sampling
from decode_engine.orders.order import Order
from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import METHODS
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store

BARS = {"copied": 2.5, "ordinary": 1.3, "bad": 0.97}
"""Of the time of a token by `full`, divided by that of `exact`."""

_PASSAGE = 48


def prefill(runner: ModelRunner, model: str, length: int, out: Path) -> tuple[str, Sequence[int]]:
    """Has the first tokens of the packaged text prefilled; returns the context's id and the tokens that follow."""
    ids = runner.tokenizer.encode(source_text(()))
    body = length - len(runner.tokenizer.prefix_ids)
    document = out / "context.txt"
    document.write_text(runner.tokenizer.decode(ids[:body]), encoding="utf-8")
    report = PrefillCommand(model, out / "store", ["refined"]).run(document, "exact")
    return str(report["id"]), ids[body:]


def ask_by(
    engine: Engine[Session],
    runner: ModelRunner,
    context: ResidentContext,
    method: str,
    prompts: Sequence[Sequence[int]],
    order: Order,
) -> list[Answer]:
    """Answers of a method to prompts on the context."""
    return ask(
        engine, runner, [(context, METHODS[method].on(context.manifest))] * len(prompts), prompts, order
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder for the store.")],
    model: Annotated[str, typer.Option(help="Packaged model, a fetched one, or a folder.")] = "reader",
    context_length: Annotated[str, typer.Option(help="Tokens of the context.")] = "16k",
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 128,
    turns: Annotated[int, typer.Option(help="Answers of each kind by each method.")] = 5,
    sessions: Annotated[str, typer.Option(help="That ask at once, comma-separated.")] = "1",
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a bar is missed.")] = False,
) -> None:
    """Times both methods in turns; one JSON line per kind of answer and number of sessions."""
    with reporting("exact", bars, gpu=False) as report:
        out.mkdir(parents=True, exist_ok=True)
        runner = ModelRunner(resolve_model(model))
        id_, after = prefill(runner, model, parse_length(context_length), out)
        store = Store(out / "store")
        with Arena(placed_bytes(store.manifest(id_))).acquire(store, id_) as context:
            ids = context.tokens().tolist()
            for count in parse_counts(sessions):
                engine: Engine[Session] = Engine(runner, max_sessions=max(16, count))
                for kind, bar in BARS.items():
                    order = Order(
                        max_tokens=tokens,
                        sampling=Sampling(temperature=1.5 if kind == "bad" else 0.0, seed=None),
                    )
                    row = compare(
                        partial(ask_by, engine, runner, context), kind, (ids, after), order, count, turns
                    )
                    missed = row["times"] < bar
                    report.add(row, *([f"{kind}, {count} sessions: {row['times']:.2f}x"] if missed else []))


def compare(
    asking: Any,
    kind: str,
    text: tuple[Sequence[int], Sequence[int]],
    order: Order,
    count: int,
    turns: int,
) -> dict[str, Any]:
    """A row. Raises CheckFailedError where the methods' greedy answers differ."""
    ids, after = text
    found: dict[str, list[Answer]] = {"full": [], "exact": []}
    alike = 0
    for turn in range(turns + 1):
        begins = [
            len(ids) * (1 + turn * count + number) // (2 + (turns + 1) * count) for number in range(count)
        ]
        prompts = [ids[begin : begin + _PASSAGE] for begin in begins]
        if kind != "copied":
            prompts = [after[: _PASSAGE + turn * count + number] for number in range(count)]
        names = ("full", "exact") if turn % 2 else ("exact", "full")
        said = {name: asking(name, prompts, order) for name in names}
        alike += sum(one.tokens == other.tokens for one, other in zip(*said.values(), strict=True))
        if turn:  # the first one compiles
            for name, answers in said.items():
                found[name] += answers
    if order.sampling.temperature == 0.0 and alike < (turns + 1) * count:
        raise CheckFailedError(f"{kind}: {alike} of {(turns + 1) * count} answers are alike")
    token_ms = {name: statistics.median(each.token_ms for each in answers) for name, answers in found.items()}
    ratios = [one.token_ms / other.token_ms for one, other in zip(found["full"], found["exact"], strict=True)]
    drafted = sum(each.drafted for each in found["exact"])
    return {
        "kind": kind,
        "sessions": count,
        "context": len(ids),
        **{f"{name}_ms": round(value, 2) for name, value in token_ms.items()},
        "times": round(statistics.median(ratios), 3),
        "drafted": drafted,
        "accepted": round(sum(each.accepted for each in found["exact"]) / max(1, drafted), 3),
    }


if __name__ == "__main__":
    typer.run(main)
