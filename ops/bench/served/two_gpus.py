"""Two engines, one a GPU, behind one front door: what two give beside one, and what becomes of contexts that move.

usage: python ops/bench/served/two_gpus.py --folder DIR [--tokens 131072] [--contexts 2] [--streams 4]
       python ops/bench/served/two_gpus.py --model reader --device cpu --tokens 4096 --small-tokens 256

Regime: `8b` is a model of Llama-3.1-8B's shape with random weights (`first_minute.py`). `--contexts` contexts for each
engine are prefilled first, those of both beside each other, into one store. Engines are `decode-engine serve` with
their defaults, each with one GPU to see and the cores that are near it; the front door is `ops/cluster front`.
Clients are processes of their own and ask by gRPC, greedy, after a round that is not counted.

- `rate`: tokens/s of `--streams` streams on the contexts of one engine, asked of it alone (`direct`), through a front
  door before it alone (`one`), and of twice the streams on all contexts through one before both (`two`). Names are
  chosen by which the rule gives each engine its own contexts. `over_one` of `two` has the bar 1.9.
- `divided`: one server whose model is divided among both GPUs (`serve --tensor-parallel 2`), asked the same by one
  stream and by `--streams`, beside one engine alone: `over_one` is how many times its tokens/s, `alike` the share of
  tokens, from the beginning of each answer, that are the engine's. Not a replacement: it is for models that do not fit.
- `moved`: seconds to the first token of a context that the other engine held, cold and again, and whether its answer is
  the other engine's. Its files are in the page cache.
- `zipf`: `--requests` requests for `--small` contexts of the packaged reader by Zipf's law with exponent 1, each engine
  with memory for a third of them: the share that finds its context in memory, by the front door (`routed`) and when
  each goes to an engine at random (`random`). A quarter of as many requests that are not counted come before.

One JSON line per figure; the exit code is 1 when something fails, or with --bars when the bar is missed.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from first_minute import write_model, write_text
from harness.doors import Ask, Asked, Heard
from harness.report import CheckFailedError, Report, failure, reporting
from harness.served import Shelf
from served_path import figures

from decode_engine.processes.cluster.near import cores_near
from decode_engine.rpc.client import Client
from decode_engine.rpc.routing.router import order_of
from index_store.store.catalog import Store

BAR = 1.9
_WARM_UP = 16
_METHOD = "refined"
_START_S = 240.0
_HELD = 3
"""Of the small contexts an engine's memory has room for one of so many."""
_ASKERS = 8


@dataclass(frozen=True)
class Engine:
    """address: of gRPC. http: its port. cores: how many it runs on."""

    address: str
    http: str
    cores: int

    def told(self, name: str) -> str:
        """As an option of front doors."""
        return f"{name}={self.address}/{self.http}"


def environment_of(gpu: int | None, device: str) -> dict[str, str]:
    """A process's that sees one GPU, or all of them."""
    seen = {} if gpu is None or device != "cuda" else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return {**os.environ, "NCCL_NVLS_ENABLE": "0", **seen}


