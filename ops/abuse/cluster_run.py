"""Kills what a cluster consists of, under load, and holds it to the answers of a calm run.

    python ops/abuse/cluster_run.py --state .cluster --context contexts/ID --kills 50

A cluster that `ops/cluster up` has started runs on this machine. Each kill is SIGKILL of one process: an engine, the
replica that watches it, a worker, a front door, or (1 of 25) Ray's head. Ends with 1 where an answer was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from load import QUESTIONS, Ask, Load, Notes, Place, ask_grpc

KINDS = ("engine", "replica", "worker", "door")
_MARKS = {
    "engine": b"decode_engine\0serve",
    "worker": b"prefill_worker\0serve",
    "replica": b"ray::Engine",
    "door": b"ray::Door",
    "head": b"gcs/gcs_server",
}
_HEAD_EVERY = 25
_WAIT_S = 240.0


def below(pid: int) -> list[int]:
    """All processes that a process has started, and those that these have."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(folder.name))
    found, pending = [], [pid]
    while pending:
        more = parents.get(pending.pop(), [])
        found += more
        pending += more
    return found


def victims(state: Path, kind: str) -> list[int]:
    """The processes of a kind."""
    found = []
    for pid in below(int((state / "pid").read_text())):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if _MARKS[kind] in line:
                found.append(pid)
    return found


def middle_and_most(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """By kind of what was killed."""
    return {kind: [round(statistics.median(each), 2), round(max(each), 2)] for kind, each in seconds.items()}


def whole(state: Path, wanted: dict[str, int]) -> bool:
    """Whether as many of each kind run as there were."""
    return all(len(victims(state, kind)) >= count for kind, count in wanted.items())


def main() -> int:
    """Runs the kills, and says what clients saw, as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--context", required=True)
    parser.add_argument("--grpc", default="127.0.0.1:50051")
    parser.add_argument("--http", default="127.0.0.1:8000")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--askers", type=int, default=4)
    parser.add_argument(
        "--pause", type=float, default=3.0, help="seconds between a recovery and the next kill"
    )
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    place, notes = Place("cluster", given.grpc, given.http), Notes()
    asks = [Ask(given.context, question, method) for question in QUESTIONS for method in ("refined", "full")]
    expected = {ask: ask_grpc(place, ask) for ask in asks}
    load, draws = Load((place,), expected, notes, "reader", given.seed), random.Random(given.seed)
    load.start(given.askers, {})
    killed: Counter[str] = Counter()
    over_s: dict[str, list[float]] = {}
    again_s: dict[str, list[float]] = {}
    wanted = {kind: len(victims(given.state, kind)) for kind in _MARKS}
    for number in range(1, given.kills + 1):
        kind = "head" if number % _HEAD_EVERY == 0 else draws.choice(KINDS)
        if not (found := victims(given.state, kind)):
            notes.note_wrong(f"no {kind} runs to be killed")
            break
        os.kill(draws.choice(found), signal.SIGKILL)
        killed[kind] += 1
        begun = time.monotonic()
        while not load.check(place, draws.choice(asks), draws.choice(("grpc", "http"))):
            if time.monotonic() - begun > _WAIT_S:
                notes.note_wrong(f"no answer {_WAIT_S:g} s after a {kind} was killed")
                break
            time.sleep(0.1)
        over_s.setdefault(kind, []).append(time.monotonic() - begun)
        while not whole(given.state, wanted) and time.monotonic() - begun < _WAIT_S:
            time.sleep(0.2)
        again_s.setdefault(kind, []).append(time.monotonic() - begun)
        sys.stderr.write(f"{number}: {kind}, {over_s[kind][-1]:.1f} s to the next answer\n")
        time.sleep(given.pause)
    load.stop()
    told = {
        "killed": dict(killed),
        "answers": sum(notes.answers.values()),
        "failed": dict(notes.reasons),
        "wrong": notes.wrong[:20],
        "longest call": round(notes.longest_s, 1),
        "seconds to the next answer, median and longest": middle_and_most(over_s),
        "seconds until as many run": middle_and_most(again_s),
    }
    sys.stdout.write(json.dumps(told, indent=2) + "\n")
    return 1 if notes.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
