"""Whoever asks, by whichever door: what answers have to know of it, and the threads that may work for it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar
from urllib.parse import unquote

from decode_engine.errors import CancelledError, DeadlineExceededError, ShuttingDownError
from decode_engine.rpc.door.access import Door
from decode_engine.rpc.door.audit import AuditLog
from decode_engine.rpc.door.rights import RIGHT_OF
from decode_engine.rpc.transport.status import Paths, public_error, reason_of
from decode_engine.rpc.transport.work import BlockingWork, forget_error
from index_store.cli.traces import TRACEPARENT, Span, Traces, Value, trace_id
from index_store.errors import SparseKVError
from index_store.store.description.callers import Caller

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)

_ANSWER_S = 60.0  # for work that is short unless a disk or a network hangs


class Asker:
    """Who asks for one thing. To be used on the loop's thread, except for `check`.

    id: of this request in logs. peer: where it comes from, with its port. host: its address without, by which requests
    are counted. authorization: what it shows. caller: who it is, once it has entered. call_name: as `rights` names what
    is asked for. started, deadline_s: on `time.monotonic`; None without a deadline. facts: what the log line says.
    traceparent: of the span that it belongs to, "" without one. span: its own, None where none are made. audit: where
    its end is told of.
    """

    def __init__(
        self, work: BlockingWork, peer: str, shown: Mapping[str, str], left_s: float | None = None
    ) -> None:
        """shown: its headers or metadata. left_s: until the deadline."""
        self.id = secrets.token_hex(8)
        self.started = time.monotonic()
        self.peer = peer
        self.host = host_of(peer)
        self.caller = Caller(rights=frozenset())
        self.call_name = ""
        self.authorization = shown.get("authorization")
        self.traceparent = shown.get(TRACEPARENT, "")
        self.span: Span | None = None
        self.deadline_s = None if left_s is None else self.started + left_s
        self.facts: dict[str, object] = {"peer": peer}
        self.audit: AuditLog | None = None
        self._work = work
        self._ended = False
        self._inside = ExitStack()

    def begin_span(self, traces: Traces, name: str, attributes: Mapping[str, Value]) -> None:
        """Makes a span of it, which the log line ends. attributes: what is known of it already."""
        told = {**attributes, "sparsekv.request_id": self.id}
        self.span = traces.begin(name, self.traceparent, int(self.started * 1e9), "server", told)
        self.traceparent = self.span.traceparent

    def check(self) -> None:
        """Raises DeadlineExceededError or CancelledError once nobody needs the answer any more. From any thread."""
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            raise DeadlineExceededError("the deadline passed before the server had an answer")
        if self._ended:
            raise CancelledError("the client ended the call")

    def end(self) -> None:
        """It is over, and nobody needs an answer any more."""
        self._ended = True
        self._inside.close()

    def enter(self, door: Door) -> None:
        """Raises UnauthenticatedError, TooManyAttemptsError for who is not let in, and ShuttingDownError while the
        door drains, but for what takes the right admin: it shows how far that is, and holds up nobody's end."""
        self.caller = door.check(self.authorization, self.host, self.certificate())
        if self.caller.name:
            self.note(caller=self.caller.name)
        if self.caller.tenant:
            self.note(tenant=self.caller.tenant)
        if RIGHT_OF.get(self.call_name) != "admin":
            if door.draining:
                raise ShuttingDownError("the server is draining and takes nothing new; ask another one")
            self._inside.enter_context(door.inside())

    def certificate(self) -> str:
        """The name in the certificate that it showed, "" without one."""
        return ""

    def note(self, **facts: object) -> None:
        self.facts.update(facts)

    def public(self, error: Exception, paths: Paths) -> SparseKVError:
        """An error as clients may see it; what is none of ours goes to the log."""
        public = public_error(error, self.id, paths)
        if public is not error and reason_of(public) == "INTERNAL":
            logger.error("request %s failed", self.id, exc_info=error, extra=self._names)
        return public

    @property
    def _names(self) -> dict[str, str]:
        told = {"request_id": self.id, "trace_id": trace_id(self.traceparent)}
        return {name: value for name, value in told.items() if value}

    def log(self, what: str, outcome: str, message: str, level: int, error: str = "", **more: object) -> None:
        """The line about what became of it. error: why it failed. more: for programs that read it."""
        spent = (time.monotonic() - self.started) * 1000
        logger.log(
            level,
            "%s %s in %.1f ms %s%s",
            what,
            outcome,
            spent,
            " ".join(f"{name}={_text(value)}" for name, value in self.facts.items()),
            f": {_text(message)}" if message else "",
            extra={"milliseconds": round(spent, 3), **self._names, **more, **self.facts},
        )
        if self.audit is not None:
            who = self.caller
            self.audit.tell(
                id_=self.id,
                host=self.host,
                tenant=who.tenant,
                caller=who.name,
                call=self.call_name,
                right=RIGHT_OF.get(self.call_name) or "",
                outcome=outcome,
                facts=self.facts,
            )
        if self.span is not None:
            told = {f"sparsekv.{name}": value for name, value in self.facts.items()}
            plain = {name: value for name, value in told.items() if isinstance(value, str | int | float)}
            self.span.end(plain, error or str(self.facts.get("ended", "")))

    async def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Short blocking work. Raises TooManyRequestsError, and DeadlineExceededError where it takes a minute."""
        task = asyncio.ensure_future(self._work.run(function))
        task.add_done_callback(forget_error)
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await task
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the server did not get to an answer in {_ANSWER_S:g} s; its disk may not respond"
            ) from error

    def run_alone(self, function: Callable[[], ResultT]) -> Coroutine[Any, Any, ResultT]:
        """Blocking work that may take long, and which ends by itself once `check` raises."""
        return self._work.run_alone(function)


def _text(value: object) -> str:
    """A fact, or what a client may have written, without what begins a line of its own."""
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isprintable() else " " for letter in text)


def host_of(peer: str) -> str:
    """The address of a peer without its port: the same for all connections of one machine."""
    endpoint = endpoint_of(peer)
    return peer if endpoint is None else endpoint[0]


def endpoint_of(peer: str) -> tuple[str, int] | None:
    """Address and port of a peer; None for what is no Internet address."""
    _, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    try:
        return plain_address(host.strip("[]")), int(port)
    except ValueError:
        return None


def plain_address(host: str) -> str:
    """An address in its one spelling; an IPv4 address that came by IPv6 is the IPv4 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
