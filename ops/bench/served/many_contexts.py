"""A store of many contexts: listing, filtering, finding, expiring, starting a server; times and memory.

usage: python ops/bench/served/many_contexts.py [--contexts 10000] [--tokens 1100] [--objects 1000]

Makes one context of the packaged reader and copies of it: each has tokens, id, name and label of its own, keys and
values are hard links. So what a context says is wrong, and what a store of so many costs is right. One line for each:

- `read`: a process that has not seen the store lists it; `again`: once more; `added`: with one more context; `seconds`,
  `memory_mb`: of the process, more than before;
- `start`: `decode-engine serve` over it until it serves, `memory_mb`: its memory then; and over one context;
- `list`: all pages over gRPC, which reads manifests; `list again`; `label`: those of a label (one of 100); `page`:
  the first page alone; `name`: one by its name; `beginning`: a prompt that begins with one of them and names none, to
  its first token;
- `expire`: a tenth has expired; `index-store gc` finds and removes it;
- `objects`: `--objects` of them are put into moto's S3; a store that has none looks there for the first time, and
  again.

Run it from the root of the repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import google_crc32c
import numpy as np
import typer
from clusters import object_store
from harness.report import CheckFailedError, Report, reporting
from harness.served import Shelf, serving

from decode_engine.rpc.client import Client
from index_store.objects.courier import Courier
from index_store.objects.tier import Tier, open_store
from index_store.store.catalog import Store
from index_store.store.description.context_id import context_id, continued_digests, first_digest
from index_store.store.description.manifest import MANIFEST_NAME, MANIFESTS, Manifest

LABELS = 100
_PAGE = 1000


class Copies:
    """Contexts made of one. tokens: of the first."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._folder = store.folders.context(manifest.id)
        self.tokens = np.frombuffer((self._folder / "tokens/c/0").read_bytes()[:-4], dtype="<u4")
        inside = [path.relative_to(self._folder) for path in sorted(self._folder.rglob("*"))]
        self._folders = [path for path in inside if (self._folder / path).is_dir()]
        own = {Path(MANIFEST_NAME), Path("tokens/c/0")}
        self._files = [path for path in inside if (self._folder / path).is_file() and path not in own]

    def tokens_of(self, number: int) -> Any:
        """The first block of tokens begins in a way of its own."""
        tokens = self.tokens.copy()
        tokens[1:4] = 300 + number % 97, 300 + number // 97 % 97, 300 + number // 97 // 97
        return tokens

    def add(self, number: int, expires: datetime | None = None) -> str:
        """One more; its id."""
        ids, known = self.tokens_of(number), self._manifest
        id_ = context_id(known.model, known.dtype, {"copy": number}, "", ids)
        folder = self._store.folders.contexts / f".tmp-{id_}"
        for path in (Path(), *self._folders):
            (folder / path).mkdir()
        for path in self._files:
            os.link(self._folder / path, folder / path)
        data = ids.tobytes()
        checksum = google_crc32c.value(data)
        (folder / "tokens/c/0").write_bytes(data + checksum.to_bytes(4, "little"))
        first = first_digest(known.model, known.dtype, "")
        made = replace(
            known,
            id=id_,
            name=f"copy-{number}",
            labels={"group": str(number % LABELS)},
            created_at=known.created_at + timedelta(milliseconds=number),
            expires_at=expires,
            tokens=replace(known.tokens, checksums=f"{checksum:08x}"),
            prefix_digests=continued_digests(first, ids),
        )
        (folder / MANIFEST_NAME).write_bytes(MANIFESTS.render(made))
        folder.rename(self._store.folders.context(id_))
        return id_


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    told = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(told[1]) / 1024 if told else 0.0


def expect(what: str, found: int, wanted: int) -> None:
    """Raises CheckFailedError."""
    if found != wanted:
        raise CheckFailedError(f"{what}: {found}, expected {wanted}")


_READ = """
import re, sys, time
from pathlib import Path
from index_store.store.catalog import Store
def resident(): return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = resident()
began = time.perf_counter(); store = Store(sys.argv[1]); count = len(store.list()); first = time.perf_counter() - began
time.sleep(2.5); store.list()
began = time.perf_counter(); store.list(); again = time.perf_counter() - began
print(count, first, again, (resident() - before) / 1024)
"""


def alone(report: Report, store: Path, count: int) -> None:
    """By a process that does nothing else."""
    told = subprocess.run(
        [sys.executable, "-c", _READ, str(store)], capture_output=True, text=True, check=True
    )
    found, first, again, memory = told.stdout.split()
    expect("contexts that were read", int(found), count)
    report.add({"what": "read", "contexts": count, "seconds": float(first), "memory_mb": float(memory)})
    report.add({"what": "again", "contexts": count, "seconds": float(again)})


