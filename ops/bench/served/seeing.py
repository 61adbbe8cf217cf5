"""What seeing costs: tokens a second with metrics, spans, JSON logs and audits on against off, in turns.

usage: python ops/bench/served/seeing.py [--streams 64] [--tokens 2048] [--answer-tokens 32] [--starts 12] [--turns 5]
       [--method refined] [--without audited]

Makes one context and starts servers over it that differ in what is seen of them: `plain`, nothing; `alike`, nothing
either, by which two servers that are alike differ; `seen`, with `--metrics`, spans to a collector that reads them and
drops them, and a JSON line for every request; `audited`, with `--audit-share .01` alone. In each turn every server is
asked by as many streams over HTTP, one server after the other, in an order that turns. A turn that is not counted comes
before. Two servers that are alike differ by some per cent for as long as they live, so all are started again and again.

One line for each of the others: `ratio` is the mean over all starts of its tokens a second by those of `plain` in the
same turns, `se` the standard error of that mean; `tokens_per_s` are medians. Servers, collector and clients share
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
from itertools import chain
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

from decode_engine.evaluation.tasks.documents import parse_length

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
    starts: Annotated[int, typer.Option(help="Of all servers.")] = 12,
    turns: Annotated[int, typer.Option(help="That are counted of a start.")] = 5,
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
        told = {TRACED: {"OTEL_EXPORTER_OTLP_ENDPOINT": stack.enter_context(collector())}}
        pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))

        def rate(url: str) -> float:
            options = {
                "prompt": "In that year the keeper",
                "model": Path(model).name,
                "max_tokens": answer_tokens,
            }
            options |= {"temperature": 0, "method": method, "min_tokens": answer_tokens}
            ask = Ask("http", url.removeprefix("http://"), context, options)
            asked = Asked.at_once(pool, 1, [ask] * streams)
            return tokens_per_s(asked.begin, asked.heard())

        cases = [*wanted]
        rates: dict[str, list[list[float]]] = {case: [] for case in cases}
        for start in range(starts):
            with ExitStack() as servers:
                order = cases[start % len(cases) :] + cases[: start % len(cases)]
                urls = {}
                for case in order:
                    served = serving(
                        store, *limits, "--http-port", "0", *wanted[case], model=model, device=device
                    )
                    with patch.dict(os.environ, told.get(case, {})):
                        urls[case] = servers.enter_context(served).url
                for case in cases:
                    rate(urls[case])
                    rates[case].append([])
                for turn in range(turns):
                    for case in order[turn % len(order) :] + order[: turn % len(order)]:
                        rates[case][-1].append(rate(urls[case]))
            found = ", ".join(f"{case} {statistics.mean(rates[case][-1]):.0f}" for case in cases)
            typer.echo(f"start {start + 1} of {starts}: {found}", err=True)
        base = {"device": device, "streams": streams, "tokens": tokens, "answer_tokens": answer_tokens}
        for case in cases[1:]:
            mean, error = ratio(rates[case], rates["plain"])
            medians = {name: statistics.median(chain.from_iterable(rates[name])) for name in ("plain", case)}
            report.add(
                base
                | {
                    "method": method,
                    "case": case,
                    "starts": starts,
                    "turns": turns,
                    "ratio": mean,
                    "se": error,
                }
                | {"tokens_per_s": medians}
            )


def tokens_per_s(begin: float, heard: Sequence[Heard]) -> float:
    """Of all streams, from the moment when they asked until the last one's end. Raises CheckFailedError."""
    for stream in heard:
        if stream.error:
            raise CheckFailedError(stream.error)
    return sum(stream.tokens for stream in heard) / (max(stream.arrivals[-1] for stream in heard) - begin)


def ratio(with_it: Sequence[Sequence[float]], without: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean over starts of the ratio of their turns' sums, and its standard error."""
    ratios = [sum(one) / sum(other) for one, other in zip(with_it, without, strict=True)]
    return statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5


if __name__ == "__main__":
    typer.run(main)
