"""Doors and an engine over the link, in one process: every message there and back, and who misbehaves harms nobody."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from decode_engine.errors import (
    EngineCrashedError,
    InternalError,
    NotReadyError,
    ShuttingDownError,
    TooManyRequestsError,
)
from decode_engine.orders.events import (
    Begins,
    Ends,
    Event,
    Fails,
    PromptRead,
    Says,
    TokenLogprob,
    Waits,
    Warmed,
    error_of_event,
    event_of_error,
)
from decode_engine.orders.order import Constraint, KeepOptions, Order, Sampling, ToolChoice
from decode_engine.processes.link import frames
from decode_engine.processes.link.host import EngineHost, Patience
from decode_engine.processes.link.remote import RETRY_S, RemoteCore
from index_store.errors import ContextNotFoundError
from index_store.models.conversation.messages import Message, Role, Tool, ToolCall
from tests.support.serving.fake_core import FACTS, IDENTITY, TIMES, FakeCore

ORDER = Order(
    context="c" * 64,
    turns=(Message(Role.ASSISTANT, "hm", tool_calls=(ToolCall("look", "{}", "1"),)),),
    tools=(Tool("look", "looks", "{}", strict=True),),
    choice=ToolChoice("required", ("look",), True),
    prompt=[1, 2**31, 3],
    max_tokens=3,
    sampling=Sampling(0.5, 0.9, 40, 2**63 - 1, 0.1, 0.2, 1.1, {7: -100.0}, 2, 5),
    constraint=Constraint("json_schema", "{}"),
    stops=("\n", "♥"),
    stop_token_ids=frozenset({4, 5}),
    method="full",
    keep_ratio=0.5,
    answers=1,
    keep=KeepOptions("n", 60, True, True, "me", True),
    deadline_ns=2**62,
    caller="me",
    tenant="acme",
    admin=True,
)
END = Ends(0, "length", 3, 7, TIMES, {"keys": 3})


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sparsekv-") as folder:
        yield Path(folder, "engine")


class Heard:
    """What is said of a request, by the calls that said it."""

    def __init__(self) -> None:
        self.calls: list[list[Event]] = []
        self._changed = asyncio.Event()

    def __call__(self, events: Sequence[Event]) -> None:
        self.calls.append(list(events))
        self._changed.set()

    @property
    def events(self) -> list[Event]:
        return [event for call in self.calls for event in call]

    @property
    def last(self) -> Event:
        return self.events[-1]

    async def wait_for(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> Event:
        await self.wait_for(lambda: self.calls and isinstance(self.last, Ends | Fails))
        return self.last


class Readiness(Heard):
    """Of a door."""

    def __init__(self) -> None:
        super().__init__()
        self.now = False

    def __call__(self, ready: Any) -> None:
        self.now = ready
        self._changed.set()

    async def become(self, ready: bool) -> None:
        await self.wait_for(lambda: self.now is ready)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def run(path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(path), 120))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@asynccontextmanager
async def door(path: Path, **options: Any) -> AsyncIterator[tuple[RemoteCore, Readiness]]:
    ready = Readiness()
    core = RemoteCore(path, ready, **options)
    try:
        yield core, ready
    finally:
        core.close()


@asynccontextmanager
async def engine(path: Path, patience: Patience | None = None) -> AsyncIterator[tuple[EngineHost, FakeCore]]:
    host = await asyncio.to_thread(EngineHost, path, lambda pid: None, patience)
    core = FakeCore(host.loop)
    await asyncio.to_thread(host.open, core)
    try:
        yield host, core
    finally:
        core.stop()
        await asyncio.to_thread(host.close, event_of_error(ShuttingDownError("it ends")))


async def there(core: FakeCore, condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(core.wait_for, condition)


async def take_turns(core: FakeCore, count: int, heard: Sequence[Heard]) -> None:
    """Turns, of which each is heard of before the next one; those that came together would make one message."""
    for turn in range(1, count + 1):
        core.turn()
        for each in heard:
            await each.wait_for(lambda: len(each.calls) == turn)  # noqa: B023


async def raises(kind: type[Exception], work: Awaitable[object]) -> Any:
    with pytest.raises(kind) as caught:
        await work
    return caught.value


EVENTS: list[Event] = [
    Waits("method", 3),
    Begins("c", "full", 1, 2, 3, reason="faster"),
    PromptRead([TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.5)))]),
    Says(1, [2, 3], [TokenLogprob(2, -1.0), TokenLogprob(3, float("-inf"))]),
    END,
    Fails("NOT_READY", "♥", {"phase": "x"}, 1.5),
]


@pytest.mark.parametrize(
    "message",
    [
        frames.Starting("x"),
        frames.Welcome(1, FACTS),
        frames.Turn([(number, event) for number, event in enumerate(EVENTS)]),
        frames.Answers(1, msgspec.Raw(b"\xc0")),
        frames.Denies(1, Fails("A", "b", {})),
        frames.Unknown("x"),
        frames.Closing(Fails("A", "b", {}, 1.0)),
        frames.Alive(),
    ],
)
def test_what_the_engine_says_crosses(message: Any) -> None:
    """Sequences come as lists, which is what they may be."""
    crossed = frames.decode_from_engine(frames.encode(message))
    assert type(crossed) is type(message)
    assert frames.encode(crossed) == frames.encode(message)
    assert crossed.__struct_fields__ == message.__struct_fields__


@in_loop
async def test_a_request_gets_its_events_in_order_one_call_a_turn(path: Path) -> None:
    async with engine(path) as (_, core), door(path) as (remote, ready):
        await ready.become(True)
        assert (await remote.facts()).identity == IDENTITY
        heard = [Heard() for _ in range(64)]
        for each in heard:
            remote.submit(ORDER, each)
        await there(core, lambda: len(core.orders) == 64)
        assert core.orders[0] == ORDER
        await take_turns(core, 3, heard)
        for each in heard:
            begins = [Waits("session", 1), Begins(ORDER.context, "full", 1, 3, 9)]
            assert frames.encode(each.calls) == frames.encode(
                [[*begins, Says(0, [0])], [Says(0, [1])], [Says(0, [2]), END]]
            )


@in_loop
async def test_a_turn_is_one_message_for_each_door(path: Path) -> None:
    async with engine(path) as (_, core), door(path) as (one, one_ready), door(path) as (two, two_ready):
        turns: dict[int, list[int]] = {0: [], 1: []}
        for index, remote in enumerate((one, two)):
            plain = remote._hand_out

            def note(events: Any, index: int = index, plain: Any = plain) -> None:
                turns[index].append(len(events))
                plain(events)

            remote._hand_out = note  # type: ignore[method-assign]
        await one_ready.become(True)
        await two_ready.become(True)
        heard = [Heard() for _ in range(8)]
        for index, each in enumerate(heard):
            (one if index < 5 else two).submit(Order(max_tokens=4), each)
        await there(core, lambda: len(core.orders) == 8)
        await take_turns(core, 4, heard)
        assert turns == {0: [15, 5, 5, 10], 1: [9, 3, 3, 6]}


@in_loop
async def test_questions_are_answered_and_errors_keep_their_classes(path: Path) -> None:
    async with engine(path) as (_, core), door(path) as (remote, ready):
        await ready.become(True)
        core.turn()
        assert (await remote.status()).engine == {"turns": 1, "limit": None}
        assert (await remote.residency(["b"])).placements == {"b": "device"}
        assert await remote.warm("a", 5) == Warmed(False, 5, 2, 3)
        busy = await raises(TooManyRequestsError, remote.warm("busy", None))
        assert (busy.message, busy.metadata, busy.retry_after_s) == ("too many", {"limit": "8"}, 3.5)
        gone = await raises(ContextNotFoundError, remote.warm("gone", None))
        assert gone.metadata == {"context": "gone"}
        await remote.changed("a")
        assert core.changes == ["a"]
        slow = asyncio.ensure_future(remote.warm("slow", None))
        await there(core, lambda: "warm began" in core.changes)
        slow.cancel()
        await there(core, lambda: "warm was given up" in core.changes)


@in_loop
async def test_refusals_stops_and_cancels_cross(path: Path) -> None:
    async with engine(path) as (_, core), door(path) as (remote, ready):
        await ready.become(True)
        refused, broken, stopped, cancelled = Heard(), Heard(), Heard(), Heard()
        remote.submit(Order(method="none"), refused)
        assert await refused.end() == Fails("METHOD_UNSUPPORTED", "no such method", {"method": "none"}, 2.5)
        remote.submit(Order(method="broken"), broken)
        end = await broken.end()
        assert isinstance(end, Fails)
        assert end.reason == "INTERNAL"
        assert end.message == "ZeroDivisionError: "
        handle, other = remote.submit(Order(), stopped), remote.submit(Order(context="x"), cancelled)
        await there(core, lambda: len(core.orders) == 2)
        core.turn()
        await stopped.wait_for(lambda: stopped.calls)
        handle.stop(0, 1)
        other.cancel()
        other.cancel()
        await there(core, lambda: len(core.cancelled) == 1)
        said = len(cancelled.calls)
        await remote.status()  # so the stop is there
        core.turn()
        assert await stopped.end() == Ends(0, "stop", 1, 7, TIMES, {"keys": 3})
        assert len(cancelled.calls) == said
        handle.cancel()


@in_loop
async def test_while_it_starts_doors_are_told_the_phase(path: Path) -> None:
    async with door(path) as (remote, ready):  # before there is an engine at all
        await raises(NotReadyError, remote.facts())
        host = await asyncio.to_thread(EngineHost, path)
        try:
            host.say("load weights: 1 of 2 GB")
            async with asyncio.timeout(60):
                while remote.phase == "begin":
                    await asyncio.sleep(0)
            error = await raises(NotReadyError, remote.status())
            assert error.metadata == {"phase": "load weights: 1 of 2 GB"}
            heard = Heard()
            remote.submit(Order(), heard).cancel()
            remote.submit(Order(), heard)
            assert await heard.end() == event_of_error(error)
            assert len(heard.calls) == 1
            await asyncio.to_thread(host.open, FakeCore(host.loop))
            await ready.become(True)
        finally:
            await asyncio.to_thread(host.close, event_of_error(ShuttingDownError("it ends")))
        await ready.become(False)


@in_loop
async def test_an_engine_that_ends_says_why_and_the_next_one_goes_on(path: Path) -> None:
    heard, later = Heard(), Heard()
    async with door(path) as (remote, ready):
        async with engine(path) as (_, core):
            await ready.become(True)
            remote.submit(Order(), heard)
            slow = asyncio.ensure_future(remote.warm("slow", None))
            await there(core, lambda: len(core.orders) == 1)
        assert await heard.end() == Fails("SHUTTING_DOWN", "it ends", {})
        await raises(ShuttingDownError, slow)
        async with engine(path) as (_, core):
            await ready.become(True)
            remote.submit(Order(max_tokens=1), later)
            await there(core, lambda: len(core.orders) == 1)
            core.turn()
            assert isinstance(await later.end(), Ends)


class Raw:
    """A door that says what it likes."""

    def __init__(self, path: Path) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 4)
        self.socket.setsockopt(zmq.LINGER, 0)  # where a test fails, what is left to be sent holds nobody up
        self.socket.connect(f"ipc://{path}")

    async def ask(self, *words: bytes) -> Any:
        self.socket.send_multipart(words)
        return await self.read()

    async def read(self) -> Any:
        assert await asyncio.to_thread(self.socket.poll, 60_000)
        return frames.decode_from_engine(self.socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


@in_loop
async def test_garbage_and_other_versions_are_refused_and_harm_nobody(path: Path) -> None:
    async with engine(path) as (_, core), door(path) as (remote, ready):
        await ready.become(True)
        heard = Heard()
        remote.submit(Order(max_tokens=2), heard)
        await there(core, lambda: len(core.orders) == 1)
        raw = Raw(path)
        for words in ([b""], [b"\xc1"], [b"{"], [b"a", b"b"], [frames.encode(["hello", "x"])]):
            assert isinstance(await raw.ask(*words), frames.Unknown), words
        assert isinstance(await raw.ask(frames.encode(frames.Alive())), frames.Unknown)
        refusal = await raw.ask(frames.encode(["hello", 99, 1, 1, "of another version"]))
        assert isinstance(refusal, frames.Closing)
        assert isinstance(error_of_event(refusal.error), InternalError)
        assert "version 99" in refusal.error.message
        assert isinstance(await raw.ask(frames.encode(frames.Hello(frames.VERSION, 1, 1))), frames.Welcome)
        assert isinstance(await raw.ask(frames.encode(["submit", 1])), frames.Unknown)
        assert isinstance(await raw.ask(frames.encode(frames.Alive())), frames.Unknown)
        raw.close()
        core.turn()
        core.turn()
        assert isinstance(await heard.end(), Ends)


@in_loop
async def test_a_door_that_does_not_read_is_given_up_and_told_so(path: Path) -> None:
    async with engine(path, Patience(turns=8)) as (_, core), door(path) as (remote, ready):
        await ready.become(True)
        raw, heard = Raw(path), Heard()
        assert isinstance(await raw.ask(frames.encode(frames.Hello(frames.VERSION, 1, 1))), frames.Welcome)
        hung = Order(context="hung", prompt=[1])
        for number in range(50):
            raw.socket.send(frames.encode(frames.Submits(number, hung)))
        remote.submit(Order(), heard)
        await there(core, lambda: len(core.orders) == 51)
        turns = 0
        while not core.cancelled:  # the socket's own buffers hold some, too
            core.turn()
            turns += 1
            await heard.wait_for(lambda: len(heard.calls) == turns)  # noqa: B023
        assert core.cancelled == [hung] * 50
        raw.socket.send(frames.encode(frames.Alive()))
        while isinstance(message := await raw.read(), frames.Turn):
            if not raw.socket.poll(0):
                raw.socket.send(frames.encode(frames.Alive()))
        assert message == frames.Unknown("it did not read what it was sent")
        raw.socket.send(frames.encode(frames.Hello(frames.VERSION, 1, 2)))
        while not isinstance(answer := await raw.read(), frames.Welcome):  # one for every sign of life
            assert answer == message
        raw.close()


@in_loop
async def test_a_door_that_is_told_so_ends_its_requests_and_goes_on(path: Path) -> None:
    async with engine(path) as (host, core), door(path) as (remote, ready):
        await ready.become(True)
        heard, later = Heard(), Heard()
        remote.submit(Order(), heard)
        await there(core, lambda: len(core.orders) == 1)
        (peer,) = host._peers.values()
        host.loop.call_soon_threadsafe(host._drop, peer.address, "of this test")
        end = await heard.end()
        assert isinstance(end, Fails)
        assert isinstance(error_of_event(end), EngineCrashedError)
        assert end.retry_after_s == RETRY_S
        assert "of this test" in end.message
        await ready.become(True)
        remote.submit(Order(max_tokens=1), later)
        await there(core, lambda: len(core.orders) == 2)
        core.turn()
        assert isinstance(await later.end(), Ends)


@in_loop
async def test_a_door_that_leaves_or_is_silent_ends_with_its_requests(path: Path) -> None:
    silent: list[int] = []
    host = await asyncio.to_thread(EngineHost, path, silent.append, Patience(silent_s=0.01))
    core = FakeCore(host.loop)
    await asyncio.to_thread(host.open, core)
    raw = Raw(path)
    await raw.ask(frames.encode(frames.Hello(frames.VERSION, 77, 1)))
    raw.socket.send(frames.encode(frames.Submits(1, Order())))
    await there(core, lambda: len(core.cancelled) == 1)
    async with asyncio.timeout(60):
        while not silent:
            await asyncio.sleep(0)
    assert silent[0] == 77
    await asyncio.to_thread(host.close, event_of_error(ShuttingDownError("it ends")))
    raw.close()


@in_loop
async def test_no_door_is_silent_while_the_engine_starts(path: Path) -> None:
    silent: list[int] = []
    host = await asyncio.to_thread(EngineHost, path, silent.append, Patience(silent_s=0.0))

    async def silent_ones() -> list[int]:
        host._look_round()
        return silent

    raw = Raw(path)
    await raw.ask(frames.encode(frames.Hello(frames.VERSION, 77, 1)))
    assert await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(silent_ones(), host.loop)) == []
    await asyncio.to_thread(host.open, FakeCore(host.loop))
    assert 77 in await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(silent_ones(), host.loop))
    await asyncio.to_thread(host.close, event_of_error(ShuttingDownError("it ends")))
    raw.close()


@in_loop
async def test_an_engine_that_says_nothing_counts_as_dead(path: Path) -> None:
    async with engine(path) as (host, core), door(path, silent_s=0.5) as (remote, ready):
        await ready.become(True)
        heard, later = Heard(), Heard()
        remote.submit(Order(), heard)
        await there(core, lambda: len(core.orders) == 1)
        goes_on = asyncio.Event()
        loop = asyncio.get_running_loop()
        release = threading.Event()
        host.loop.call_soon_threadsafe(lambda: (loop.call_soon_threadsafe(goes_on.set), release.wait(60)))
        await goes_on.wait()
        end = await heard.end()
        assert isinstance(end, Fails)
        assert end.reason == "ENGINE_CRASHED"
        release.set()
        await ready.become(True)
        await there(core, lambda: len(core.cancelled) == 1)  # at the second hello
        remote.submit(Order(max_tokens=1), later)
        await there(core, lambda: len(core.orders) == 2)
        core.turn()
        assert isinstance(await later.end(), Ends)


STREAMS = 64


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.serving.link_process", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


async def line(child: subprocess.Popen[str]) -> str:
    return (await asyncio.to_thread(child.stdout.readline)).strip()


@in_loop
async def test_streams_of_an_engine_that_is_killed_end_with_a_true_error(path: Path) -> None:
    async with door(path) as (one, one_ready), door(path) as (two, two_ready):
        for _ in range(3):
            with process("engine", path) as child:
                assert await line(child) == "there"
                await one_ready.become(True)
                await two_ready.become(True)
                heard = [Heard() for _ in range(STREAMS)]
                for number, each in enumerate(heard):
                    (one if number % 2 else two).submit(Order(), each)
                for each in heard:
                    await each.wait_for(lambda: any(isinstance(event, Says) for event in each.events))  # noqa: B023
                question = asyncio.ensure_future(one.warm("slow", None))
                await one.status()
                child.send_signal(signal.SIGKILL)
                for each in heard:
                    end = await each.end()
                    assert isinstance(end, Fails)
                    assert (end.reason, end.retry_after_s) == ("ENGINE_CRASHED", 5.0)
                    tokens = [
                        token for event in each.events if isinstance(event, Says) for token in event.token_ids
                    ]
                    assert tokens == list(range(len(tokens)))
                with pytest.raises(Exception, match="the engine ended"):
                    await question
                refused = Heard()
                one.submit(Order(), refused)
                end = await refused.end()
                assert isinstance(end, Fails)
                assert (end.reason, end.metadata) == ("NOT_READY", {"phase": "start the engine again"})


@in_loop
async def test_requests_of_a_door_that_is_killed_end_and_others_go_on(path: Path) -> None:
    async with engine(path) as (_, core), door(path) as (remote, ready):
        await ready.become(True)
        heard = Heard()
        remote.submit(Order(context="of another", max_tokens=2000), heard)
        await there(core, lambda: len(core.orders) == 1)
        core.run(0.001)
        with process("door", path, STREAMS) as child:
            assert (await line(child), await line(child)) == ("there", "speaks")
            child.send_signal(signal.SIGKILL)
            await there(core, lambda: len(core.cancelled) == STREAMS)
        assert {order.context for order in core.cancelled} == {"of a process"}
        assert isinstance(await heard.end(), Ends)
        said = [token for event in heard.events if isinstance(event, Says) for token in event.token_ids]
        assert said == list(range(2000))
