"""What crosses the link, messages of a door to the engine and back in msgpack, and the socket that they cross by.

A door says `Hello`, until it is answered by `Welcome`; from then on it submits. It numbers its requests and questions
from one count, and never uses a number again. `life` counts its hellos: who says hello again has given up all before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import zmq
from msgspec import Raw, Struct
from zmq.utils.monitor import recv_monitor_message

from decode_engine.errors import AddressError
from decode_engine.orders.events import Event, Facts, Fails
from decode_engine.orders.order import Order

VERSION = 4

LIFE_S = 1.0
"""A door says so often that it lives, and is answered."""


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a door. version: of these messages; stays the first field. pid: of its process."""

    version: int
    pid: int
    life: int


class Submits(Struct, frozen=True, array_like=True, tag="submit"):
    """A request."""

    number: int
    order: Order


class Stops(Struct, frozen=True, array_like=True, tag="stop"):
    """`Handle.stop`."""

    number: int
    answer: int
    tokens: int


class Cancels(Struct, frozen=True, array_like=True, tag="cancel"):
    """A request, or a question, is given up."""

    number: int


class Asks(Struct, frozen=True, array_like=True, tag="ask"):
    """A question, that one of these methods of `Core` answers. given: to it."""

    number: int
    method: Literal["status", "residency", "tenancy", "allow", "warm", "changed"]
    given: list[Any]


class Alive(Struct, frozen=True, array_like=True, tag="alive"):
    """Of either side: its loop runs."""


class Leaves(Struct, frozen=True, array_like=True, tag="leave"):
    """The last message of a door: it wants nothing any more."""


OfKnownDoor = Submits | Stops | Cancels | Asks | Alive | Leaves
FromDoor = Hello | OfKnownDoor


class Starting(Struct, frozen=True, array_like=True, tag="starting"):
    """The engine takes no requests yet. phase: what it does."""

    phase: str


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """The engine takes requests of the door, since its hello of this number."""

    life: int
    facts: Facts


class Turn(Struct, frozen=True, array_like=True, tag="turn"):
    """All events of a turn of the engine that are of this door's requests, by their numbers, in order."""

    events: list[tuple[int, Event]]


class Answers(Struct, frozen=True, array_like=True, tag="answer"):
    """What a question is answered by. result: as the question's method returns it."""

    number: int
    result: Raw


class Denies(Struct, frozen=True, array_like=True, tag="deny"):
    """A question is answered by an error."""

    number: int
    error: Fails


class Unknown(Struct, frozen=True, array_like=True, tag="unknown"):
    """The door is not known, or no longer: none of its requests runs. It has to say hello."""

    why: str


class Closing(Struct, frozen=True, array_like=True, tag="closing"):
    """The engine ends, and all requests with it, or it does not speak with this door."""

    error: Fails


FromEngine = Starting | Welcome | Turn | Answers | Denies | Unknown | Closing | Alive

ResultT = TypeVar("ResultT")

encode = msgspec.msgpack.Encoder().encode
decode_from_door = msgspec.msgpack.Decoder(FromDoor).decode
"""Raises msgspec.MsgspecError for what is no message of a door."""
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def decode_result(result: Raw, kind: type[ResultT]) -> ResultT:
    return msgspec.msgpack.decode(result, type=kind)


logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Messages that are read before others on the loop have their turn."""
_MESSAGE_BYTES = 2**26


class LoopSocket:
    """A ZeroMQ socket on the event loop that runs; other threads have no part in it.

    Its descriptor tells of changes, once for several messages, so it is read until nothing is there; sending may take
    such a word away. It is no part of a socket's own events that the other side has gone: its monitor tells that.
    """

    def __init__(
        self,
        kind: zmq.SocketType,
        waiting: int,
        events: int,
        on_message: Callable[[list[bytes]], None],
        on_event: Callable[[int], None],
    ) -> None:
        """waiting: messages to one other side that may wait to be sent, 0 for any number. on_message: gets the frames
        of each. on_event: gets those of the monitor that are wanted."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.SNDHWM, waiting)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if kind == zmq.ROUTER:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # who is gone, or reads nothing, is told of
        self._monitor = self._socket.get_monitor_socket(events)
        self._on_message = on_message
        self._on_event = on_event
        self._loop.add_reader(self._socket.FD, self.read)
        self._loop.add_reader(self._monitor.FD, self._read_monitor)
        self._loop.call_soon(self._read_monitor)  # a descriptor tells nothing before it was read in vain

    def bind(self, path: Path) -> None:
        """Listens there. Raises AddressError."""
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close(0.0)
            raise AddressError(
                f"no socket can be made at {path}: {error}; set TMPDIR to another folder"
            ) from error
        self._loop.call_soon(self.read)

    def connect(self, path: Path) -> None:
        """Speaks to who listens there, and to who does later."""
        self._socket.connect(f"ipc://{path}")
        self._loop.call_soon(self.read)

    def send(self, *frames: bytes) -> None:
        """Sends or raises zmq.ZMQError: Again where too many wait, EHOSTUNREACH where nobody has that address."""
        for frame in frames[:-1]:
            self._socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
        self._socket.send(frames[-1], zmq.NOBLOCK)
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.read)

    def read(self, at_once: int = _AT_ONCE) -> None:
        """Hands on what is there."""
        for _ in range(at_once):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except Exception:
                logger.exception("a message was not understood")
        self._loop.call_soon(self.read)

    def close(self, linger_s: float) -> None:
        """What was sent may take so long to be taken in by the other side. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._loop.remove_reader(self._monitor.FD)
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(round(linger_s * 1000))
            self._context.term()

    def _read_monitor(self) -> None:
        while not self._monitor.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_event(event["event"])
