"""Clusters of several sizes beside one server, and one cluster that grows and shrinks; object store: moto's S3.

usage: python ops/bench/served/clusters.py [--replicas 1,2,4] [--rounds 3] [--clients 1,8] [--seconds 5]
       python ops/bench/served/clusters.py --growth [--most 4] [--contexts 64] [--tokens 256]

A server and a cluster of each size run at once, and are asked in turn, round by round: clients ask about
contexts at random, for 16 tokens each. `requests_s`, `first_p50_ms`, `first_p99_ms`: medians of the rounds.
`cpu_ms`: of cores, of all processes of the place, a request.
`--growth`: one cluster with one engine is asked by as many clients as four engines have sessions, and grows; then each
context is asked about once: `moved` are those that the first engine had and another one loads, `implied` those whose
first engine by the hash another one is. Then nothing is asked, until it is as small as before.
One JSON line per figure. Run it from the root of the repository; it needs `sparsekv[ray]`.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.report import CheckFailedError, Report, reporting
from harness.served import serving

from decode_engine.rpc.client import Client
from decode_engine.rpc.routing.router import order_of
from index_store.store.catalog import Store

ANSWER = 16
_ENGINE = 'memory = "1GiB"\nwarm-up = false\nthreads = 1\n'
_WAIT_S = 300.0


def free_port() -> int:
    """On loopback."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@contextmanager
def object_store() -> Iterator[str]:
    """The URL of an empty bucket of moto's S3, a process of its own."""
    port = free_port()
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + _WAIT_S
            while True:
                try:
                    bucket = urllib.request.Request(f"http://127.0.0.1:{port}/contexts", method="PUT")
                    urllib.request.urlopen(bucket).close()
                    break
                except OSError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.2)
            yield "s3://contexts/below"
        finally:
            process.terminate()


