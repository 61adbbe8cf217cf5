"""A store with many contexts: how long it takes to list, to filter, to find a beginning, to expire, and to start.

usage: python ops/bench/served/large_store.py [--contexts 10000]

One context of 300 tokens is prefilled; the others are its files under other ids and names, as hard links, with
manifests of their own that are sealed as the store seals them. Their digests are of other tokens, so that each has a
beginning of its own; what is read of them here is manifests alone. One in a hundred has expired.

One JSON line per figure: seconds in this process, of a store that was just opened (`cold`) and once more (`warm`), and
of a server's start until it takes calls, with its resident memory.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.report import CheckFailedError, Report, reporting
from harness.served import Shelf, serving

from index_store.family.prefixes import longest_beginning
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from index_store.store.description.context_id import continued_digests, first_digest
from index_store.store.description.manifest import MANIFEST_NAME, MANIFESTS, Manifest


def fill(folder: Path, contexts: int) -> Manifest:
    """Makes the store, and returns the first context."""
    one = Shelf(folder).add_slice("0", 300, 0, 1)
    store = Store(folder)
    source = store.folders.context(one.id)
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    first = first_digest(one.model, one.dtype, "", "")
    for number in range(1, contexts):
        id_ = hashlib.sha256(f"{one.id} {number}".encode()).hexdigest()
        target = store.folders.context(id_)
        for file in files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            if file.name != MANIFEST_NAME:
                os.link(source / file, target / file)
        tokens = [(number * 7 + place) % 250 for place in range(300)]
        ended = one.created_at - timedelta(hours=1) if number % 100 == 99 else None
        digests = continued_digests(first, tokens)
        made = replace(one, id=id_, name=str(number), expires_at=ended, prefix_digests=digests)
        (target / MANIFEST_NAME).write_bytes(MANIFESTS.render(made))
    return one


def main(contexts: Annotated[int, typer.Option(min=2, help="In the store.")] = 10_000) -> None:
    """Times of a large store; one JSON line for each."""
    with reporting("large_store", gpu=False) as report, tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        began = time.perf_counter()
        one = fill(folder, contexts)
        report.add({"case": "filled", "contexts": contexts, "seconds": time.perf_counter() - began})
        store = Store(folder)

        def timed(case: str, work: Callable[[], int], expected: int) -> None:
            for state in ("cold", "warm"):
                began = time.perf_counter()
                found = work()
                took = time.perf_counter() - began
                if found != expected:
                    raise CheckFailedError(f"{case}: {found} found, expected {expected}")
                report.add({"case": case, "state": state, "contexts": contexts, "seconds": took})

        first = first_digest(one.model, one.dtype, "", "")
        wanted = [(7 + place) % 250 for place in range(300)]
        timed("list", lambda: len(store.list()), contexts)
        timed(
            "filter",
            lambda: sum(each.name.endswith("7") for each in store.list()),
            sum(str(number).endswith("7") for number in range(contexts)),
        )
        timed(
            "beginning", lambda: int(longest_beginning(store, first, wanted, lambda _: True) is not None), 1
        )
        start(report, folder, contexts)
        clean_up(store)
        report.add({"case": "expired", "contexts": contexts, "left": len(store.list())})


def start(report: Report, folder: Path, contexts: int) -> None:
    """How long a server takes until it takes calls, and its memory then."""
    began = time.perf_counter()
    with serving(folder, "--no-warm-up") as server:
        took = time.perf_counter() - began
        status = Path(f"/proc/{server.pid}/status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        report.add({"case": "start", "contexts": contexts, "seconds": took, "resident_mib": resident / 1024})


if __name__ == "__main__":
    typer.run(main)
