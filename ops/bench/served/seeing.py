"""What seeing costs: tokens a second with metrics, spans, JSON logs and audits on against off, in turns.

usage: python ops/bench/served/seeing.py [--streams 64] [--tokens 2048] [--answer-tokens 32] [--turns 40]
       [--method refined] [--without audited]

Makes one context and starts servers over it that differ in what is seen of them: `plain`, nothing; `alike`, nothing
either, by which two servers that are alike differ; `seen`, with `--metrics`, spans to a collector that reads them and
drops them, and a JSON line for every request; `audited`, with `--audit-share .01` alone. In each turn every server is
asked by as many streams over HTTP, one server after the other, in an order that turns. A turn that is not counted comes
before.

One line for each of the others: `ratio` is the mean over all turns of its tokens a second by those of `plain` in the
same turn, `se` the standard error of that mean; `tokens_per_s` are medians. Servers, collector and clients share
the machine: on one with few cores all of them are part of the cost. Run it from the root of the repository, on a
machine that has nothing else to do.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.doors import Ask, Asked, Heard, collector
from harness.report import CheckFailedError, reporting
from harness.served import Shelf, serving

from decode_engine.evaluation.tasks import parse_length

CASES: Mapping[str, Sequence[str]] = {
    "plain": (),
    "alike": (),
    "seen": ("--metrics", "127.0.0.1:0", "--log-level", "info"),
    "audited": ("--audit-share", "0.01"),
}
TRACED = "seen"


def main(
    streams: Annotated[int, typer.Option(help="That ask at once.")] = 64,
    tokens: Annotated[str, typer.Option(help="Of the context, such as 2048 or 32k.")] = "2048",
    answer_tokens: Annotated[int, typer.Option(help="Of a stream.")] = 32,
    turns: Annotated[int, typer.Option(help="That are counted.")] = 40,
    method: Annotated[str, typer.Option(help="Of all streams.")] = "refined",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    model: Annotated[str, typer.Option(help="Packaged model or a Hugging Face folder.")] = "reader",
    without: Annotated[list[str] | None, typer.Option(help="Cases that are left out.")] = None,
) -> None:
    """Costs of what is seen; one JSON line for each."""
    wanted = {case: options for case, options in CASES.items() if case not in (without or ())}
    with ExitStack() as stack, reporting("seeing", gpu=False) as report:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        shelf = Shelf(store, (method,), model=model, device=device)
        context = shelf.add_slice("all", parse_length(tokens), 0, 1).id
        most = str(streams)
        limits = ("--max-sessions", most, "--max-waiting", most, "--max-client-requests", most)
        urls = {}
        for case, options in wanted.items():
            told = {"OTEL_EXPORTER_OTLP_ENDPOINT": stack.enter_context(collector())} if case == TRACED else {}
            with patch.dict(os.environ, told):
                served = serving(store, *limits, "--http-port", "0", *options, model=model, device=device)
                urls[case] = stack.enter_context(served).url
        pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))

        def rate(case: str) -> float:
            options = {
                "prompt": "In that year the keeper",
                "model": Path(model).name,
                "max_tokens": answer_tokens,
            }
            options |= {"temperature": 0, "method": method, "min_tokens": answer_tokens}
            ask = Ask("http", urls[case].removeprefix("http://"), context, options)
            asked = Asked.at_once(pool, 1, [ask] * streams)
            return tokens_per_s(asked.begin, asked.heard())

        cases = [*wanted]
        rates: dict[str, list[float]] = {case: [] for case in cases}
        for turn in range(-1, turns):
            for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
                found = rate(case)
                if turn >= 0:
                    rates[case].append(found)
            told_rates = ", ".join(f"{case} {rates[case][-1]:.0f}" for case in cases if rates[case])
            typer.echo(f"turn {turn + 1} of {turns}: {told_rates}", err=True)
        base = {"device": device, "streams": streams, "tokens": tokens, "answer_tokens": answer_tokens}
        for case in cases[1:]:
            mean, error = ratio(rates[case], rates["plain"])
            medians = {name: statistics.median(rates[name]) for name in ("plain", case)}
            report.add(
                base
                | {"method": method, "case": case, "turns": turns, "ratio": mean, "se": error}
                | {"tokens_per_s": medians}
            )


def tokens_per_s(begin: float, heard: Sequence[Heard]) -> float:
    """Of all streams, from the moment when they asked until the last one's end. Raises CheckFailedError."""
    for stream in heard:
        if stream.error:
            raise CheckFailedError(stream.error)
    return sum(stream.tokens for stream in heard) / (max(stream.arrivals[-1] for stream in heard) - begin)


def ratio(with_it: Sequence[float], without: Sequence[float]) -> tuple[float, float]:
    """Mean of the ratios of pairs, and its standard error."""
    ratios = [one / other for one, other in zip(with_it, without, strict=True)]
    return statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5


if __name__ == "__main__":
    typer.run(main)