@contextmanager
def serving(
    gpu: int | None, store: Path, model: str, device: str, log: Path, *options: str
) -> Iterator[Engine]:
    """An engine on a GPU, or on all of them. Raises CheckFailedError where it does not start."""
    environment = environment_of(gpu, device)
    near = cores_near(environment) if device == "cuda" else None
    command = [sys.executable, "-m", "decode_engine", "serve", "--store", str(store), "--model", model]
    command += ["--device", device, "--listen", "127.0.0.1:0", "--http-port", "0", "--format", "json"]
    before = os.sched_getaffinity(0)
    with log.open("a") as errors:
        if near:
            os.sched_setaffinity(0, near)
        try:
            process = subprocess.Popen(
                [*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        finally:
            os.sched_setaffinity(0, before)
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise CheckFailedError(f"an engine did not start: {log.read_text()[-2000:]}")
            said = json.loads(line)
            yield Engine(said["address"], said["url"].rpartition(":")[2].strip("/"), len(near or before))
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


@contextmanager
def fronted(engines: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a front door before engines. Raises CheckFailedError where it does not start."""
    listen, http = (_free_port() for _ in range(2))
    command = [sys.executable, "-m", "decode_engine.processes.cluster.command", "front", "--one-store"]
    command += ["--listen", f"127.0.0.1:{listen}", "--http-port", str(http), "--grace", "1"]
    for each in engines:
        command += ["--engine", each]
    with log.open("a") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            until = time.monotonic() + _START_S
            with Client(f"127.0.0.1:{listen}") as client:
                while not client.is_serving():
                    if process.poll() is not None or time.monotonic() > until:
                        raise CheckFailedError(f"the front door did not start: {log.read_text()[-2000:]}")
                    time.sleep(0.1)
            yield f"127.0.0.1:{listen}"
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def names_for(own: Mapping[int, Sequence[str]]) -> list[str]:
    """Names of the two engines, such that the rule gives each its own contexts, whose ids are given."""
    for number in count():
        names = [f"a{number}", f"b{number}"]
        if all(order_of(id_, names)[0] == names[engine] for engine, ids in own.items() for id_ in ids):
            return names
    raise AssertionError("unreachable")


class Clients:
    """Processes that ask. answer: tokens of a stream."""

    def __init__(self, pool: ProcessPoolExecutor, processes: int, answer: int) -> None:
        self._pool, self._processes, self._answer = pool, processes, answer

    def heard(self, address: str, contexts: Sequence[str], streams: int, tokens: int) -> list[Heard]:
        """Of so many streams at once, which take the contexts in turns."""
        asks = [
            Ask(
                "grpc",
                address,
                f"contexts/{contexts[number % len(contexts)]}",
                {
                    "temperature": 0,
                    "max_tokens": tokens,
                    "method": _METHOD,
                    "text": f"\nChapter {number}. The",
                },
            )
            for number in range(streams)
        ]
        return Asked.at_once(self._pool, self._processes, asks).heard()

    def rate(self, address: str, contexts: Sequence[str], streams: int) -> dict[str, Any]:
        """Figures of a round after one that is not counted."""
        self.heard(address, contexts, streams, _WARM_UP)
        return figures(self.heard(address, contexts, streams, self._answer))


def rates(
    report: Report,
    clients: Clients,
    engines: Sequence[Engine],
    own: Mapping[int, Sequence[str]],
    streams: int,
    log: Path,
) -> None:
    """One engine, and two."""
    names = names_for(own)
    told = [engine.told(name) for engine, name in zip(engines, names, strict=True)]
    row = clients.rate(engines[0].address, own[0], streams)
    report.add({"figure": "rate", "way": "direct", "engines": 1, "streams": streams, **row})
    with fronted(told[:1], log) as address:
        one = clients.rate(address, own[0], streams)
    report.add({"figure": "rate", "way": "one", "engines": 1, "streams": streams, **one})
    with fronted(told, log) as address:
        every = [id_ for pair in zip(*own.values(), strict=True) for id_ in pair]
        two = clients.rate(address, every, 2 * streams)
    rate, of_one = two.get("tokens_per_s"), one.get("tokens_per_s")
    if not rate or not of_one:
        raise CheckFailedError(f"streams did not run beside each other: {one} and {two}")
    ratio = rate / of_one
    missed = [f"two engines give {ratio:.2f} of one, bar {BAR}"] if ratio < BAR else []
    line = {"figure": "rate", "way": "two", "engines": 2, "streams": 2 * streams, **two, "over_one": ratio}
    report.add(line, *missed)


def answers(
    clients: Clients, address: str, ids: Sequence[str], streams: int
) -> tuple[dict[str, Any], list[Heard]]:
    """Figures of streams, and what they heard."""
    row = clients.rate(address, ids, streams)
    return row, clients.heard(address, ids, streams, _WARM_UP)


def divided(
    report: Report,
    clients: Clients,
    address: str,
    ids: Sequence[str],
    alone: Mapping[int, tuple[dict[str, Any], list[Heard]]],
) -> None:
    """A server of both GPUs beside what one engine gave by numbers of streams."""
    for streams, (one, expected) in alone.items():
        row, heard = answers(clients, address, ids, streams)
        pairs = [
            same
            for found, told in zip(heard, expected, strict=True)
            for same in zip(found.token_ids, told.token_ids, strict=False)
        ]
        line = {"figure": "divided", "gpus": 2, "streams": streams, **row}
        line |= {"alike": sum(found == told for found, told in pairs) / max(1, len(pairs))}
        rate, of_one = row.get("tokens_per_s"), one.get("tokens_per_s")
        report.add(line | ({"over_one": rate / of_one, "one": of_one} if rate and of_one else {}))


def moved(report: Report, clients: Clients, engines: Sequence[Engine], context: str, log: Path) -> None:
    """A context of the first engine, asked of a front door that the second one alone is behind."""
    (expected,) = clients.heard(engines[0].address, [context], 1, _WARM_UP)
    with fronted([engines[1].told("b")], log) as address:
        (cold,), (warm,) = (clients.heard(address, [context], 1, _WARM_UP) for _ in range(2))
    if any(one.error for one in (expected, cold, warm)):
        raise CheckFailedError(f"a moved context: {expected.error or cold.error or warm.error}")
    line = {"figure": "moved", "first_s": cold.first_s, "again_s": warm.first_s}
    report.add(line | {"held_s": expected.first_s, "same": cold.token_ids == expected.token_ids})


def zipf(report: Report, folder: Path, device: str, small: int, tokens: int, requests: int) -> None:
    """Hits of routing by context."""
    store = folder / "small"
    begin = time.monotonic()
    if not store.exists():
        shelf = Shelf(store, [_METHOD], device=device)
        for number in range(small):
            shelf.add_slice(f"small{number}", tokens, number, small)
    manifests = Store(store).list()
    made_s = time.monotonic() - begin
    each = max(manifest.kv_bytes + manifest.index_bytes for manifest in manifests)
    room = str(each * len(manifests) // _HELD)
    options = [
        "--device-memory" if device == "cuda" else "--memory",
        room,
        "--placement",
        "device",
        "--no-warm-up",
    ]
    options = options if device == "cuda" else [*options[:2], *options[4:]]
    log, ids = folder / "small.log", sorted(manifest.id for manifest in manifests)
    weights = [1 / rank for rank in range(1, len(ids) + 1)]
    draws = random.Random(5)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(serving(gpu, store, "reader", device, log, *options)) for gpu in range(2)
        ]
        address = stack.enter_context(fronted([e.told(f"engine-{n}") for n, e in enumerate(engines)], log))
        for way in ("routed", "random"):
            asked = [draws.choices(ids, weights, k=each) for each in (requests // 4, requests)]
            addresses = [address] if way == "routed" else [engine.address for engine in engines]
            before: Counter[str] = Counter()
            begin = time.monotonic()
            for some in asked:
                before, begin = Counter(_loads(engines)), time.monotonic()
                _ask_each(addresses, some, draws)
            seconds = time.monotonic() - begin
            found = Counter(_loads(engines)) - before
            total = found["hits"] + found["loads"]
            line: dict[str, Any] = {
                "figure": "zipf",
                "way": way,
                "contexts": len(ids),
                "requests": requests,
                "held": _HELD,
            }
            line |= {"hit_share": found["hits"] / max(1, total), "loads": found["loads"], "counted": total}
            report.add(line | {"made_s": made_s, "requests_per_s": requests / seconds})


def _loads(engines: Sequence[Engine]) -> dict[str, int]:
    """What all engines found in memory and loaded until now."""
    found: Counter[str] = Counter()
    for engine in engines:
        with Client(engine.address) as client:
            status = client.server_status()
        found += Counter(hits=status.context_hits, loads=status.context_loads)
    return found


def _ask_each(addresses: Sequence[str], ids: Sequence[str], draws: random.Random) -> None:
    """A token about each context, by a few askers. Raises what a call raises."""
    with ExitStack() as stack, ThreadPoolExecutor(_ASKERS) as pool:
        clients = [stack.enter_context(Client(address)) for address in addresses]
        chosen = [draws.choice(clients) for _ in ids]

        def ask(client: Client, id_: str) -> None:
            with client.generate(f"contexts/{id_}", text="Who?", max_tokens=1, method=_METHOD) as heard:
                heard.read()

        list(pool.map(ask, chosen, ids))


def prefill(folder: Path, model: str, device: str, tokens: int, numbers: Sequence[int]) -> None:
    """Makes the contexts of these numbers, in this process."""
    shelf = Shelf(folder / "store", [_METHOD], model=model, device=device)
    for number in numbers:
        write_text(file := folder / f"text{number}.txt", tokens, number * tokens)
        begin = time.monotonic()
        shelf.add(f"text{number}", file.read_text())
        typer.echo(f"context {number} made in {time.monotonic() - begin:.1f} s", err=True)


def prefill_all(folder: Path, model: str, device: str, tokens: int, contexts: int) -> None:
    """Each engine's contexts by a process on its GPU. Raises CheckFailedError."""
    own = [range(gpu * contexts, (gpu + 1) * contexts) for gpu in range(2)]
    started = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, "--folder", str(folder), "--model", model, "--device", device),
                *("--tokens", str(tokens), "--prefill", ",".join(map(str, numbers))),
            ],
            env=environment_of(gpu, device),
        )
        for gpu, numbers in enumerate(own)
    ]
    if any([process.wait() for process in started]):  # noqa: C419 - all are waited for
        raise CheckFailedError("a prefill failed")


