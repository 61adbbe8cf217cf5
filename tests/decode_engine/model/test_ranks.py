"""A model that several ranks share: which ones can be divided, and that another rank does what the first one says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from decode_engine.core.rank_process import Follower
from decode_engine.engine.sampler import Sampler
from decode_engine.layers.session import Session
from decode_engine.model.divided_model import check_division
from decode_engine.model.ranks import CapturedStep, CatchUp, Layer, Leader, Line, Pass, places_of
from decode_engine.model.unstored import no_context
from index_store.errors import (
    ContextNotFoundError,
    InvalidArgumentError,
    MemoryBudgetError,
    ModelUnsupportedError,
    SparseKVError,
)
from index_store.memory.arena import Arena
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod
from index_store.methods.presets import METHODS, get_method
from index_store.models.resolve import resolve_model
from index_store.store.catalog import Store
from index_store.store.heads_part import HeadsPart
from tests.support.models import FAMILIES, LAYER_KINDS, write_model_folder
from tests.support.tiny_model import IDENTITY


class Recorder:
    """Stands for a runner. did: what it was asked for, and the positions of the sessions."""

    def __init__(self) -> None:
        self.no_context = no_context(IDENTITY, "float32", torch.device("cpu"))
        self.did: list[tuple[object, ...]] = []
        self.numbers: dict[int, int] = {}

    def start(self, context: ResidentContext, fitted: FittedMethod, *, again: int) -> Session:
        self.did.append(("start", fitted.method.name, again))
        return Session(context, fitted)

    def forward(
        self,
        sessions: Sequence[Session],
        token_ids: Sequence[Sequence[int]],
        *,
        between: Callable[[], None],
        **told: Any,
    ) -> None:
        self.did.append(("forward", [each.position for each in sessions], token_ids, told["exact"]))
        for layer in range(2):
            between()
            self.did.append(("layer", layer))
        for session, own in zip(sessions, token_ids, strict=True):
            session.position += len(own)

    def catch_up(self, session: Session) -> None:
        self.did.append(("catch up", session.position))

    def step_captured(
        self, sessions: Sequence[Session], tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> None:
        positions = [each.position for each in sessions]
        self.did.append(("step", positions, tokens, [each.repeatable for each in samplers]))
        for session in sessions:
            session.position += 1


class Contexts:
    """Stands for an arena with one context of no tokens. held: leases on it. refusal: what it raises instead."""

    def __init__(self, context: ResidentContext) -> None:
        self._context, self.held = context, 0
        self.refusal: SparseKVError | None = None

    @contextmanager
    def acquire(
        self, store: Store, id_: str, *, wait_for_memory: bool = False, expired: bool
    ) -> Iterator[ResidentContext]:
        assert not wait_for_memory, "nobody reads the orders that end other sessions"
        if self.refusal is not None:
            raise self.refusal
        self.held += 1
        try:
            yield self._context
        finally:
            self.held -= 1


class Two:
    """Two ranks in one process. lost: why the first one would have ended."""

    def __init__(self) -> None:
        own, theirs = socket.socketpair()
        self.lost: list[str] = []
        self.leader = Leader(HeadsPart(0, 2), [Line(own)], self.lost.append)
        self.runner, self.raised = Recorder(), list[BaseException]()
        self.contexts = Contexts(self.runner.no_context)
        self._own = own
        self._follower = Follower(Line(theirs), self.runner, cast(Store, None), cast(Arena, self.contexts))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._follower.run()
        except BaseException as error:
            self.raised.append(error)

    def session_on(self, id_: str) -> Session:
        """One on a stored context, as the other rank is told."""
        fitted = METHODS["full"].on(self.runner.no_context.manifest)
        session = Session(self.runner.no_context, fitted)
        stored = replace(self.runner.no_context.manifest, id=id_, token_count=1)
        told = SimpleNamespace(context=SimpleNamespace(manifest=stored), mirror=None)
        try:
            self.leader.begin(cast(Session, told), fitted, 0)
        finally:
            session.mirror = told.mirror
        return session

    def session(self, again: int = 0) -> Session:
        fitted = METHODS["full"].on(self.runner.no_context.manifest)
        session = Session(self.runner.no_context, fitted)
        self.leader.begin(session, fitted, again)
        return session

    def end(self) -> list[tuple[object, ...]]:
        """All that the other rank did."""
        self._own.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.runner.did


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.end()


def forward(sessions: Sequence[Session], ids: list[list[int]], between: bool) -> Pass:
    return Pass(places_of(sessions), ids, False, {"exact": True}, between)


def test_sessions_are_where_the_first_rank_has_them(two: Two) -> None:
    first = two.session()
    two.leader.tell(forward([first], [[1, 2, 3]], False))
    first.position += 3
    other = first.fork()
    two.leader.tell(CapturedStep(places_of([first, other]), [4, 5], [False, True]))
    first.position += 1  # the other one's step found no token
    two.leader.tell(CapturedStep(places_of([first, other]), [6, 7], [False, False]))
    two.leader.tell(CatchUp(cast(Any, first.mirror).number, first.position))
    first.close()
    other.close()
    assert two.end() == [
        ("start", "full", 0),
        ("forward", [0], [[1, 2, 3]], True),
        ("layer", 0),
        ("layer", 1),
        ("step", [3, 3], [4, 5], [False, True]),
        ("step", [4, 3], [6, 7], [False, False]),
        ("catch up", 4),
    ]
    assert not two.raised


def test_steps_between_layers_come_in_the_same_layers(two: Two) -> None:
    reading, stepping = two.session(), two.session()
    two.leader.tell(forward([reading], [[1]], True))
    two.leader.tell(Layer())
    two.leader.tell(CapturedStep(places_of([stepping]), [9], [False]))
    two.leader.tell(Layer())
    did = two.end()[2:]
    assert [each[0] for each in did] == ["forward", "layer", "step", "layer"]


def test_a_rank_that_cannot_follow_stops(two: Two) -> None:
    session = two.session()
    session.position += 5  # tokens that the other rank has not seen
    two.leader.tell(CapturedStep(places_of([session]), [1], [False]))
    two.end()
    assert [type(error).__name__ for error in two.raised] == ["InternalError"]


def test_answers_share_the_lease_of_their_context_which_may_be_deleted(two: Two) -> None:
    first = two.session_on("a" * 64)
    two.contexts.refusal = ContextNotFoundError("it was deleted")
    other = first.fork()
    first.close()
    two.session()  # whose answer comes behind what was told before
    assert two.contexts.held == 1
    other.close()
    two.session()
    assert two.contexts.held == 0
    assert not two.raised


@pytest.mark.parametrize("error", [MemoryBudgetError("it is full"), ContextNotFoundError("it was deleted")])
def test_why_another_rank_cannot_begin_is_told_by_its_reason(two: Two, error: SparseKVError) -> None:
    two.contexts.refusal = error
    with pytest.raises(type(error), match=f"another GPU cannot begin: {error.message}"):
        two.session_on("a" * 64)
    two.session()
    assert not two.raised


def test_what_fails_in_a_step_of_all_ends_the_first_one(two: Two) -> None:
    session = two.session()
    with pytest.raises(ZeroDivisionError), two.leader.together(lambda: forward([session], [[1]], False)):
        1 / 0  # noqa: B018
    assert "division by zero" in two.lost[0]


def test_a_method_that_cannot_be_told_is_refused(two: Two) -> None:
    method = replace(get_method("full"), sinks=3)
    fitted = method.on(two.runner.no_context.manifest)
    session = Session(two.runner.no_context, fitted)
    with pytest.raises(InvalidArgumentError, match="cannot be told"):
        two.leader.begin(session, fitted, 0)


def check(folder: Path, family: str, settings: dict[str, object], ranks: int = 2) -> None:
    """Of a model without weights."""
    write_model_folder(folder, family, layers=3, **settings)  # type: ignore[arg-type]
    for each in folder.glob("*.safetensors"):
        each.write_bytes(b"")
    check_division(resolve_model(str(folder)), ranks)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_divided_is_not_refused(tmp_path: Path, family: str) -> None:
    check(tmp_path / "model", family, {})


def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="2 KV heads cannot be divided among 3 GPUs"):
        check(tmp_path / "model", "llama", {}, ranks=3)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("states", "has states"),
        ("experts", "its layer model.layers.0.mlp.experts"),
        ("latents", "cannot be divided"),
        ("learnt index", "has an index of its own"),
    ],
)
def test_what_is_not_divided_is_refused_by_its_name(tmp_path: Path, kind: str, said: str) -> None:
    family, settings = LAYER_KINDS[kind]
    with pytest.raises((InvalidArgumentError, ModelUnsupportedError), match=said):
        check(tmp_path / "model", family, dict(settings))
