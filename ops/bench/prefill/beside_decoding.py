"""What a server's own worker (`decode-engine serve --prefill`) costs the streams beside it.

usage: python ops/bench/prefill/beside_decoding.py [--rounds 3] [--seconds 20] [--tokens 8192]

Makes a context of 8,192 tokens, starts a server with the reader and a worker of its own, keeps one stream going, and
compares rounds without and with a context being made, by turns: the gap between two tokens of the stream (median, 99th
percentile, longest) and how many tokens the worker reads in a second. Run it from the root of the repository, on a
machine that has nothing else to do.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.report import reporting
from harness.served import Shelf, serving

from decode_engine.rpc.client import Client

PROMPT = "The keeper went down to the harbour, and there"
SENTENCE = "In the year {} keeper {} counted {} ships and wrote their names into the book. "


def main(rounds: int = 3, seconds: float = 20.0, tokens: int = 8192) -> None:
    with tempfile.TemporaryDirectory() as folder, reporting("beside_decoding", gpu=False) as report:
        shelf = Shelf(Path(folder) / "store")
        shelf.add("first", document(0, tokens))
        with (
            serving(shelf.store, "--prefill", "--method", "context") as served,
            Client(served.address) as client,
        ):
            name = client.find_context("first").name
            take_gaps(client, name, 2.0)  # warms up
            for number in range(rounds):
                for busy in (False, True):
                    made = None
                    if busy:
                        text = document(number + 1, 30_000)
                        made = client.create_context(text, wait=False)
                        while client.get_operation(made.name).phase != "reading":
                            time.sleep(0.1)
                    before = 0 if made is None else client.get_operation(made.name).tokens_done
                    gaps = take_gaps(client, name, seconds)
                    row: dict[str, object] = {"round": number, "worker": "busy" if busy else "idle"}
                    if made is not None:
                        now = client.get_operation(made.name)
                        row["phase"] = now.phase
                        row["read_per_s"] = (now.tokens_done - before) / seconds
                        client.cancel_operation(made.name)
                        client.wait_operation(made.name)
                    report.add({**row, **figures(gaps)})


def figures(gaps: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(gap * 1000 for gap in gaps)
    return {
        "tokens": len(gaps),
        "gap_ms": statistics.median(ordered),
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))],
        "longest_ms": ordered[-1],
    }


def take_gaps(client: Client, name: str, seconds: float) -> list[float]:
    """Seconds between the tokens of one stream after the other."""
    gaps: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with client.generate(name, text=PROMPT, max_tokens=500, temperature=1.0, seed=1) as generation:
            last: float | None = None
            for _ in generation:
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
                if now >= end:
                    break
    return gaps


def document(number: int, tokens: int) -> str:
    """A text of about so many of the reader's tokens."""
    return "".join(SENTENCE.format(year, number, year % 97) for year in range(1000, 1000 + tokens // 22))


if __name__ == "__main__":
    typer.run(main)
