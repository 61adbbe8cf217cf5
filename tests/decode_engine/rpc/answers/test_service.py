"""Generations of the real server, over a toy model and really stored contexts."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from decode_engine.errors import PromptTooLongError
from decode_engine.orders.events import Waits
from decode_engine.rpc.answers.answering import Inbox
from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from index_store.errors import InvalidArgumentError
from index_store.methods.presets import get_method
from tests.decode_engine.conftest import MAX_POSITIONS, Library
from tests.support.serving.service import LONG, leases, wait_until


def test_tokens_equal_those_of_the_runner(server: DecodeServer, client: Client, lamp: str) -> None:
    prompt = list(b"Who lit the lamp?")
    backend = server.backend
    with backend.arena.acquire(backend.store, lamp.removeprefix("contexts/")) as resident:
        for name in ("full", "csattention"):
            session = backend.runner.start(resident, get_method(name).on(resident.manifest))
            logits = backend.runner.forward([session], [prompt])[0]
            expected = []
            for _ in range(12):
                expected.append(int(logits[-1].argmax()))
                logits = backend.runner.forward([session], [[expected[-1]]])[0]
            generation = client.generate(lamp, token_ids=prompt, max_tokens=12, method=name)
            assert [id_ for piece in generation for id_ in piece.token_ids] == expected


def test_the_last_message_has_the_summary(server: DecodeServer, client: Client, lamp: str) -> None:
    generation = client.generate(
        lamp, text="Who?", max_tokens=20, method="csattention+dropped", keep_ratio=0.1
    )
    tokens = [id_ for piece in generation for id_ in piece.token_ids]
    summary = generation.summary
    context = client.get_context(lamp)
    assert summary.finish_reason == "length"
    assert (summary.context_tokens, summary.prompt_tokens) == (context.token_count, 4)
    assert summary.completion_tokens == len(tokens) == 20
    assert (summary.method, summary.budget) == ("csattention+dropped", "10.00%")
    assert summary.remainder == "dropped"
    times, keys = summary.timings, summary.selection
    assert times.decode_steps == 19
    parts = (times.load_ns, times.queue_ns, times.prompt_ns, times.search_ns, times.attend_ns)
    assert all(0 < part < times.total_ns for part in parts)
    assert times.gather_ns == 0  # rows are read where they lie
    assert times.prompt_ns < times.first_token_ns < times.total_ns
    assert times.search_ns + times.gather_ns + times.attend_ns < times.total_ns
    # one searching layer of two KV heads, 4 prompt and 19 decode positions
    assert keys.searches > 0
    assert keys.keys_available == 2 * sum(context.token_count + position + 1 for position in range(23))
    assert keys.fraction_sparse == pytest.approx(keys.keys_attended / keys.keys_available)
    assert 0.1 < keys.fraction_sparse < 0.5
    assert keys.fraction_all == pytest.approx((1 + keys.fraction_sparse) / 2)


def test_without_a_limit_the_answer_fits_the_model(library: Library, client: Client) -> None:
    name = "contexts/" + library.prefill("almost-full", text="x" * (MAX_POSITIONS - 20))
    generation = client.generate(name, text="12345", temperature=1.0, seed=1)
    generation.read()
    assert generation.summary.completion_tokens <= 15
    assert generation.summary.max_tokens == 15
    for wanted, allowed in ((7, 7), (16, 15), (2**31 - 1, 15)):
        generation = client.generate(name, text="12345", max_tokens=wanted, temperature=1.0, seed=1)
        generation.read()
        assert generation.summary.max_tokens == allowed
    with pytest.raises(PromptTooLongError):
        client.generate(name, text="12345", min_tokens=16).read()


def test_sixteen_streams_at_once_equal_one_at_a_time(server: DecodeServer, client: Client, lamp: str) -> None:
    def run(number: int) -> str:
        method = ("full", "csattention", "csattention-paper")[number % 3]
        prompt = f"{number} " * (number + 1)
        return client.generate(
            lamp, text=prompt, max_tokens=16, method=method, temperature=0.5, seed=number
        ).read()

    alone = [run(number) for number in range(16)]
    loads = server.backend.arena.stats().loads
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(run, range(16)))
    assert together == alone
    wait_until(lambda: leases(server) == 0)
    assert server.backend.arena.stats().loads == loads, "the context is shared, not loaded per session"


def test_a_second_request_is_answered_while_a_long_first_one_runs(client: Client, lamp: str) -> None:
    with client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1) as long:
        first = iter(long)
        next(first)
        short = client.generate(lamp, text="Where?", max_tokens=5)
        assert short.read() is not None
        assert short.summary.completion_tokens <= 5
        next(first)
        with pytest.raises(InvalidArgumentError, match="no summary"):
            _ = long.summary


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_cancellation_that_comes_with_events_is_not_lost(timeout_s: float | None) -> None:
    """Or a request of a batch would go on, and wait for its items to be read by nobody."""

    async def run() -> None:
        inbox = Inbox()
        task = asyncio.ensure_future(inbox.wait(timeout_s))
        await asyncio.sleep(0.01)
        inbox.put([Waits("")])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
