"""The engine's side of the link: doors come and go, each with its requests, and none of them can hold up the engine.

All is done on one event loop, on a thread of its own, which the core uses, too. What a core says of a turn's requests
it says in one go on that loop, so events of a door are gathered until the loop comes by again, and make one message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import zmq
from msgspec import Raw

from decode_engine.errors import InternalError
from decode_engine.orders.events import Core, Ends, Event, Facts, Fails, Handle, event_of_error
from decode_engine.processes.link import frames
from decode_engine.rpc.transport.work import LoopThread

logger = logging.getLogger(__name__)

_GONE_S = 0.02  # until the socket, too, knows that the other side of a connection is gone
_LINGER_S = 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """With doors. turns: messages that may wait for one. silent_s: after which one that says nothing is given up."""

    turns: int = 2000
    silent_s: float = 30.0


@dataclass(slots=True, eq=False)
class _Request:
    """One of a door's. left: answers that have not ended. handle: the core's."""

    left: int
    handle: Handle | None = None


@dataclass(slots=True, eq=False)
class _Peer:
    """A door. heard: when, on `time.monotonic`. events: of the turn that is gathered. lost: why it was given up, of
    which it is told when it says something again."""

    address: bytes
    hello: frames.Hello
    heard: float
    requests: dict[int, _Request] = field(default_factory=dict)
    questions: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    events: list[tuple[int, Event]] = field(default_factory=list)
    lost: str = ""


class EngineHost:
    """Answers from its making on, that the engine is starting, and gives doors the core once that is there.

    loop: where cores are to be used. Raises AddressError. Its methods are for any thread but the loop's.
    """

    def __init__(
        self,
        path: Path,
        on_silent: Callable[[int], None] = lambda pid: None,
        patience: Patience | None = None,
    ) -> None:
        """path: of the socket, in a folder that nobody else may enter. on_silent: gets the process of a door that does
        not live any more, as far as can be heard."""
        self._on_silent = on_silent
        self._patience = patience or Patience()
        self._core: Core | None = None
        self._facts: Facts | None = None
        self._phase = "begin"
        self._peers: dict[bytes, _Peer] = {}
        self._spoken_of: list[_Peer] = []
        self._tick: asyncio.TimerHandle | None = None
        self._thread = LoopThread("link")
        self.loop = self._thread.loop
        try:
            self._thread.do(self._open(path))
        except BaseException:
            self._thread.close()
            raise

    def say(self, phase: str) -> None:
        self.loop.call_soon_threadsafe(self._say, phase)

    def open(self, core: Core) -> Facts:
        return self._thread.do(self._take_in(core))

    def close(self, error: Fails) -> None:
        """Ends all requests that are open with that error, and speaks no more. Idempotent."""
        if not self.loop.is_closed():
            self._thread.do(self._close(error))
            self._thread.close()

    async def _open(self, path: Path) -> None:
        gone = int(zmq.Event.DISCONNECTED)
        self._socket = frames.LoopSocket(
            zmq.SocketType.ROUTER, self._patience.turns, gone, self._receive, self._note_gone
        )
        self._socket.bind(path)
        self._tick = self.loop.call_later(frames.LIFE_S, self._look_round)

    async def _take_in(self, core: Core) -> Facts:
        self._facts = await core.facts()
        self._core = core
        for peer in list(self._peers.values()):
            self._send(peer, frames.Welcome(peer.hello.life, self._facts))
        return self._facts

    async def _close(self, error: Fails) -> None:
        self._flush()
        questions: list[asyncio.Task[None]] = []
        for peer in list(self._peers.values()):
            self._send(peer, frames.Closing(error))
            questions += peer.questions.values()
            self._forget(peer)
        await asyncio.gather(*questions, return_exceptions=True)
        if self._tick is not None:
            self._tick.cancel()
        self._socket.close(_LINGER_S)

    def _say(self, phase: str) -> None:
        self._phase = phase
        for peer in list(self._peers.values()):
            self._send(peer, frames.Starting(phase))

    def _receive(self, parts: list[bytes]) -> None:
        address = parts[0]
        peer = self._peers.get(address)
        try:
            (word,) = parts[1:]
            message = frames.decode_from_door(word)
        except (ValueError, msgspec.MsgspecError) as error:
            self._drop(address, f"a message of it cannot be read: {error}")
            return
        if isinstance(message, frames.Hello):
            self._greet(address, message)
        elif peer is None:
            self._tell(address, frames.Unknown("it said no hello"))
        elif peer.lost:
            peer.heard = time.monotonic()
            self._tell(address, frames.Unknown(peer.lost))
        else:
            peer.heard = time.monotonic()
            self._do(peer, message)

    def _greet(self, address: bytes, hello: frames.Hello) -> None:
        if (before := self._peers.get(address)) is not None:
            self._forget(before)
        if hello.version != frames.VERSION:
            spoken = f"a door speaks version {hello.version} of the link, this engine {frames.VERSION}"
            text = f"{spoken}: both have to be started anew"
            self._tell(address, frames.Closing(event_of_error(InternalError(text))))
            return
        peer = self._peers[address] = _Peer(address, hello, time.monotonic())
        ready = self._core is not None and self._facts is not None
        self._send(
            peer,
            frames.Welcome(hello.life, self._facts)
            if ready and self._facts
            else frames.Starting(self._phase),
        )

    def _do(self, peer: _Peer, message: frames.OfKnownDoor) -> None:
        match message:
            case frames.Submits():
                self._submit(peer, message)
            case frames.Stops(number, answer, tokens):
                if (found := peer.requests.get(number)) is not None and found.handle is not None:
                    found.handle.stop(answer, tokens)
            case frames.Cancels(number):
                request, question = peer.requests.pop(number, None), peer.questions.get(number)
                if request is not None and request.handle is not None:
                    request.handle.cancel()
                if question is not None:
                    question.cancel()
            case frames.Alive():
                self._send(peer, frames.Alive())
            case frames.Leaves():
                self._forget(peer)
            case _:
                asked = self.loop.create_task(self._answer(peer, message))
                peer.questions[message.number] = asked
                asked.add_done_callback(lambda _: peer.questions.pop(message.number, None))

    def _submit(self, peer: _Peer, message: frames.Submits) -> None:
        request = peer.requests[message.number] = _Request(message.order.answers)
        take = partial(self._take, peer, message.number, request)
        try:
            if self._core is None:
                raise InternalError("a request came before the engine took any")
            request.handle = self._core.submit(message.order, take)
        except Exception as error:
            logger.exception("a request could not be submitted")
            take([event_of_error(error)])

    def _take(self, peer: _Peer, number: int, request: _Request, events: Sequence[Event]) -> None:
        """Gathers events of one request, until the loop comes by again."""
        if peer.requests.get(number) is not request:
            return
        if not peer.events:
            if not self._spoken_of:
                self.loop.call_soon(self._flush)
            self._spoken_of.append(peer)
        for event in events:
            peer.events.append((number, event))
            if isinstance(event, Ends):
                request.left -= 1
            elif isinstance(event, Fails):
                request.left = 0
        if not request.left:
            del peer.requests[number]

    def _flush(self) -> None:
        peers, self._spoken_of = self._spoken_of, []
        for peer in peers:
            events, peer.events = peer.events, []
            if self._peers.get(peer.address) is peer:
                self._send(peer, frames.Turn(events))

    async def _answer(self, peer: _Peer, question: frames.Asks) -> None:
        answer: frames.Answers | frames.Denies
        try:
            answer = frames.Answers(question.number, Raw(frames.encode(await self._ask(question))))
        except Exception as error:
            answer = frames.Denies(question.number, event_of_error(error))
            if answer.error.reason == InternalError.reason:
                logger.exception("a question could not be answered")
        if self._peers.get(peer.address) is peer:
            self._send(peer, answer)

    async def _ask(self, question: frames.Asks) -> object:
        if self._core is None:
            raise InternalError("a question came before the engine answered any")
        answer: object = await getattr(self._core, question.method)(*question.given)
        return answer

    def _send(self, peer: _Peer, message: frames.FromEngine) -> None:
        """Sends at once, or gives the door up."""
        if peer.lost:
            return
        try:
            self._socket.send(peer.address, frames.encode(message))
        except zmq.Again:
            self._drop(peer.address, "it did not read what it was sent")
        except zmq.ZMQError:
            self._drop(peer.address, "its process has ended")
            self._peers.pop(peer.address, None)

    def _tell(self, address: bytes, message: frames.Unknown | frames.Closing) -> None:
        """Sends to somebody who is no door, if that can be; who asks again is told again."""
        try:
            self._socket.send(address, frames.encode(message))
        except zmq.ZMQError as error:
            logger.debug("a door that is not known cannot be told so: %s", error)

    def _drop(self, address: bytes, why: str) -> None:
        peer = self._peers.get(address)
        if peer is None:
            logger.warning("what came over the link was passed over: %s", why)
            self._tell(address, frames.Unknown(why))
            return
        logger.warning("door %d is given up with %d requests: %s", peer.hello.pid, len(peer.requests), why)
        peer.lost = why
        self._end_all(peer)
        self._tell(address, frames.Unknown(why))

    def _forget(self, peer: _Peer) -> None:
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        self._end_all(peer)

    def _end_all(self, peer: _Peer) -> None:
        requests, peer.requests = peer.requests, {}
        for request in requests.values():
            if request.handle is not None:
                request.handle.cancel()
        for question in list(peer.questions.values()):
            question.cancel()

    def _note_gone(self, event: int) -> None:
        """A connection has ended, it is not said whose: nothing can be sent there."""
        self.loop.call_later(_GONE_S, self._try_all)

    def _try_all(self) -> None:
        for peer in list(self._peers.values()):
            self._send(peer, frames.Alive())

    def _look_round(self) -> None:
        self._socket.read(2**20)  # of what came while this loop could not run
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if self._core is None:  # doors speak once they are welcome
                peer.heard = now
            elif now - peer.heard > self._patience.silent_s:
                if not peer.lost:
                    self._drop(peer.address, f"nothing was heard of it for {self._patience.silent_s:g} s")
                peer.heard = now  # who is told does something about it, or is told again
                self._on_silent(peer.hello.pid)
        self._tick = self.loop.call_later(frames.LIFE_S, self._look_round)
