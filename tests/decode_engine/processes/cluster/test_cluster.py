"""A cluster on Ray of the packaged reader: both APIs, a replica that is killed under load, and the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from decode_engine.errors import EngineCrashedError
from decode_engine.rpc.client import Client
from tests.support.waiting import wait_until

pytest.importorskip("ray")
pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[4]
QUESTION = "Who keeps the lamp?"


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "decode_engine.processes.cluster.command", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Cluster:
    state: Path
    address: str
    url: str


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, free_ports: tuple[int, int]) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "engine.toml").write_text('memory = "1GiB"\nwarm-up = false\n')
    listen, http = free_ports
    state = ["--state", str(folder / "state")]
    try:
        command(
            *("up", *state, "--store", str(folder / "store"), "--model", "reader", "--replicas", "2"),
            *("--objects", f"file://{folder / 'objects'}", "--engine-config", str(folder / "engine.toml")),
            *("--listen", f"127.0.0.1:{listen}", "--http-port", str(http)),
        )
        yield Cluster(folder / "state", f"127.0.0.1:{listen}", f"http://127.0.0.1:{http}")
    finally:
        command("down", *state)
        assert not (folder / "state" / "pid").exists()


@pytest.fixture(scope="module")
def free_ports() -> tuple[int, int]:
    from decode_engine.processes.cluster.command import _free_port

    return _free_port("127.0.0.1"), _free_port("127.0.0.1")


def engines(cluster: Cluster) -> list[int]:
    """Process ids of the engines."""
    found = []
    state = str(cluster.state.with_name("store")).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"decode_engine\0serve" in line and state in line:
            found.append(int(folder.name))
    return found


def answer(cluster: Cluster, context: str) -> str:
    with (
        Client(cluster.address, timeout_s=120) as client,
        client.generate(context, text=QUESTION, max_tokens=8, seed=5, temperature=1.0) as generation,
    ):
        return generation.read()


def test_a_replica_that_is_killed_under_load_costs_no_answer(cluster: Cluster) -> None:
    text = "The keeper of the lamp counts the ships of the grey harbour. " * 40
    with Client(cluster.address) as client:
        context = client.create_context(text, display_name="lamp").result().name
    expected = answer(cluster, context)
    ended, wrong, right = threading.Event(), [], []

    def ask() -> None:
        while not ended.is_set():
            try:
                found = answer(cluster, context)
            except EngineCrashedError:  # of an answer that had begun
                continue
            (right if found == expected else wrong).append(found)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    before = engines(cluster)
    assert len(before) == 2
    for pid in before:
        count = len(right)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda count=count: len(right) > count + 5, seconds=120)  # type: ignore[misc]
        wait_until(lambda: len(engines(cluster)) == 2, seconds=120)
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not set(before) & set(engines(cluster))


def test_both_doors_tell_of_the_same_context(cluster: Cluster) -> None:
    body = {"model": "reader", "prompt": QUESTION, "max_tokens": 8, "seed": 5, "context": "lamp"}
    reply = httpx.post(f"{cluster.url}/v1/completions", json={**body, "temperature": 1.0}, timeout=120)
    with Client(cluster.address) as client:
        assert reply.json()["choices"][0]["text"] == answer(cluster, client.find_context("lamp").name)


def test_engines_doors_and_ray_listen_on_loopback(cluster: Cluster) -> None:
    told = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    own = [line for line in told.splitlines() if re.search(r"gcs_server|raylet|decode_engine|ray::", line)]
    elsewhere = [line for line in own if "127.0.0.1" not in line]
    assert own
    assert not elsewhere, "\n".join(elsewhere)
