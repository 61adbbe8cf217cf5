"""What crosses the link: messages of a door to the engine and back, in msgpack.

A door says `Hello`, until it is answered by `Welcome`; from then on it submits. It numbers its requests and questions
from one count, and never uses a number again. `life` counts its hellos: who says hello again has given up all before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

from decode_engine.orders.core import Facts
from decode_engine.orders.events import Event, Fails
from decode_engine.orders.order import Order

VERSION = 2

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


class AsksStatus(Struct, frozen=True, array_like=True, tag="status"):
    """`Core.status`."""

    number: int


class AsksResidency(Struct, frozen=True, array_like=True, tag="residency"):
    """`Core.residency`."""

    number: int
    bases: Sequence[str]


class Warms(Struct, frozen=True, array_like=True, tag="warm"):
    """`Core.warm`."""

    number: int
    context: str
    deadline_ns: int | None


class Changed(Struct, frozen=True, array_like=True, tag="changed"):
    """`Core.changed`."""

    number: int
    context: str


class Alive(Struct, frozen=True, array_like=True, tag="alive"):
    """Of either side: its loop runs."""


class Leaves(Struct, frozen=True, array_like=True, tag="leave"):
    """The last message of a door: it wants nothing any more."""


Question = AsksStatus | AsksResidency | Warms | Changed
FromDoor = Hello | Submits | Stops | Cancels | Question | Alive | Leaves


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
    """A question's answer."""
    return msgspec.msgpack.decode(result, type=kind)
