"""Servers under load while things break, by a seed; every answer is compared with those of a calm run.

usage: ops/chaos [--faults 1000] [--minutes 30] [--seed 1] [--out FILE]

A server with an engine and two doors, a worker beside it, and a second server of one process with a store of its own
share an object store in a folder. Clients of both doors ask, change labels, and have contexts made and deleted. First
nothing breaks: that says what the answers are. Then faults come from the seed, on every process at once: `kill -9`,
full disks, reads that fail or take long, torn writes, flipped bits in files, objects and what is read from them, lost
and silent connections, frozen processes, dead threads, no handles, memory that is refused, an object store that is
slow, throttled, cut off or loses its answers. A fault counts when it struck.

Then nothing breaks any more. It ends with 1 where an answer was wrong, what was acknowledged is lost, a call went
beyond its deadline or failed for no reason, a log has an error that no fault explains, a file is damaged or left over,
or memory, handles and threads have grown. `--faults 0` is a soak: the load alone for so many minutes.

Everything is on the loopback interface and in a folder of its own, and ends with the command.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from cable import Cable
from load import (
    DEADLINE_S,
    QUESTIONS,
    Ask,
    Load,
    Notes,
    Place,
    ask_grpc,
    finished,
    order,
    reason_of,
)
from processes import Figures, Kept, Log, Struck, children, frozen, killed, limited

from decode_engine.rpc.client import Client
from index_store.errors import SparseKVError
from index_store.store.catalog import Store

FAULTS = Path(__file__).resolve().parent / "faults"
STEADY, COMING = 4, 2
"""Documents that stay, and those that come and go."""
WORDS = 250
START_S = 300.0
RECOVERED_S = 240.0
_UNSTRUCK_S = 6.0
_GROWTH, _GROWN_BYTES, _GROWN_HANDLES = 1.3, 100 << 20, 24

INSIDE = ("full", "failing", "slow", "flipped", "torn", "memory", "thread")
OBJECTS = tuple(
    f"objects-{kind}" for kind in ("failing", "slow", "throttled", "unanswered", "flipped", "cut")
)
LANES: dict[str, tuple[str, ...]] = {
    "server": ("kill", "frozen", "thread"),
    "engine": ("kill", "kill", "kill", "frozen", "handles", "file size", *INSIDE, *OBJECTS),
    "door": (*("kill",) * 14, "frozen", "handles", *(each for each in INSIDE if each != "memory")),
    "worker": (*("kill",) * 12, "frozen", "handles", "file size", *INSIDE, *OBJECTS),
    "reader": (*("kill",) * 7, "frozen", "handles", "file size", *INSIDE, *OBJECTS),
    "wires": ("connections", "connections", "silence"),
    "disks": ("store", "copy", "object"),
}
"""Processes and places, and what happens to them: one thing at a time to each, all at once."""
_PAUSES = {"server": 3.0, "engine": 0.5, "reader": 0.5}
"""After what happens to those that take long to start, in times of their start, so that they serve most of the time."""


class Run:
    """Everything that runs, from start to end."""

    def __init__(self, folder: Path, seed: int, minutes: float) -> None:
        self.folder, self.seed = folder, seed
        self.end = time.monotonic() + 60 * minutes
        self.notes, self.log = Notes(), Log(folder / "log")
        self.notes.explained = self._explained
        self.stores = {name: folder / name for name in ("store", "copy")}
        self.bucket = folder / "objects"
        self.bucket.mkdir()
        (folder / "faults").mkdir()
        (folder / "tmp").mkdir()
        self.struck = Struck(folder / "faults", (*self.stores.values(), self.bucket))
        self.cables = {name: (Cable(), Cable()) for name in self.stores}
        self.places = {
            name: Place(name, *(each.address for each in cables)) for name, cables in self.cables.items()
        }
        self.faults: list[dict[str, Any]] = []
        self.happened: Counter[str] = Counter()
        self._lock, self._next, self._done = threading.Lock(), 0, threading.Event()
        self._damaged_until = self._failing_until = self._start_s = 0.0
        self.kept: dict[str, Kept] = {}

    def start(self) -> None:
        """Starts the processes, and waits until they serve."""
        begun = time.monotonic()
        environment = {
            "PYTHONPATH": f"{FAULTS}",
            "SPARSEKV_FAULTS": str(self.folder / "faults"),
            "TMPDIR": str(self.folder / "tmp"),
            "SPARSEKV_OBJECTS": self.bucket.as_uri(),
            "OMP_NUM_THREADS": "1",
        }
        for store in self.stores.values():
            Store(store, create=True)

        def serve(name: str, store: str, *options: str) -> None:
            def told(line: dict[str, Any]) -> None:
                grpc, web = self.cables[store]
                grpc.target, web.target = line["address"], line["url"].removeprefix("http://")

            command = [sys.executable, "-m", "decode_engine", "serve", "--store", str(self.stores[store])]
            command += ["--model", "reader", "--device", "cpu", "--listen", "127.0.0.1:0", "--http-port", "0"]
            command += [
                "--no-warm-up",
                "--threads",
                "1",
                "--memory",
                "24MiB",
                "--grace",
                "2",
                "--format",
                "json",
            ]
            command += ["--fetch-timeout", "20", "--max-waiting", "64", "--max-client-requests", "128"]
            self.kept[name] = Kept(name, [*command, *options], environment, self.log, told)

        serve("server", "store", "--doors", "2")
        serve("reader", "copy", "--doors", "0")
        worker = [sys.executable, "-m", "prefill_worker", "serve", "--store", str(self.stores["store"])]
        worker += ["--model", "reader", "--device", "cpu", "--format", "json"]
        self.kept["worker"] = Kept("worker", worker, environment, self.log)
        for each in self.kept.values():
            if not each.ready.wait(START_S):
                raise RuntimeError(
                    f"{each.name} does not start; its log: {self.log.file.read_text()[-3000:]}"
                )
        self._start_s = time.monotonic() - begun

    def pids(self, lane: str) -> list[int]:
        """Of the processes that run now."""
        own = self.kept["server"].pid
        if lane in ("engine", "door"):
            return children(own, f"{lane}_process".encode())
        pid = self.kept[lane].pid
        return [] if pid is None else [pid]

    def figures(self) -> dict[str, Figures]:
        """Of all processes; the larger of the doors'."""
        found = {}
        for lane in ("server", "engine", "door", "worker", "reader"):
            each = [Figures.of(pid) for pid in self.pids(lane)]
            found[lane] = max(each, key=lambda figures: figures.memory)
        return found

    def calm(self) -> tuple[dict[Ask, str], dict[int, str]]:
        """Has the documents made; what is answered about them when nothing breaks, by both servers alike."""
        names: dict[int, str] = {}
        place, copy = self.places["store"], self.places["copy"]
        with Client(place.grpc, timeout_s=START_S) as client:
            orders = {
                number: order(client, number, WORDS if number < STEADY else 60)
                for number in range(STEADY + COMING)
            }
            for number, operation in orders.items():
                names[number] = str(_persist(partial(finished, client, operation)))
        expected = {
            (ask := Ask(names[number], question, method)): _persist(partial(ask_grpc, place, ask))
            for number in names
            for question in QUESTIONS[: 4 if number < STEADY else 1]
            for method in ("full", "refined")
        }
        for ask, answer in expected.items():
            if (found := _persist(partial(ask_grpc, copy, ask))) != answer:
                self.notes.note_wrong(f"the copy says {found!r}, expected {answer!r}")
        return expected, {number: name for number, name in names.items() if number >= STEADY}

    def abuse(self, faults: int) -> None:
        """Has that many faults strike, or as many as do until the end."""
        lanes = [threading.Thread(target=self._lane, args=(lane,), daemon=True) for lane in LANES]
        for lane in lanes:
            lane.start()
        while time.monotonic() < self.end and self.count() < faults:
            time.sleep(0.5)
        self._done.set()
        for lane in lanes:
            lane.join(RECOVERED_S + 60)
        for pid in [
            pid for lane in ("server", "engine", "door", "worker", "reader") for pid in self.pids(lane)
        ]:
            self.struck.tell(pid, 0, "none", 0, 0)

    def count(self) -> int:
        """Faults that struck."""
        with self._lock:
            return len(self.faults)

    def _explained(self, reason: str) -> bool:
        """Whether faults of this moment may end a call for such a reason."""
        if reason in ("CONTEXT_CORRUPT", "OPERATION_CORRUPT"):
            return time.monotonic() < self._damaged_until
        return reason == "INTERNAL" and time.monotonic() < self._failing_until

    def _lane(self, lane: str) -> None:
        draws = random.Random(f"{self.seed} {lane}")
        while not self._done.is_set():
            kind = draws.choice(LANES[lane])
            seed, strength = draws.randrange(1 << 30), draws.random()
            with self._lock:
                self._next += 1
                number = self._next
            try:
                where = self._strike(lane, kind, number, seed, strength)
            except Exception as error:
                self.notes.note_wrong(f"fault {number}, {kind} of the {lane}: {error!r}")
                where = None
            if where is not None:
                with self._lock:
                    self.faults.append(
                        {"number": number, "lane": lane, "kind": kind, "where": where, "at": time.monotonic()}
                    )
                    self.happened[kind] += 1
                if lane not in ("wires", "disks"):
                    self._recover(lane, kind, number)
            pause_s = 0.5 if where is None else max(0.5, _PAUSES.get(lane, 0.0) * self._start_s)
            pause_s = 3.0 if lane in ("wires", "disks") else pause_s  # which need nobody to start again
            self._done.wait(pause_s * draws.uniform(0.5, 1.5))

    def _recover(self, lane: str, kind: str, number: int) -> None:
        """After a fault answers come again."""
        place = "copy" if lane == "reader" else "store"
        before, begun = self.notes.answers[place], time.monotonic()
        while self.notes.answers[place] < before + 2 and not self._done.is_set():
            if time.monotonic() - begun > RECOVERED_S:
                self.notes.note_wrong(
                    f"no answer in {RECOVERED_S:g} s after fault {number}, {kind} of the {lane}"
                )
                return
            time.sleep(0.1)

    def _strike(self, lane: str, kind: str, number: int, seed: int, strength: float) -> str | None:
        """Where the fault struck; None where it did not."""
        if lane == "wires":
            return self._disturb(kind, seed, strength)
        if lane == "disks":
            return self._flip(kind, seed)
        pids = self.pids(lane)
        if not pids:
            return None
        pid = pids[seed % len(pids)]
        if kind in ("thread", "memory", "handles"):
            self._failing_until = time.monotonic() + DEADLINE_S
        match kind:
            case "kill":
                happened = killed(pid)
            case "frozen":
                happened = frozen(pid, 3 * strength)
            case "handles":
                handles = Figures.of(pid).handles
                happened = limited(pid, resource.RLIMIT_NOFILE, handles + int(3 * strength), 1 + strength)
            case "file size":
                happened = limited(pid, resource.RLIMIT_FSIZE, int(4096 * strength), 1 + strength)
            case _:
                return self._tell(pid, kind, number, seed, strength)
        return f"{lane} {pid}" if happened else None

    def _tell(self, pid: int, kind: str, number: int, seed: int, strength: float) -> str | None:
        times = 1 if kind in ("torn", "thread") else 1 + int(5 * strength)
        if kind in ("flipped", "objects-flipped"):
            self._expect_damage()
        if not self.struck.tell(pid, number, kind, times, seed):
            return None
        end = time.monotonic() + _UNSTRUCK_S
        while time.monotonic() < end and (where := self.struck.numbers().get(number)) is None:
            time.sleep(0.1)
        if where is None:
            self.struck.tell(pid, number, "none", 0, 0)
            where = self.struck.numbers().get(number)
        return where

    def _expect_damage(self) -> None:
        self._damaged_until = max(self._damaged_until, time.monotonic() + DEADLINE_S + _UNSTRUCK_S)

    def _disturb(self, kind: str, seed: int, strength: float) -> str | None:
        name = ("store", "copy")[seed % 2]
        cable = self.cables[name][seed // 2 % 2]
        count = cable.pull() if kind == "connections" else cable.hold(2 * strength)
        return f"{count} of {name}" if count else None

    def _flip(self, kind: str, seed: int) -> str | None:
        """A bit of a file that lies there is another one for a while."""
        root = self.bucket if kind == "object" else self.stores[kind] / "contexts"
        files: list[Path] = []
        with suppress(FileNotFoundError):  # what others remove meanwhile
            files = sorted(path for path in root.rglob("*") if path.is_file() and ".tmp-" not in str(path))
        if not files:
            return None
        path, draws = files[seed % len(files)], random.Random(seed)
        with suppress(OSError), open(path, "r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return None
            at, bit = draws.randrange(size), 1 << draws.randrange(8)
            self._expect_damage()
            old = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([old[0] ^ bit]), at)
            self._done.wait(2.0)
            os.pwrite(file.fileno(), old, at)
            return str(path.relative_to(self.folder))
        return None


def _persist(do: Callable[[], Any]) -> Any:
    """What is done in the end: contexts come to the copy after a while."""
    end = time.monotonic() + START_S
    while True:
        try:
            return do()
        except SparseKVError as error:
            if time.monotonic() > end:
                raise RuntimeError(reason_of(error)) from error
            time.sleep(0.2)


def _failed(*arguments: str) -> str:
    """What a command of the store says that ends with another code than 0, else nothing."""
    command = [sys.executable, "-m", "index_store", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)
    return f"{done.stdout}{done.stderr}".strip() if done.returncode else ""


@contextmanager
def running(seed: int, minutes: float) -> Iterator[Run]:
    """A run whose processes and files are gone when it ends."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        run = Run(folder, seed, minutes)
        try:
            yield run
        finally:
            for each in run.kept.values():
                each.stop(30)
            for cables in run.cables.values():
                for cable in cables:
                    cable.close()


def main(
    faults: Annotated[int, typer.Option(help="That are to strike; 0: a soak.")] = 1000,
    minutes: Annotated[float, typer.Option(help="For all of them, at most.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 1,
    askers: Annotated[
        int, typer.Option(help="Clients that ask at once, beside those that change things.")
    ] = 6,
    out: Annotated[
        Path | None, typer.Option(help="Where faults are listed, a line of JSON each, and the log.")
    ] = None,
) -> None:
    """Servers under load while things break, by a seed."""
    begun = time.monotonic()
    with running(seed, minutes) as run:
        run.start()
        expected, comings = run.calm()
        load = Load(tuple(run.places.values()), expected, run.notes, "reader", seed)
        load.start(askers, comings)
        time.sleep(5.0)
        before = run.figures()
        if faults:
            run.abuse(faults)
        else:
            time.sleep(max(0.0, run.end - time.monotonic()))
        load.stop()
        check_end(run, load, expected, comings, before)
        if out is not None:
            lines = [json.dumps(each) for each in run.faults]
            out.write_text("\n".join([*lines, run.log.file.read_text()]))
    wrong = [*run.notes.wrong, *(f"no fault explains: {each}" for each in run.log.causeless)]
    told = {
        "seed": seed,
        "faults": run.count(),
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "kinds": dict(sorted(run.happened.items())),
        "killed": dict(Counter(each["lane"] for each in run.faults if each["kind"] == "kill")),
        "answers": dict(run.notes.answers),
        "reasons": dict(sorted(run.notes.reasons.items())),
        "longest_s": round(run.notes.longest_s, 1),
        "wrong": len(wrong),
    }
    typer.echo(json.dumps(told))
    for sentence, count in Counter(wrong).most_common(40):
        typer.echo(f"{count} times: {sentence}", err=True)
    if wrong:
        raise typer.Exit(1)


def check_end(
    run: Run, load: Load, expected: dict[Ask, str], comings: dict[int, str], before: dict[str, Figures]
) -> None:
    """Nothing breaks any more: everything is as it was, or as it was changed last."""
    steady = [ask for ask in expected if ask.context not in comings.values()]
    for place in run.places.values():
        for ask in steady:
            end = time.monotonic() + RECOVERED_S
            while not load.check(place, ask, "grpc"):
                if time.monotonic() > end:
                    run.notes.note_wrong(f"{place.name} does not answer about {ask.context} any more")
                    break
                time.sleep(0.5)
            load.check(place, ask, "http")
    for context, (acked, sent) in load.labels.items():
        with Client(run.places["store"].grpc, timeout_s=DEADLINE_S) as client:
            found = int(_persist(lambda: client.get_context(context).labels.get("n", "0")))  # noqa: B023
        if not acked <= found <= sent:
            run.notes.note_wrong(f"label {acked} was acknowledged and {sent} sent last, {found} is there")
    for lane, now in run.figures().items():
        for sentence in grown(before[lane], now):
            run.notes.note_wrong(f"of the {lane}: {sentence}")
    for each in run.kept.values():
        for sentence in stopped(each):
            run.notes.note_wrong(sentence)
    for name, store in run.stores.items():
        for sentence in check_store(store, run.bucket.as_uri()):
            run.notes.note_wrong(f"{name}: {sentence}")


def stopped(kept: Kept) -> Iterator[str]:
    """Ends a process; what is wrong with how it ends."""
    own = children(kept.pid, b"python")
    if not kept.stop(30):
        yield f"the {kept.name} did not end when it was told to"
    if left := [pid for pid in own if os.path.exists(f"/proc/{pid}")]:
        yield f"processes of the {kept.name} are left: {left}"


def grown(was: Figures, now: Figures) -> Iterator[str]:
    """What a process has more of than before."""
    if now.memory > _GROWTH * was.memory + _GROWN_BYTES:
        yield f"memory grew from {was.memory >> 20} to {now.memory >> 20} MiB"
    for what in ("handles", "threads"):
        if getattr(now, what) > getattr(was, what) + _GROWN_HANDLES:
            yield f"{what} grew from {getattr(was, what)} to {getattr(now, what)}"


def check_store(store: Path, objects: str) -> Iterator[str]:
    """What is wrong with a store that nobody uses, once the commands for that have cleaned it up."""
    for command in (("gc",), ("sync", "--objects", objects), ("verify", "--objects", objects)):
        if said := _failed(*command, "--store", str(store)):
            yield f"index-store {command[0]}: {said[-1500:]}"
    left = [path for path in store.rglob("*") if path.name.startswith((".tmp-", ".trash-"))]
    # The next of a context takes the place of what is known of it; what a queue's writers left goes after an hour.
    left = [path for path in left if path.parents[1].name != "objects" and path.parent.name != "jobs"]
    if left := [*left, *(store / "locks").iterdir()]:
        yield f"leftovers: {[str(path.relative_to(store)) for path in left[:10]]}"


if __name__ == "__main__":
    typer.run(main)