def main(
    folder: Annotated[
        Path | None,
        typer.Option(help="For model and stores, used again if there; a temporary one if not given."),
    ] = None,
    model: Annotated[str, typer.Option(help="A model, or 8b for a random one of that shape.")] = "8b",
    layers: Annotated[int, typer.Option(help="Of 8b.")] = 32,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    tokens: Annotated[int, typer.Option(help="Of a context.")] = 131072,
    contexts: Annotated[int, typer.Option(help="Of each engine.")] = 2,
    streams: Annotated[int, typer.Option(help="Of one engine.")] = 4,
    answer: Annotated[int, typer.Option(help="Tokens of a stream.")] = 384,
    processes: Annotated[int, typer.Option(help="Of clients.")] = 4,
    small: Annotated[
        int, typer.Option(help="Contexts that are asked for by Zipf's law; 0: not tried.")
    ] = 200,
    small_tokens: Annotated[int, typer.Option(help="Of each of them.")] = 1024,
    requests: Annotated[int, typer.Option(help="For them.")] = 800,
    bars: Annotated[bool, typer.Option("--bars", help="Fail when the bar is missed.")] = False,
    prefilled: Annotated[str, typer.Option("--prefill", hidden=True)] = "",
) -> None:
    """Reports rates of one engine and two, first tokens of a moved context, and hits."""
    if folder is not None and prefilled:
        prefill(folder, model, device, tokens, [int(number) for number in prefilled.split(",")])
        return
    with (
        reporting("two_gpus", bars, gpu=device == "cuda") as report,
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        try:
            if model == "8b":
                model = str(place / "model")
                if not Path(model).exists():
                    write_model(Path(model), layers, device)
            written = time.monotonic()
            if not (place / "store").exists():
                Store(place / "store", create=True)
                prefill_all(place, model, device, tokens, contexts)
            line = {"figure": "made", "model_s": written - begin, "contexts_s": time.monotonic() - written}
            store, log = place / "store", place / "serve.log"
            ids = {manifest.name: manifest.id for manifest in Store(store).list()}
            own = {
                gpu: [ids[f"text{number}"] for number in range(gpu * contexts, (gpu + 1) * contexts)]
                for gpu in range(2)
            }
            begin = time.monotonic()
            with ExitStack() as stack, ThreadPoolExecutor(2) as starting:
                made = [serving(gpu, store, model, device, log) for gpu in range(2)]
                engines = list(starting.map(lambda each: each.__enter__(), made))
                for each in made:
                    stack.push(each)
                line |= {"start_s": time.monotonic() - begin, "cores": [engine.cores for engine in engines]}
                report.add(line)
                clients = Clients(pool, processes, answer)
                try:
                    rates(report, clients, engines, own, streams, log)
                except Exception as error:
                    report.add({"figure": "rate", **failure(error)})
                moved(report, clients, engines, own[0][0], log)
                alone = {
                    count: answers(clients, engines[0].address, own[0], count)
                    for count in sorted({1, streams})
                }
            options = ["--tensor-parallel", "2", "--doors", "1"]
            with serving(None, store, model, device, log, *options) as both:
                divided(report, Clients(pool, processes, answer), both.address, own[0], alone)
        except Exception as error:  # the rest may well run
            report.add({"figure": "engines", **failure(error)})
        if small:
            try:
                zipf(report, place, device, small, small_tokens, requests)
            except Exception as error:
                report.add({"figure": "zipf", **failure(error)})


if __name__ == "__main__":
    typer.run(main)
