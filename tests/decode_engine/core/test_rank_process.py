"""A model that is divided among processes: what is said is what one process says, and all of them end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from decode_engine.errors import EngineCrashedError, NotReadyError
from decode_engine.rpc.client import Client, Keep
from index_store.errors import InvalidArgumentError, SparseKVError
from tests.decode_engine.conftest import Library
from tests.support.serving.listening import LOOPBACK, listeners
from tests.support.serving.serve_process import Server, serving
from tests.support.serving.service import answered
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

METHODS = ("full", "csattention")
PROMPTS = ("Who lit it?", "The keeper of the grey")
DIVIDED = ("--tensor-parallel", "2", "--doors", "1", "--no-warm-up")


@pytest.fixture(scope="module")
def context(library: Library) -> str:
    return f"contexts/{library.prefill('divided')}"


def tokens(client: Client, context: str, prompt: str, method: str, **options: object) -> list[int]:
    return answered(client, context, text=prompt, method=method, max_tokens=12, **options)[0]


def said(address: str, context: str) -> list[list[int]]:
    """Greedy tokens and drawn ones, of each method, and those of a prompt that continues nothing."""
    with Client(address) as client:
        found = [
            tokens(client, context, prompt, method, **drawn)
            for method in METHODS
            for prompt in PROMPTS
            for drawn in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7})
        ]
        return [*found, tokens(client, "", PROMPTS[0], "full", temperature=0.0)]


@pytest.fixture(scope="module")
def expected(library: Library, context: str) -> list[list[int]]:
    with serving(library, "--no-warm-up") as whole:
        return said(whole.wait_until_served()["address"], context)


@pytest.fixture(scope="module")
def divided(library: Library, context: str) -> Iterator[tuple[Server, str]]:
    with serving(library, *DIVIDED) as server:
        yield server, server.wait_until_served()["address"]


def ranks_of(pid: int) -> list[int]:
    """Processes below a server that are other ranks."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(folder.name))
    found, pending = [], [pid]
    while pending:
        pending += (below := parents.get(pending.pop(), []))
        for each in below:
            with suppress(OSError):
                if b"rank_process" in Path(f"/proc/{each}/cmdline").read_bytes():
                    found.append(each)
    return found


def test_it_says_what_one_process_says(
    divided: tuple[Server, str], expected: list[list[int]], context: str
) -> None:
    assert said(divided[1], context) == expected
    found = listeners(divided[0].process.pid)
    assert found
    assert set(found) <= LOOPBACK


def test_what_needs_all_heads_in_one_place_is_refused(divided: tuple[Server, str], context: str) -> None:
    with (
        Client(divided[1]) as client,
        pytest.raises(InvalidArgumentError, match="divided among GPUs"),
        client.generate(context, text="Who?", max_tokens=2, keep=Keep("kept")) as generation,
    ):
        generation.read()


def test_where_a_rank_dies_clients_are_told_and_all_begin_again(
    divided: tuple[Server, str], expected: list[list[int]], context: str
) -> None:
    server, address = divided
    (rank,) = ranks_of(server.process.pid)
    with Client(address) as client:
        with client.generate(context, text="Who?", method="full", max_tokens=2000) as generation:
            pieces = iter(generation)
            next(pieces)
            os.kill(rank, signal.SIGKILL)
            with pytest.raises(EngineCrashedError):
                for _ in pieces:
                    pass

        def again() -> bool:
            try:
                return tokens(client, context, PROMPTS[0], "full", temperature=0.0) == expected[0]
            except (NotReadyError, EngineCrashedError):
                return False

        wait_until(again, 120)
    (new,) = ranks_of(server.process.pid)
    assert new != rank


def test_a_rank_ends_with_its_engine_whatever_it_waits_for() -> None:
    program = "import threading, time; from decode_engine.core.rank_process import _end_with_engine\n"
    program += "threading.Thread(target=_end_with_engine).start(); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        process.stdin.close()  # as an engine's end does
        assert process.wait(120) == 0


def test_options_that_do_not_go_with_it_are_refused(library: Library) -> None:
    for changes in ({"doors": 0}, {"doors": 1, "placement": "hybrid"}, {"doors": 1, "weights": "int8"}):
        with pytest.raises(SparseKVError, match="--tensor-parallel 2"):
            library.config(tensor_parallel=2, **changes)
