"""A server that is told to stop ends in time, whatever it does, and every open stream is told why."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time

import pytest

from tests.decode_engine.conftest import Library
from tests.support.devices import nightly
from tests.support.serving.serve_process import Streams, serving

NIGHTLY = 50


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prepare ", *nightly("import libraries", "load weights")])
def test_a_server_that_starts_ends_at_once(library: Library, lamp: str, phase: str) -> None:
    with serving(library) as server:
        server.wait_for_log(f"starting: {phase}")
        server.process.send_signal(signal.SIGTERM)
        server.check_end()


@pytest.mark.nightly
def test_streams_over_both_doors_are_told_why_they_end(library: Library, lamp: str) -> None:
    """By a signal that another thread takes, while the main thread sleeps and nothing else wakes it."""
    with serving(library, "--no-warm-up") as server:
        streams = Streams(server.wait_until_served(), library.model, lamp)
        streams.wait_until_begun()
        pid = server.process.pid
        others = [int(task) for task in os.listdir(f"/proc/{pid}/task") if int(task) != pid]
        assert ctypes.CDLL(None).syscall(234, pid, others[-1], int(signal.SIGTERM)) == 0  # tgkill, on x86-64
        server.check_end()
        streams.check_told()
    said = [entry["message"] for entry in server.logs if "POST /v1/completions" in entry["message"]]
    assert "SHUTTING_DOWN" in said[0]


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(NIGHTLY))
def test_it_ends_in_time_at_any_moment(library: Library, lamp: str, shelf: str, number: int) -> None:
    """While it starts, compiles, loads a context, reads prompts, streams, or does nothing."""
    draw = random.Random(number)
    doing = draw.choice(["starts", "loads", "prompts", "streams", "idles"])
    with serving(library, *(["--no-warm-up"] if doing != "starts" else [])) as server:
        if doing == "starts":
            time.sleep(draw.uniform(0.3, 8.0))
            server.process.send_signal(signal.SIGTERM)
            server.check_end()
            return
        ready = server.wait_until_served()
        streams = None
        if doing != "idles":
            prompt = "Who lit the lamp of the grey harbour? " * (60 if doing == "prompts" else 1)
            streams = Streams(ready, library.model, draw.choice([lamp, shelf]), prompt)
            if doing == "streams":
                streams.wait_until_begun()
        time.sleep(draw.uniform(0.0, 1.0))
        server.process.send_signal(signal.SIGTERM)
        server.check_end()
        if streams is not None and doing == "streams":
            streams.check_told()
