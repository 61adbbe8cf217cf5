"""Streams over HTTP and gRPC at once, a fifth of them cancelled: what they wait for, and what is left behind.

usage: python ops/bench/served/mixed_load.py [--seconds 120] [--streams 200] [--bars]

Starts `decode-engine serve --http-port` with the reader on a context of 2,048 tokens that it makes, keeps that many
streams open for that long, half of them over each port, and ends every fifth after its first piece. Prints the time to
the first piece and between two pieces (median and 99th percentile, by port), refusals, and how many finished answers
are not the one that their question gets alone (a few may be: batches round otherwise, see docs/architecture.md); at
the end the server's requests, threads and memory against those before.
Bars: one answer in 50 differs, no request is left, memory grows by a quarter, at most.

Run it from the root of the repository, on a machine that has nothing else to do.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import httpx
import typer
from harness.report import Report, reporting
from harness.served import Served, Shelf, serving
from harness.steps.general_steps import percentile

from decode_engine.evaluation.tasks.documents import make_document, source_text
from decode_engine.rpc.client import AsyncClient

GROWTH = 1.25
PATIENCE_S = 600.0
CONTEXT = "notes"


@dataclass
class Figures:
    """What streams of one port saw, in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    differing: int = 0

    def row(self) -> dict[str, float]:
        return {
            "finished": self.finished,
            "cancelled": self.cancelled,
            "refused": self.refused,
            "differing": self.differing,
            **{f"first_{name}_ms": value for name, value in _percentiles(self.first).items()},
            **{f"gap_{name}_ms": value for name, value in _percentiles(self.gaps).items()},
        }


def main(
    seconds: Annotated[float, typer.Option(help="How long streams are begun.")] = 120.0,
    streams: Annotated[int, typer.Option(help="Open at once, half of them over each port.")] = 200,
    bars: Annotated[bool, typer.Option("--bars", help="Fail where a bar is missed.")] = False,
) -> None:
    """Mixed streams over both ports."""
    with reporting("mixed_load", bars, gpu=False) as report, tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(Path(folder) / "store")
        notes = make_document(shelf.tokenizer, source_text(()), 2048, facts=8, seed=4)
        shelf.add(CONTEXT, notes.text)
        questions = [question.question for question in notes.questions]
        most = str(2 * streams)
        waiting = ["--max-sessions", "32", "--max-waiting", most, "--max-client-requests", most]
        with serving(shelf.store, "--method", "context", "--http-port", "0", *waiting) as served:
            asyncio.run(_load(report, served, questions, seconds, streams))


async def _load(report: Report, served: Served, questions: list[str], seconds: float, streams: int) -> None:
    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with (
        AsyncClient(served.address) as client,
        httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S, limits=limits) as web,
    ):
        context = (await client.find_context(CONTEXT)).name
        expected = {
            question: "".join([text async for text in _grpc(client, context, question)])
            for question in questions
        }
        before = (_memory(served.pid), _threads(served.pid))
        ports = {"grpc": Figures(), "http": Figures()}
        end, numbers = time.monotonic() + seconds, count()

        async def keep_one(port: str) -> None:
            while time.monotonic() < end:
                number = next(numbers)
                question = questions[number % len(questions)]
                pieces = _grpc(client, context, question) if port == "grpc" else _http(web, question)
                await _follow(ports[port], pieces, expected[question], number % 5 == 0)

        await asyncio.gather(*(keep_one("grpc" if number % 2 else "http") for number in range(streams)))
        for _ in range(100):
            after = await client.server_status()
            if after.requests == 0:
                break
            await asyncio.sleep(0.1)
    for port, figures in ports.items():
        many = figures.differing > max(1, figures.finished // 50)
        row = {"port": port, "streams": streams // 2, "seconds": seconds, **figures.row()}
        report.add(row, *(["many answers differ"] if many else []))
    memory = _memory(served.pid)
    left = {
        "requests_left": after.requests,
        "memory_mib": memory / 2**20,
        "memory_mib_before": before[0] / 2**20,
        "threads": _threads(served.pid),
        "threads_before": before[1],
    }
    missed = [
        *(["requests are left"] if after.requests else []),
        *(["memory has grown"] if memory > GROWTH * before[0] else []),
    ]
    report.add(left, *missed)


async def _follow(figures: Figures, pieces: AsyncGenerator[str, None], expected: str, cancel: bool) -> None:
    """Reads one stream, or its first piece."""
    begun = last = time.monotonic()
    texts: list[str] = []
    try:
        async with aclosing(pieces) as stream:
            async for text in stream:
                now = time.monotonic()
                (figures.gaps if texts else figures.first).append(now - last)
                last = now
                texts.append(text)
                if cancel:
                    figures.cancelled += 1
                    return
    except Exception:
        figures.refused += 1
        await asyncio.sleep(min(1.0, time.monotonic() - begun + 0.1))
        return
    figures.finished += 1
    figures.differing += "".join(texts) != expected


async def _grpc(client: AsyncClient, context: str, question: str) -> AsyncGenerator[str, None]:
    async with client.generate(context, question=question, stop=["\n"], max_tokens=64) as generation:
        async for piece in generation:
            if piece.text:
                yield piece.text


async def _http(web: httpx.AsyncClient, question: str) -> AsyncGenerator[str, None]:
    asked = {"messages": [{"role": "user", "content": question}], "context": CONTEXT, "model": "reader"}
    body = {**asked, "temperature": 0, "stop": "\n", "max_tokens": 64, "stream": True}
    async with web.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if text := chunk["choices"][0]["delta"].get("content"):
                    yield text


def _percentiles(seconds: list[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99}
    return {name: 1000 * percentile(seconds, share) for name, share in shares.items() if seconds}


def _memory(pid: int) -> int:
    """Bytes of a process in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


if __name__ == "__main__":
    typer.run(main)
