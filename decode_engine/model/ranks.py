"""Ranks of a model that is divided: the first one is the server's engine, the others repeat what it does.

The first rank says what it is about to do, and then all do it over their own heads; sums in the model's layers keep
them together. Sessions have numbers, and every order says at which position a session is, so that nothing else about
them has to be agreed on. What a session reads is of a context that each rank has loaded for itself, its heads' part.

No rank goes on alone: where one ends, or cannot do what it was told, all of them end, and with them the process of the
engine, whose end its clients are told as that of any engine.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import msgspec
from msgspec import Struct

from decode_engine.errors import error_by_reason
from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import Manner
from index_store.errors import InvalidArgumentError
from index_store.methods.method import FittedMethod, Method
from index_store.methods.presets import get_method
from index_store.selection.budgets import Mass, Ratio, Threshold, TokenCount
from index_store.store.heads_part import HeadsPart

logger = logging.getLogger(__name__)

Places = list[tuple[int, int]]
"""Numbers of sessions, and the position of each."""


class Start(Struct, frozen=True, tag=True):
    """A session begins, on a context or on none (""). The method: by its expression and what its budget is given by.

    Each rank answers: why it cannot (`Refusal`), or nothing.
    """

    number: int
    context: str
    method: str
    keep: float | None
    mass: float | None
    tokens: int | None
    period: int | None
    again: int


class Refusal(Struct, frozen=True):
    """Why a session cannot begin: an error by its reason."""

    reason: str
    message: str


class Fork(Struct, frozen=True, tag=True):
    """Another session goes on by itself."""

    number: int
    new: int


class Close(Struct, frozen=True, tag=True):
    """A session ends."""

    number: int


class Pass(Struct, frozen=True, tag=True):
    """A pass over the model, see `ModelRunner.forward`. between: orders may come in every layer, until `Layer`."""

    places: Places
    token_ids: list[list[int]]
    all_logits: bool
    manner: Manner
    between: bool


class Layer(Struct, frozen=True, tag=True):
    """The pass goes on behind a layer's attention."""


class CatchUp(Struct, frozen=True, tag=True):
    """What has left the window is made searchable."""

    number: int
    position: int


class CapturedStep(Struct, frozen=True, tag=True):
    """A captured step. repeatable: see `Sampler`."""

    places: Places
    tokens: list[int]
    repeatable: list[bool]


Order = Start | Fork | Close | Pass | Layer | CatchUp | CapturedStep

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Order).decode
_decode_refusal = msgspec.msgpack.Decoder(Refusal).decode
_WIDTH = 4


class Line:
    """Messages to and from another rank, each behind its length."""

    def __init__(self, own: socket.socket) -> None:
        self._file = own.makefile("rwb")

    def send(self, message: bytes) -> None:
        """Raises OSError where nobody hears it."""
        self._file.write(len(message).to_bytes(_WIDTH, "big") + message)
        self._file.flush()

    def receive(self) -> bytes | None:
        """The next one; None where the other side has ended."""
        head = self._file.read(_WIDTH)
        if len(head) < _WIDTH:
            return None
        return self._file.read(int.from_bytes(head, "big"))


class Alone:
    """The only rank, or one that repeats what the first one does: whatever it does, it tells nobody."""

    def __init__(self, part: HeadsPart | None = None) -> None:
        self.part = part or HeadsPart()

    @property
    def divided(self) -> bool:
        return self.part.ranks > 1

    def tell(self, order: Order) -> None:
        """What all others are to do, too."""

    def begin(self, session: Session, fitted: FittedMethod, again: int) -> None:
        """Has a session that was just made begin on the others. Raises SparseKVError where one of them cannot."""

    @contextmanager
    def together(self, order: Callable[[], Order]) -> Iterator[None]:
        """While the block runs, all ranks do what was told: it must not fail for one alone."""
        yield


class Leader(Alone):
    """The first rank. lost: ends the process, where another rank has ended or this one cannot go on."""

    def __init__(self, part: HeadsPart, lines: Sequence[Line], lost: Callable[[str], None]) -> None:
        super().__init__(part)
        self._lines, self._lost = lines, lost
        self._numbers = count(1)
        self._lock = threading.Lock()

    def new_number(self) -> int:
        return next(self._numbers)

    def tell(self, order: Order) -> None:
        message = encode(order)
        with self._lock:
            try:
                for line in self._lines:
                    line.send(message)
            except OSError as error:
                self._lost(f"another rank does not listen: {error}")

    def begin(self, session: Session, fitted: FittedMethod, again: int) -> None:
        number, context = self.new_number(), session.context.manifest
        self.tell(Start(number, context.id if context.token_count else "", *_told(fitted), again))
        answers = [self._answer(line) for line in self._lines]
        session.mirror = Mirror(self, number)
        for answer in filter(None, answers):
            refusal = _decode_refusal(answer)
            raise error_by_reason(refusal.reason, f"another GPU cannot begin: {refusal.message}", {})

    def _answer(self, line: Line) -> bytes:
        message = line.receive()
        if message is None:
            self._lost("another rank has ended")
        return message or b""

    @contextmanager
    def together(self, order: Callable[[], Order]) -> Iterator[None]:
        self.tell(order())
        try:
            yield
        except BaseException as error:
            logger.exception("a step of several ranks failed")
            self._lost(f"a step of several ranks failed: {error}")
            raise


class Mirror:
    """A session's counterparts on the other ranks."""

    def __init__(self, leader: Leader, number: int) -> None:
        self._leader, self.number = leader, number

    def fork(self) -> Mirror:
        """Those of a session that goes on by itself."""
        other = Mirror(self._leader, self._leader.new_number())
        self._leader.tell(Fork(self.number, other.number))
        return other

    def close(self) -> None:
        self._leader.tell(Close(self.number))


def places_of(sessions: Sequence[Session]) -> Places:
    """Of sessions that have begun on all ranks."""
    return [(each.mirror.number if each.mirror else 0, each.position) for each in sessions]


def _told(fitted: FittedMethod) -> tuple[str, float | None, float | None, int | None, int | None]:
    """What `get_method` makes the method of again. Raises InvalidArgumentError where that is another one."""
    method, budget = fitted.method, fitted.method.budget
    keep = budget.keep if isinstance(budget, Ratio | Threshold) else None
    mass = budget.mass if isinstance(budget, Mass) else None
    tokens = budget.tokens if isinstance(budget, TokenCount) else None
    told = (method.name, keep, mass, tokens, method.period if method.sparse else None)
    if method_of(*told).on(fitted.manifest).method != method:
        raise InvalidArgumentError(
            f"method {method.name!r} cannot be told to other GPUs; take another one", field="method"
        )
    return told


def method_of(
    name: str, keep: float | None, mass: float | None, tokens: int | None, period: int | None
) -> Method:
    """The method that was told."""
    return get_method(name, keep, period, mass=mass, tokens=tokens)