def started(
    report: Report, store: Path, count: int, ask: Callable[[str], None] = lambda address: None
) -> None:
    """A server over it."""
    began = time.perf_counter()
    with serving(store, "--no-warm-up", "--memory", "256MiB", "--doors", "0") as server:
        seconds = time.perf_counter() - began
        memory = memory_mb(server.pid)
        report.add({"what": "start", "contexts": count, "seconds": seconds, "memory_mb": memory})
        ask(server.address)


def over_grpc(report: Report, copies: Copies, count: int, address: str) -> None:
    """What a client asks for."""
    with Client(address, timeout_s=600) as client:

        def told(what: str, work: Callable[[], int], wanted: int) -> None:
            seconds, found = timed(work)
            expect(what, found, wanted)
            report.add({"what": what, "contexts": count, "seconds": seconds})

        told("list", lambda: len(list(client.list_contexts(_PAGE))), count)
        told("list again", lambda: len(list(client.list_contexts(_PAGE))), count)
        some = sum(number % LABELS == 7 for number in range(1, count))
        told("label", lambda: len(list(client.list_contexts(_PAGE, labels={"group": "7"}))), some)
        told("page", lambda: len(client.list_page(50).contexts), min(50, count))
        told("name", lambda: len(client.find_context(f"copy-{count // 2}").name), len("contexts/") + 64)
        prompt = [int(token) for token in copies.tokens_of(count // 2)] + [5, 6, 7]
        for turn in ("beginning", "beginning again"):
            began = time.perf_counter()
            with client.generate(token_ids=prompt, max_tokens=2, method="full") as answer:
                next(iter(answer))
                seconds = time.perf_counter() - began
                answer.read()
            expect("tokens of a beginning that were there", answer.summary.cached_tokens, len(copies.tokens))
            report.add({"what": turn, "contexts": count, "seconds": seconds})


def in_objects(report: Report, folder: Path, copies: int, shelf: Shelf, tokens: int) -> None:
    """As many contexts in an object store."""
    with object_store() as url:
        Store(folder / "one", create=True)
        near = open_store(folder / "one", True, url)
        own = Shelf(folder / "one", ("full",))
        made = Copies(near, own.add_slice("first", tokens, 0, 2))
        for number in range(1, copies):
            made.add(number)
        seconds, _ = timed(lambda: Courier(near, Tier.of(near)).look(wait=True))
        report.add({"what": "objects: upload", "contexts": copies, "seconds": seconds})
        far = open_store(folder / "other", True, url)
        courier = Courier(far, Tier.of(far))
        for what in ("objects: first look", "objects: look again"):
            seconds, _ = timed(lambda: courier.look(wait=True))
            expect("contexts in the other store", len(far.list()), copies)
            report.add({"what": what, "contexts": copies, "seconds": seconds})


def main(
    contexts: Annotated[int, typer.Option(min=LABELS, help="In the store.")] = 10_000,
    tokens: Annotated[int, typer.Option(min=64, help="Of each.")] = 1100,
    objects: Annotated[int, typer.Option(min=0, help="Contexts in an object store.")] = 1000,
    folder: Annotated[Path | None, typer.Option(help="Where the store is written.")] = None,
) -> None:
    """What a store of many contexts costs; a JSON line per figure."""
    with reporting("many_contexts", gpu=False) as report, tempfile.TemporaryDirectory(dir=folder) as made:
        store = Path(made) / "store"
        shelf = Shelf(store, ("full",))
        copies = Copies(Store(store), shelf.add_slice("first", tokens, 0, 2))
        started(report, store, 1)
        seconds, _ = timed(lambda: [copies.add(number) for number in range(1, contexts)])
        typer.echo(f"copied in {seconds:.0f} s", err=True)
        alone(report, store, contexts)
        started(report, store, contexts, lambda address: over_grpc(report, copies, contexts, address))
        seconds, _ = timed(lambda: shelf.add_slice("second", tokens, 1, 2))
        seconds, _ = timed(lambda: shelf.add_slice("third", tokens + 1, 1, 2))
        report.add({"what": "prefill of one more", "contexts": contexts, "seconds": seconds})
        past, more = datetime.now(UTC) - timedelta(days=1), contexts // 10
        for number in range(contexts, contexts + more):
            copies.add(number, past)
        gc = [sys.executable, "-m", "index_store", "gc", "--store", str(store)]
        seconds, _ = timed(lambda: subprocess.run(gc, capture_output=True, check=True))
        expect("contexts after that", len(Store(store).list()), contexts + 2)
        report.add({"what": "expire", "contexts": contexts, "expired": more, "seconds": seconds})
        if objects:
            in_objects(report, Path(made), objects, shelf, tokens)


if __name__ == "__main__":
    typer.run(main)
