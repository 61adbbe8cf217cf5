"""Clients of both doors, many at once, in processes of their own: what each hears when; and a collector of spans.

HTTP is read from a socket without a client's library, so that what is timed is the server. Times are seconds of
`time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Literal

from decode_engine.rpc.client import AsyncClient, Credentials

Door = Literal["grpc", "http"]
Clients = Mapping[tuple[str, Credentials], AsyncClient]

_START_S = 0.3
"""From the decision that all ask until they do: processes have to hear of it before."""


@dataclass(frozen=True)
class Ask:
    """What one client asks. address: HOST:PORT of the door. context: its resource name. options: of
    AsyncClient.generate, or members of a body of /v1/completions, with `messages` of /v1/chat/completions. shows: what
    the client shows by gRPC, nothing by default."""

    door: Door
    address: str
    context: str
    options: Mapping[str, Any]
    shows: Credentials = Credentials()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class Heard:
    """One stream. asked: when. arrivals: of messages with a part of the answer. step_s: the mean time of its decode
    steps by the server. counts: tokens of each message. step_s, counts, token_ids: not by HTTP; text: by HTTP alone.
    error: why it failed.
    """

    asked: float
    arrivals: tuple[float, ...] = ()
    tokens: int = 0
    step_s: float | None = None
    error: str = ""
    counts: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""

    @property
    def first_s(self) -> float:
        """From the question to the first token."""
        return self.arrivals[0] - self.asked

    @property
    def gaps_s(self) -> list[float]:
        """Between one message and the next."""
        return [after - before for before, after in pairwise(self.arrivals)]


@dataclass
class Asked:
    """Questions that are all asked at one moment, `begin`."""

    begin: float
    parts: list[Future[list[Heard]]]

    @classmethod
    def at_once(cls, pool: Executor, processes: int, asks: Sequence[Ask], after_s: float = 0.0) -> Asked:
        """Shares the questions out among so many processes of the pool, which all ask at one time, so much later."""
        begin = time.monotonic() + _START_S + after_s
        shares = [asks[part::processes] for part in range(min(processes, len(asks)))]
        return cls(begin, [pool.submit(_ask_all, begin, share) for share in shares])

    def heard(self) -> list[Heard]:
        """Of all of them, in the order of the questions."""
        shares = [part.result() for part in self.parts]
        count = sum(map(len, shares))
        return [shares[number % len(shares)][number // len(shares)] for number in range(count)]


def ask_until(begin: float, end: float, asks: Sequence[Ask]) -> list[list[Heard]]:
    """Has each question asked again whenever it was answered, until the end: all that each stream heard."""
    return asyncio.run(_gather(begin, asks, end))


def _ask_all(begin: float, asks: Sequence[Ask]) -> list[Heard]:
    return [heard for (heard,) in asyncio.run(_gather(begin, asks))]


async def _gather(begin: float, asks: Sequence[Ask], end: float = 0.0) -> list[list[Heard]]:
    callers = {(ask.address, ask.shows) for ask in asks if ask.door == "grpc"}
    clients: Clients = {key: AsyncClient(key[0], credentials=key[1]) for key in callers}
    try:
        for client in clients.values():
            await client.is_serving()  # connects
        return list(await asyncio.gather(*(_again(begin, end, ask, clients) for ask in asks)))
    finally:
        for client in clients.values():
            await client.close()


async def _again(begin: float, end: float, ask: Ask, clients: Clients) -> list[Heard]:
    heard = [await _one(begin, ask, clients)]
    while time.monotonic() < end:
        heard.append(await _one(begin, ask, clients))
    return heard


async def _one(begin: float, ask: Ask, clients: Clients) -> Heard:
    await asyncio.sleep(max(0.0, begin - time.monotonic()))
    asked = time.monotonic()
    try:
        if ask.door == "grpc":
            return await _by_grpc(asked, ask, clients[ask.address, ask.shows])
        return await _by_http(asked, ask)
    except Exception as error:
        return Heard(asked, error=f"{type(error).__name__}: {error}"[:300])


async def _by_grpc(asked: float, ask: Ask, client: AsyncClient) -> Heard:
    arrivals, counts, token_ids = list[float](), list[int](), list[int]()
    async with client.generate(ask.context, **ask.options) as generation:
        async for piece in generation:
            if piece.token_ids:
                arrivals.append(time.monotonic())
                counts.append(len(piece.token_ids))
                token_ids += piece.token_ids
        times = generation.summaries[0].timings
    step_s = times.decode_ns / times.decode_steps / 1e9 if times.decode_steps else None
    return Heard(asked, tuple(arrivals), len(token_ids), step_s, "", tuple(counts), tuple(token_ids))


async def _by_http(asked: float, ask: Ask) -> Heard:
    """One request on a connection of its own, whose events are read as they come.

    It asks for log probabilities: a token without text has no event otherwise, and a random model says many of those.
    """
    host, _, port = ask.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    chat = "messages" in ask.options
    body = {"logprobs": chat or 0, **ask.options, "context": ask.context.removeprefix("contexts/")}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: {ask.address}\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + data)
    events, usage, status = list[tuple[float, bytes]](), b"", await reader.readline()
    try:
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read())[-300:].decode("utf-8", "replace"))
        async for line in reader:
            if line.startswith(b"data: {"):
                if b'"usage": null' in line or b'"usage":null' in line:
                    events.append((time.monotonic(), line))
                else:
                    usage = line
    finally:
        writer.close()
    if not usage:
        raise RuntimeError("the stream ended without its usage")
    told = [json.loads(line.removeprefix(b"data: "))["choices"][0] for _, line in events]
    arrivals = [at for (at, _), choice in zip(events, told, strict=True) if choice.get("logprobs")]
    text = "".join((choice["delta"].get("content") if chat else choice["text"]) or "" for choice in told)
    tokens = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return Heard(asked, tuple(arrivals), tokens, text=text)


@contextmanager
def collector() -> Iterator[str]:
    """Where spans may be sent, which are read and dropped by a process of its own."""
    context = get_context("spawn")
    there, mine = context.Pipe()
    process = context.Process(target=_collect, args=(mine,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{there.recv()}"
    finally:
        process.terminate()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


def _collect(pipe: Connection) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        pipe.send(server.server_address[1])
        server.serve_forever()
