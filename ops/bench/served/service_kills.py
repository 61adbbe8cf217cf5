"""A service of all parts, killed at random moments under load: what is lost, and what is half there.

usage: python ops/bench/served/service_kills.py [--kills 100] [--seed 0] [--callers 4]

Starts `decode-engine serve --prefill --http-port` and a second `prefill-worker serve` with the reader over a new store.
Callers create contexts of 200 to 1,200 tokens, ask, keep sessions, label, cancel and delete, over gRPC and HTTP at
random, while one of the three processes (the server's own worker is one) is killed (SIGKILL) at a random moment, again
and again, and started anew. After every kill the callers pause between two calls, and it is checked:

- what was acknowledged is in the list, ready, with its labels and its parent; what was deleted or cancelled is not;
- every context on the disk is whole, byte by byte, and is one that somebody asked for;
- an answer that came to its end is the one that the context gave before; others end with an error;
- operations are all there; they end done, with a context, or cancelled where that was asked for.

Run it from the root of the repository.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.checks import CheckFailedError
from harness.report import reporting
from kills.callers import Caller, patiently
from kills.ports import Web
from kills.processes import service

from decode_engine.rpc.client import Client, ContextInfo
from index_store.errors import ContextNotFoundError
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest

LONGEST_PAUSE_S = 4.0


class Crowd:
    """Callers on threads of their own, which can be stopped between two calls. The first error ends all."""

    def __init__(self, callers: list[Caller]) -> None:
        self.callers = callers
        self.error: Exception | None = None
        self._changed = threading.Condition()
        self._paused = self._ended = False
        self._busy = len(callers)
        self._threads = [threading.Thread(target=self._run, args=[caller]) for caller in callers]
        for thread in self._threads:
            thread.start()

    def _run(self, caller: Caller) -> None:
        while True:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._paused or self._ended)
                if self._ended:
                    return
                self._busy += 1
            try:
                caller.act()
            except Exception as error:
                self.error = self.error or error
                self._ended = True

    def pause(self) -> None:
        """Returns when nobody calls. Raises what a caller raised."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._busy)
        if self.error is not None:
            raise self.error

    def go_on(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()


def main(
    kills: int = 100, seed: int = 0, callers: int = 4, chunk: int = 256, logs: Path | None = None
) -> None:
    """One line of figures; fails at the first thing that is wrong. logs: where processes log to, kept."""
    with tempfile.TemporaryDirectory() as made, reporting("service_kills", gpu=False) as report:
        folder = logs or Path(made)
        store = Store(Path(made) / "store", create=True)
        began = time.monotonic()
        with service(folder, store.path, chunk) as running:
            client = Client(running.address, timeout_s=60)
            web = Web(running.url)
            crowd = Crowd([Caller(number, seed, client, web) for number in range(callers)])
            moments, longest = Random(seed), 0.0
            try:
                for number in range(kills):
                    time.sleep(moments.uniform(0, LONGEST_PAUSE_S))
                    victim, killed = running.kill_one(moments), time.monotonic()
                    crowd.pause()
                    check(store, client, crowd.callers)
                    longest = max(longest, time.monotonic() - killed)
                    typer.echo(f"{number + 1}: killed the {victim}, all is there", err=True)
                    crowd.go_on()
                crowd.pause()
            finally:
                crowd.end()
            for caller in crowd.callers:
                caller.finish()
            check(store, client, crowd.callers)
        did = sum((caller.did for caller in crowd.callers), Counter[str]())
        broken = sum((caller.broken for caller in crowd.callers), Counter[str]())
        report.add(
            {
                "kills": kills,
                **{f"of_{name.replace(' ', '_')}": count for name, count in sorted(running.killed.items())},
                **{name.replace(" ", "_"): count for name, count in sorted(did.items())},
                **{f"{name}_broken_off": count for name, count in sorted(broken.items())},
                "contexts": len(store.list()),
                "longest_until_checked_s": longest,
                "seconds": time.monotonic() - began,
            }
        )


def check(store: Store, client: Client, callers: list[Caller]) -> None:
    """Raises CheckFailedError for what is lost, and for what is there and should not be."""
    listed = {found.display_name: found for found in patiently(lambda: _listed(client))}
    for caller in callers:
        caller.check(listed)
    known = set[str]().union(*(caller.titles() for caller in callers))
    for entry in store.entries():
        if not isinstance(entry, Manifest):
            raise CheckFailedError(f"context {entry.id} is damaged: {entry.error}")
        if entry.name not in known:
            raise CheckFailedError(f"{entry.name} ({entry.id}) is there, and should not be")
        try:
            problems = store.verify(entry.id)
        except ContextNotFoundError:
            raise CheckFailedError(f"{entry.name} ({entry.id}) vanished") from None
        if problems:
            raise CheckFailedError(f"{entry.name} ({entry.id}) is damaged: {problems[0]}")


def _listed(client: Client) -> list[ContextInfo]:
    return list(client.list_contexts())


if __name__ == "__main__":
    typer.run(main)
