"""Served over gRPC: many clients on one context, throughput and times between tokens, beside as many on separate ones.

usage: python ops/bench/served/many_clients.py [--clients 64] [--tokens 8192] [--answer-tokens 128]
       [--methods full,refined]

Makes one context of `tokens` tokens for all clients and one for each (slices of the packaged novels, read by the
packaged reader), starts `decode-engine serve` over them with as many sessions as clients, and has all clients ask at
once, each for a stream of `answer-tokens` tokens, from a few processes of their own. A round that is not counted comes
before: it loads contexts, compiles and captures. One line for each method and case (`one context`, `own contexts`),
over all counted rounds:

- `tokens_per_s`: over the time in which all are running, from the last stream's first token to the first stream's end;
  the median of the rounds;
- `gap_p50_ms`, `gap_p99_ms`, `gap_longest_ms`: between two messages of a stream. A message has one token, or more where
  the client or the server did not keep up (`tokens_per_message`);
- `first_p50_ms`, `first_p99_ms`: from a question to its first token;
- `ended_early`: streams that the model ended before they had all their tokens.

The line `absurd` is of 16 streams of the last method, with seeds, on one context, without and with a request in their
middle that asks for a window of 10^24 recent tokens. It has to be refused, and the answers have to be the same (or
nothing is reported); `gap_longest_ms` stands beside that without it, `running` says how many streams it met,
`refused_ms` how long it took.

Run it from the root of the repository, on a machine that has nothing else to do.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.doors import Ask, Asked, Heard
from harness.report import CheckFailedError, Report, reporting
from harness.served import Shelf, serving
from harness.steps.general_steps import percentile

from decode_engine.evaluation.tasks.documents import parse_length
from decode_engine.rpc.client import Client
from decode_engine.rpc.client.verbs import GenerateOptions
from index_store.errors import InvalidArgumentError
from index_store.memory.devices import pick_device
from index_store.methods.presets import get_method

SHARED = "one context"
ABSURD_STREAMS = 16
ABSURD = "@recent=1" + 24 * "0"
SPARE = 1.25
"""Of the contexts' bytes, for what stands beside them in memory."""


@dataclass(frozen=True)
class Crowd:
    """Clients of a server, in the processes of a pool."""

    pool: Executor
    processes: int
    address: str

    def ask(self, asks: Sequence[Ask]) -> Asked:
        """Has all of them asked at once."""
        return Asked.at_once(self.pool, self.processes, asks)