def ops(command: str, state: Path, *options: str) -> str:
    """What `ops/cluster` says."""
    words = [sys.executable, "-m", "decode_engine.processes.cluster.command", command, "--state", str(state)]
    done = subprocess.run([*words, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailedError(f"ops/cluster {command}: {done.stderr[-500:]}")
    return done.stdout


@contextmanager
def cluster(folder: Path, objects: str, replicas: int, *options: str) -> Iterator[str]:
    """The address of a cluster's gRPC."""
    folder.mkdir()
    (folder / "engine.toml").write_text(_ENGINE)
    address = f"127.0.0.1:{free_port()}"
    given = ["--store", str(folder / "store"), "--objects", objects, "--model", "reader", "--doors", "1"]
    given += ["--engine-config", str(folder / "engine.toml"), "--replicas", str(replicas)]
    given += ["--listen", address, "--http-port", str(free_port()), *options]
    try:
        ops("up", folder / "state", *given)
        yield address
    finally:
        ops("down", folder / "state")


def make_contexts(client: Client, count: int, tokens: int) -> list[str]:
    """Contexts of a worker, of texts that differ."""
    line = "The keeper of lighthouse {0} counts the ships of harbour {0} and writes them down. "
    texts = [(line.format(number) * (1 + tokens // 70))[:tokens] for number in range(count)]
    orders = [client.create_context(text, display_name=f"d{number}") for number, text in enumerate(texts)]
    return [order.result().name for order in orders]


def ask(client: Client, context: str) -> tuple[float, str]:
    """Seconds to the first token, and the tier in which the context was."""
    began = time.monotonic()
    with client.generate(
        context, text="Who counts?", max_tokens=ANSWER, min_tokens=ANSWER, explain=True, patience_s=60
    ) as answer:
        next(iter(answer))
        first = time.monotonic() - began
        answer.read()
    return first, answer.summary.explanation.tier if answer.summary.explanation else ""


def load(address: str, contexts: Sequence[str], clients: int, seconds: float) -> dict[str, float]:
    """Clients that ask one after another, each over a connection of its own."""
    firsts: list[float] = []
    until = time.monotonic() + seconds

    def run(number: int) -> None:
        draws = random.Random(number)
        with Client(address, timeout_s=_WAIT_S) as client:
            while time.monotonic() < until:
                firsts.append(ask(client, draws.choice(contexts))[0])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spread = statistics.quantiles(firsts, n=100)
    taken = time.monotonic() - began
    return {
        "requests_s": len(firsts) / taken,
        "first_p50_ms": spread[49] * 1e3,
        "first_p99_ms": spread[98] * 1e3,
    }


def cpu_s(pid: int) -> float:
    """Of a process, and of all that it and these have started and that run."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            own, _, rest = stat.read_text().partition(" ")
            fields = rest.rpartition(")")[2].split()
            parents[int(own)] = int(fields[1])
            ticks[int(own)] = int(fields[11]) + int(fields[12])
    found = 0
    for each, count in ticks.items():
        above = each
        while above and above != pid:
            above = parents.get(above, 0)
        found += count if above else 0
    return found / os.sysconf("SC_CLK_TCK")


def sizes(
    report: Report, replicas: str, rounds: int, clients: str, seconds: float, contexts: int, tokens: int
) -> None:
    """One server, and clusters of several sizes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        objects = stack.enter_context(object_store())
        (folder / "server.toml").write_text(_ENGINE)
        given = ["--objects", objects, "--prefill", "--config", str(folder / "server.toml"), "--doors", "0"]
        Store(folder / "store", create=True)
        server = stack.enter_context(serving(folder / "store", *given))
        places, pids = {"server": server.address}, {"server": server.pid}
        for count in map(int, replicas.split(",")):
            place = folder / f"cluster-{count}"
            places[place.name] = stack.enter_context(cluster(place, objects, count))
            pids[place.name] = int((place / "state" / "pid").read_text())
        with Client(places["server"]) as client:
            names = make_contexts(client, contexts, tokens)
        for address in places.values():
            wait_for(address, names)
        found: dict[tuple[str, int], list[dict[str, float]]] = {}
        for _ in range(rounds):
            for number in map(int, clients.split(",")):
                for name, address in places.items():
                    before = cpu_s(pids[name])
                    run = load(address, names, number, seconds)
                    run["cpu_ms"] = 1e3 * (cpu_s(pids[name]) - before) / run.pop("requests")
                    found.setdefault((name, number), []).append(run)
        for (name, number), runs in found.items():
            middle = {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}
            report.add({"place": name, "clients": number, **middle})


def wait_for(address: str, names: Sequence[str]) -> None:
    """Until all contexts came there from the object store, and were asked about twice, so that they are loaded."""
    until = time.monotonic() + _WAIT_S
    with Client(address, timeout_s=_WAIT_S) as client:
        while len({each.name for each in client.list_contexts()} & set(names)) < len(names):
            if time.monotonic() > until:
                raise CheckFailedError("contexts do not come from the object store")
            time.sleep(0.2)
        for name in (*names, *names):
            ask(client, name)


def growth(report: Report, most: int, contexts: int, tokens: int, stays_s: float) -> None:
    """From one engine to several, and back."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        objects, place = stack.enter_context(object_store()), folder / "cluster"
        options = ["--most-replicas", str(most), "--max-sessions", "2", "--down-after", str(stays_s)]
        address = stack.enter_context(cluster(place, objects, 1, *options))
        client = stack.enter_context(Client(address, timeout_s=_WAIT_S))
        names = make_contexts(client, contexts, tokens)
        wait_for(address, names)
        ending = threading.Event()

        def press() -> None:
            with Client(address, timeout_s=_WAIT_S) as own:
                while not ending.is_set():
                    ask(own, names[0])

        def add(**figures: Any) -> None:
            report.add(figures)

        began = time.monotonic()
        threads = [threading.Thread(target=press) for _ in range(2 * most)]
        for thread in threads:
            thread.start()
        steps = follow(place / "state", most, began)
        ending.set()
        for thread in threads:
            thread.join()
        add(what="grew", seconds={str(count): round(at, 1) for count, at in steps.items()})
        rest = names[1:]  # the first has several holders for a while
        implied = sum(order_of(key, engines(most))[0] != "engine-0" for key in map(key_of, rest))
        moved = sum(ask(client, name)[1] not in ("host", "device") for name in rest)
        add(what="1 to most", contexts=len(rest), moved=moved, implied=implied)
        began = time.monotonic()
        steps = follow(place / "state", 1, began)
        add(what="shrank", seconds={str(count): round(at, 1) for count, at in steps.items()})
        moved = sum(ask(client, name)[1] not in ("host", "device") for name in rest)
        add(what="most to 1", contexts=len(rest), moved=moved)


def engines(count: int) -> list[str]:
    """Their places."""
    return [f"engine-{number}" for number in range(count)]


def key_of(name: str) -> str:
    """What the rule takes for a context without a parent."""
    return name.removeprefix("contexts/")


def follow(state: Path, wanted: int, began: float) -> dict[int, float]:
    """By number of engines, when there were so many first, until there are as many as wanted."""
    seen: dict[int, float] = {}
    while wanted not in seen:
        count = len(json.loads(ops("status", state))["replicas"])
        seen.setdefault(count, time.monotonic() - began)
        if time.monotonic() - began > _WAIT_S + 120:
            raise CheckFailedError(f"there are {count} engines, expected {wanted}")
    return seen


def main(
    grows: Annotated[bool, typer.Option("--growth", help="One cluster that grows and shrinks.")] = False,
    replicas: Annotated[str, typer.Option(help="Of the clusters, comma-separated.")] = "1,2,4",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    clients: Annotated[str, typer.Option(help="That ask at once, comma-separated.")] = "1,8",
    seconds: Annotated[float, typer.Option(help="Of a round, a place and a number of clients.")] = 5.0,
    contexts: Annotated[int, typer.Option(min=2)] = 8,
    tokens: Annotated[int, typer.Option(min=64, help="Of a context.")] = 2048,
    most: Annotated[int, typer.Option(min=2, help="Engines that one grows to.")] = 4,
    stays: Annotated[float, typer.Option(help="Seconds that engines without work stay.")] = 20.0,
) -> None:
    """Clusters beside a server, or one that grows; a JSON line per figure."""
    with reporting("clusters", gpu=False) as report:
        if grows:
            growth(report, most, contexts, tokens, stays)
        else:
            sizes(report, replicas, rounds, clients, seconds, contexts, tokens)


if __name__ == "__main__":
    typer.run(main)
