"""First tokens on contexts that are on the local disk, or in an object store alone; and contexts as single files.

usage: python ops/bench/prefill/tiers.py [--tokens 8192,32768] [--rounds 5] [--folder DIR]

The model is the packaged reader on the CPU; contexts are random, written by the store's own writer, with the indexes of
`refined`. Everything has run once before it is timed.

- `first_token`: seconds from a request to its first token on the host, with an empty arena, in turns, medians. `disk`:
  all of the context is on the local disk. `folder`: it is in an object store that is another folder. `s3`: in moto's
  server, over loopback HTTP, a Python program. `fetch_s` is the part in which the context comes here, verified and made
  durable; `bytes` is what came. `ratio` is to `disk`. The page cache is left alone: files are in it.
- `upload`: seconds until a new context is in the object store, read back and verified, and recorded.
- `file`: `export` and `import` of the context as one file, in bytes per second, and as a ratio to writing as many bytes
  into a file, and to that of `cp`-like copying of the context's own files, both made durable.

Before a time is reported, logits after a fetch are compared with those before. One JSON line per figure.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from first_token import DEVICE, Requests, load_reader, prompt_of
from harness.made_up.contexts import DTYPE, QUERY_STD
from harness.parsing import parse_counts
from harness.report import compare, reporting
from moto.server import ThreadedMotoServer
from torch import Tensor

from decode_engine.model.warm_up import made_up_context
from decode_engine.settings.command_options import Prompts
from index_store.memory.arena import Arena
from index_store.memory.placement import MemoryBytes
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.objects.context_file import export_context, import_context
from index_store.objects.courier import Courier
from index_store.objects.tier import Tier, open_store
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from index_store.store.files.durable import sync_tree

PROMPT_TOKENS = 64
METHOD = "refined"
ID = "0" * 64
DISTINCT = 2
"""Layers with contents of their own; the others repeat them, which no cache is large enough to profit from."""
WRITERS = 8


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def host_chunks(made: ResidentContext, layer: int) -> list[tuple[str, int, Tensor]]:
    """Array, KV head and contents of one layer's chunks."""
    arrays = {"kv": made.kv(layer)} | {
        f"index/{index.name}/{name}": array
        for index in made.manifest.indexes
        for name, array in made.index(index.name, layer).arrays().items()
    }
    return [(path, head, chunk.cpu()) for path, array in arrays.items() for head, chunk in enumerate(array)]


def write_context(store: Store, made: ResidentContext, id_: str, distinct: int) -> Manifest:
    """Writes a made-up context into the store, several chunks at a time; its first layers take turns over all."""
    manifest = replace(made.manifest, id=id_)
    entries = {entry.path: entry for entry in manifest.arrays}
    with store.writer(id_) as writer, ThreadPoolExecutor(WRITERS) as pool:
        writer.write_tokens(made.tokens())
        for entry in entries.values():
            if entry.path != "tokens":
                writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
        held = [host_chunks(made, layer) for layer in range(min(distinct, manifest.model.layers))]
        done = [
            pool.submit(writer.write_chunk, path, (layer, head), chunk)
            for layer in range(manifest.model.layers)
            for path, head, chunk in held[layer % distinct]
        ]
        for each in done:
            each.result()
        return writer.publish(manifest)


class StoredRequests:
    """Requests on a stored context."""

    def __init__(self, model: Any, store: Store, manifest: Manifest) -> None:
        self._model, self._store, self._id = model, store, manifest.id
        self.arena = Arena(MemoryBytes(2**40, 2**40), device=DEVICE)

    def logits(self, method: Method, ids: Sequence[int], early: bool = False) -> Tensor:
        """After the prompt, [V] float32. early: which runs behind the loading."""
        with self.arena.acquire(self._store, self._id, early=early) as context:
            return Requests(self._model, context).logits(method, ids, Prompts.EXACT)

    def first_token(self, method: Method, ids: Sequence[int]) -> float:
        """Seconds from the request to its first token on the host."""
        return timed(lambda: int(self.logits(method, ids, early=True).argmax()))