def main(
    clients: Annotated[int, typer.Option(help="That ask at once.")] = 64,
    tokens: Annotated[str, typer.Option(help="Of a context, such as 8192 or 32k.")] = "8192",
    answer_tokens: Annotated[int, typer.Option(help="Of a stream.")] = 128,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "full,refined",
    keep: Annotated[float, typer.Option(help="Of the keys, by methods that select.")] = 0.01,
    rounds: Annotated[int, typer.Option(help="That are counted.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    model: Annotated[str, typer.Option(help="Packaged model or a Hugging Face folder.")] = "reader",
    processes: Annotated[int, typer.Option(help="Of the clients.")] = 4,
    folder: Annotated[Path | None, typer.Option(help="Where the store is written.")] = None,
) -> None:
    """Many clients at once; one JSON line per case and method."""
    names = methods.split(",")
    with (
        ExitStack() as stack,
        reporting("many_clients", gpu=False) as report,
        tempfile.TemporaryDirectory(dir=folder) as made,
    ):
        kind = pick_device(device).type
        length = parse_length(tokens)
        store = Path(made) / "store"
        nbytes = make_contexts(Shelf(store, names, model=model, device=kind), length, clients)
        most = str(max(clients, ABSURD_STREAMS + 1))
        limits = ["--max-sessions", most, "--max-waiting", most, "--max-client-requests", most]
        limits += ["--memory", str(round(SPARE * nbytes))]
        served = stack.enter_context(serving(store, "--no-warm-up", *limits, model=model, device=kind))
        pool = stack.enter_context(ProcessPoolExecutor(processes, get_context("spawn")))
        base = {"device": kind, "clients": clients, "tokens": length, "answer_tokens": answer_tokens}
        crowd = Crowd(pool, processes, served.address)
        with Client(served.address) as client:
            contexts = {context.display_name: context.name for context in client.list_contexts()}
        cases = {
            SHARED: [contexts[SHARED]] * clients,
            "own contexts": [contexts[str(number)] for number in range(clients)],
        }
        for method in names:
            for case, own in cases.items():
                asked = questions(served.address, own, method, keep, answer_tokens)
                hear(crowd.ask(asked))
                heard = [hear(crowd.ask(asked)) for _ in range(rounds)]
                report.add(base | {"case": case, "method": method, **figures(heard, answer_tokens)})
        ask_absurdly(report, crowd, contexts[SHARED], names[-1], base | {"clients": ABSURD_STREAMS})


def make_contexts(shelf: Shelf, tokens: int, clients: int) -> int:
    """One context for all and one for each, which is named by its number; returns their bytes."""
    made = [shelf.add_slice(SHARED, tokens, clients, clients + 1)]
    made += [shelf.add_slice(str(number), tokens, number, clients + 1) for number in range(clients)]
    return sum(entry.nbytes for manifest in made for entry in manifest.arrays)


def hear(asked: Asked) -> list[Heard]:
    """All streams. Raises CheckFailedError for one that failed."""
    streams = asked.heard()
    for stream in streams:
        if stream.error:
            raise CheckFailedError(stream.error)
    return streams


def questions(
    address: str, contexts: Sequence[str], method: str, keep: float, answer_tokens: int, seeds: bool = False
) -> list[Ask]:
    """A question to each context, none like another. seeds: whether tokens are drawn, each by a seed."""
    asked = []
    for number, context in enumerate(contexts):
        options: GenerateOptions = {
            "text": f"In year {number} the keeper went down to the harbour, and there",
            "max_tokens": answer_tokens,
            "method": method,
        }
        if get_method(method).sparse:
            options["keep_ratio"] = keep
        if seeds:
            options |= {"temperature": 1.0, "seed": number}
        asked.append(Ask("grpc", address, context, options))
    return asked


def figures(rounds: Sequence[Sequence[Heard]], answer_tokens: int) -> dict[str, Any]:
    """What streams of some rounds say."""
    streams = [heard for heard in (stream for each in rounds for stream in each) if heard.arrivals]
    rates = [rate for rate in map(tokens_per_s, rounds) if rate is not None]
    return {
        "rounds": len(rounds),
        "tokens_per_s": statistics.median(rates) if rates else None,
        **times("gap", [gap for stream in streams for gap in stream.gaps_s]),
        **times("first", [stream.first_s for stream in streams]),
        "tokens_per_message": sum(len(each.token_ids) for each in streams)
        / sum(len(each.counts) for each in streams),
        "ended_early": sum(len(stream.token_ids) < answer_tokens for each in rounds for stream in each),
    }


def tokens_per_s(streams: Sequence[Heard]) -> float | None:
    """Tokens a second while all are running; None where they never are."""
    if not all(stream.arrivals for stream in streams):
        return None
    begin = max(stream.arrivals[0] for stream in streams)
    end = min(stream.arrivals[-1] for stream in streams)
    if end <= begin:
        return None
    came = sum(
        count
        for stream in streams
        for arrival, count in zip(stream.arrivals, stream.counts, strict=True)
        if begin < arrival <= end
    )
    return came / (end - begin)


def times(of: str, seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles and the longest, in milliseconds."""
    shares = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
    return {f"{of}_{name}_ms": 1e3 * percentile(seconds, share) for name, share in shares.items() if seconds}


def ask_absurdly(report: Report, crowd: Crowd, context: str, method: str, base: dict[str, Any]) -> None:
    """The line `absurd`. Raises CheckFailedError where the request is not refused, or changes an answer."""
    asked = questions(
        crowd.address, [context] * ABSURD_STREAMS, method, 0.01, base["answer_tokens"], seeds=True
    )
    hear(crowd.ask(asked))
    quiet = hear(crowd.ask(asked))
    first = statistics.median(stream.first_s for stream in quiet)
    whole = min(stream.arrivals[-1] - stream.asked for stream in quiet)
    asking = crowd.ask(asked)
    time.sleep(max(0.0, asking.begin + (first + whole) / 2 - time.monotonic()))
    sent, refused = refuse(crowd.address, context, method + ABSURD)
    beside = hear(asking)
    if [stream.token_ids for stream in beside] != [stream.token_ids for stream in quiet]:
        raise CheckFailedError("an absurd request has changed the answers of others")
    row = base | {"case": "absurd", "method": method, **figures([beside], base["answer_tokens"])}
    running = sum(stream.arrivals[0] < sent and refused < stream.arrivals[-1] for stream in beside)
    longest = max(gap for stream in quiet for gap in stream.gaps_s)
    met = {"running": running, "refused_ms": 1e3 * (refused - sent), "gap_longest_ms_without": 1e3 * longest}
    report.add(row | met)


def refuse(address: str, context: str, method: str) -> tuple[float, float]:
    """When a request with that method was sent and when it was refused. Raises CheckFailedError where it was not."""
    with Client(address) as client:
        client.is_serving()  # connects
        sent = time.monotonic()
        try:
            client.generate(context, text="Who?", max_tokens=4, method=method).read()
        except InvalidArgumentError as error:
            if "@recent" in error.message:
                return sent, time.monotonic()
            raise
    raise CheckFailedError(f"{method} was not refused")


if __name__ == "__main__":
    typer.run(main)