def s3_environment(endpoint: str) -> dict[str, str]:
    """What obstore reads of the environment."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }


def first_token_figures(
    model: Any, stores: dict[str, Store], manifest: Manifest, rounds: int
) -> Iterator[dict[str, Any]]:
    """All places in turns; the first round warms up, and checks."""
    method, ids = get_method(METHOD), prompt_of(PROMPT_TOKENS)
    requests = {place: StoredRequests(model, store, manifest) for place, store in stores.items()}
    expected = requests["disk"].logits(method, ids)
    firsts: dict[str, list[float]] = {place: [] for place in stores}
    fetches: dict[str, list[float]] = {place: [] for place in stores}
    for turn in range(rounds + 1):
        for place, store in stores.items():
            requests[place].arena.clear()
            if place != "disk" and not store.evict(manifest.id, lambda _: True):
                raise RuntimeError(f"{place}: the context was not evicted")
            fetched = timed(lambda store=store: store.bring(manifest.id))  # type: ignore[misc]
            first = requests[place].first_token(method, ids)
            if turn == 0:
                compare(requests[place].logits(method, ids), expected, 1e-6, f", {place}")
            else:
                fetches[place].append(fetched)
                firsts[place].append(fetched + first)
    disk = statistics.median(firsts["disk"])
    for place in stores:
        first = statistics.median(firsts[place])
        yield {
            "figure": "first_token",
            "place": place,
            "first_s": first,
            "fetch_s": statistics.median(fetches[place]),
            "ratio": first / disk,
            "bytes": 0 if place == "disk" else manifest.kv_bytes + manifest.index_bytes,
        }


def file_figures(store: Store, manifest: Manifest, folder: Path, rounds: int) -> dict[str, Any]:
    """The context as one file, beside as many bytes written and its files copied."""
    times: dict[str, list[float]] = {"export": [], "import": [], "write": [], "copy": []}
    path, source = folder / "file", store.folders.context(manifest.id)
    for turn in range(rounds + 1):
        other = Store(folder / f"other-{turn}", create=True)
        taken = {"export": timed(lambda: export_context(store, manifest, path))}
        data = path.read_bytes()
        taken["import"] = timed(lambda other=other: import_context(other, path))  # type: ignore[misc]

        def write(data: bytes = data) -> None:
            with open(folder / "plain", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        def copy(target: Path = folder / f"copy-{turn}") -> None:
            shutil.copytree(source, target)
            sync_tree(target)

        taken |= {"write": timed(write), "copy": timed(copy)}
        shutil.rmtree(other.path)
        shutil.rmtree(folder / f"copy-{turn}")
        for name, seconds in taken.items() if turn else ():
            times[name].append(seconds)
    nbytes, middle = path.stat().st_size, {name: statistics.median(each) for name, each in times.items()}
    return {
        "figure": "file",
        "bytes": nbytes,
        "export_mb_s": nbytes / middle["export"] / 1e6,
        "import_mb_s": nbytes / middle["import"] / 1e6,
        "export_to_write": middle["write"] / middle["export"],
        "import_to_copy": middle["copy"] / middle["import"],
    }


def figures(
    model: Any, identity: Any, tokens: int, folder: Path, s3: str, rounds: int
) -> Iterator[dict[str, Any]]:
    """All figures of one length."""
    method = get_method(METHOD)
    made = made_up_context(
        identity, DTYPE, method, tokens, distinct=DISTINCT, device=DEVICE, seed=tokens,
        calibrated_for=QUERY_STD,
    )  # fmt: skip
    urls = {"folder": (folder / "bucket").as_uri(), "s3": f"{s3}/{tokens}"}
    stores = {"disk": Store(folder / "disk", create=True)}
    stores |= {
        place: open_store(folder / place, True, url, fetch_timeout_s=None) for place, url in urls.items()
    }
    for place, store in stores.items():
        manifest = write_context(store, made, ID, DISTINCT)
        if place != "disk":
            courier = Courier(store, Tier.of(store))
            yield {"figure": "upload", "place": place, "upload_s": timed(lambda: courier.upload(ID))}  # noqa: B023
    made.release()
    yield from first_token_figures(model, stores, manifest, rounds)
    yield file_figures(stores["disk"], manifest, folder, rounds)


def main(
    tokens: Annotated[str, typer.Option(help="Lengths of contexts, comma-separated.")] = "8192,32768",
    rounds: Annotated[int, typer.Option(help="Turns that are timed.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="Where stores and buckets are made.")] = None,
) -> None:
    """Times first tokens and files; one JSON line per figure."""
    with reporting("tiers", gpu=False) as report, tempfile.TemporaryDirectory(dir=folder) as temporary:
        model, identity = load_reader()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        os.environ |= s3_environment("http://127.0.0.1:{1}".format(*server.get_host_and_port()))
        making = urllib.request.Request(f"{os.environ['AWS_ENDPOINT_URL']}/contexts", method="PUT")
        urllib.request.urlopen(making).close()
        for length in parse_counts(tokens):
            below = Path(temporary) / str(length)
            below.mkdir()
            for row in figures(model, identity, length, below, "s3://contexts", rounds):
                report.add({"tokens": length, **row})
        server.stop()


if __name__ == "__main__":
    typer.run(main)
