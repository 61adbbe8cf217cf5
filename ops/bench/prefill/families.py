"""What stored beginnings save, and what children take.

usage: python ops/bench/prefill/families.py [--model reader] [--tokens 32k] [--stored 30k] [--children 20] [--added 256]

Regime: a made-up document of `tokens` tokens is prefilled, with the indexes of the default method, once into an empty
store and once into one that has its first `stored` tokens as a context; keys and values must be the same bits, or
nothing is reported. Seconds are those of whole jobs, from text to a published context (`total_s`), of the model's pass
alone (`forward_s`), and of this process's own cores (`cpu_s`), which neighbours disturb less. Then the context is
continued by `added` tokens, `children` times, with full attention: the bytes of their folders beside the parent's, the
seconds to read and to publish one, and what it takes to begin a session on it: to read and check its rows, and to give
them to the session.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.report import CheckFailedError, Report, reporting

from decode_engine.evaluation.tasks import make_document, parse_length, source_text
from decode_engine.model.runner import ModelRunner
from index_store.cli.console import SilentReporter
from index_store.family.children import Continuation, OwnRows, publish_child, read_own_rows
from index_store.family.parents import EXACT
from index_store.memory.arena import Arena
from index_store.methods.default import DEFAULT_METHOD
from index_store.methods.presets import get_method
from index_store.models.loading import load_tokenizer, resolve_model
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import run_job
from prefill_worker.jobs.prepared_job import PrefillReport


def main(
    model: Annotated[str, typer.Option(help="Model folder, or reader.")] = "reader",
    tokens: Annotated[str, typer.Option(help="Tokens of the document.")] = "32k",
    stored: Annotated[str, typer.Option(help="Of these, tokens that are stored before.")] = "30k",
    children: Annotated[int, typer.Option(help="Children of it.")] = 20,
    added: Annotated[int, typer.Option(help="Tokens that each of them adds.")] = 256,
    chunk: Annotated[int, typer.Option(help="Tokens of one pass of the prefill.")] = 2048,
    folder: Annotated[Path | None, typer.Option(help="Where stores are written.")] = None,
) -> None:
    """Times prefills and measures children; one JSON line per figure."""
    count, before = parse_length(tokens), parse_length(stored)
    with reporting("families", gpu=False) as report, tempfile.TemporaryDirectory(dir=folder) as made:
        measure(report, model, Path(made), (count, before, chunk), (children, added))


def measure(
    report: Report, model: str, folder: Path, lengths: tuple[int, int, int], families: tuple[int, int]
) -> None:
    """All figures. lengths: of document, beginning, chunk. families: children, and tokens of each."""
    count, before, chunk = lengths
    tokenizer = load_tokenizer(resolve_model(model))
    text = make_document(tokenizer, source_text(()), count, facts=8, seed=0).text
    cut = len(text) * before // count
    alone, shared = folder / "alone", folder / "shared"
    beginning, beginning_s = prefill(model, shared, text[:cut], folder, chunk)
    taking, taking_s = prefill(model, shared, text, folder, chunk)
    nothing, nothing_s = prefill(model, alone, text, folder, chunk)
    check_rows(Store(shared), Store(alone), taking.manifest)
    jobs = (
        ("beginning", beginning, beginning_s),
        ("from_nothing", nothing, nothing_s),
        ("from_beginning", taking, taking_s),
    )
    for figure, job, cpu_s in jobs:
        seconds = {f"{phase}_s": spent for phase, spent in job.seconds.items()}
        taken = {"taken_tokens": job.manifest.prefill.get("taken_tokens", 0)}
        total = {"tokens": job.manifest.token_count, "cpu_s": cpu_s, "total_s": sum(job.seconds.values())}
        report.add({"figure": figure, **taken, **total, "forward_s": job.seconds["prefill"], **seconds})
    report.add({"figure": "children", **child_figures(Store(alone), model, nothing.manifest, *families)})


def prefill(model: str, store: Path, text: str, folder: Path, chunk: int) -> tuple[PrefillReport, float]:
    """A whole job, and the time of this process's own cores."""
    begun = time.process_time()
    document = folder / "document.txt"
    document.write_text(text)
    config = PrefillConfig(model=model, store=store, input=(document,), chunk=chunk, device="cpu")
    report = run_job(config, SilentReporter())
    return report, time.process_time() - begun


def check_rows(store: Store, other: Store, manifest: Manifest) -> None:
    """Raises CheckFailedError unless keys and values of both stores' contexts are the same bits."""
    with store.open(manifest.id) as found, other.open(manifest.id) as expected:
        for layer in range(manifest.model.layers):
            entry = manifest.layer_entry(layer)
            for head in range(entry.shape[1]):
                if not torch.equal(
                    found.array(entry.path, layer, head), expected.array(entry.path, layer, head)
                ):
                    raise CheckFailedError(f"layer {layer}, KV head {head}: rows differ from those in one go")


def child_figures(store: Store, model: str, parent: Manifest, children: int, added: int) -> dict[str, Any]:
    """Seconds are the least of all children's."""
    runner = ModelRunner(resolve_model(model))
    times: dict[str, list[float]] = {name: [] for name in ("read_s", "publish_s", "open_s", "restore_s")}
    full, default = get_method("full").on(parent), get_method(DEFAULT_METHOD).on(parent)
    with Arena(2**34).acquire(store, parent.id) as resident:
        for number in range(children):
            ids = torch.randint(
                0, parent.model.vocab_size, (added,), generator=torch.Generator().manual_seed(number)
            )
            session = runner.start(resident, full)
            begun = time.perf_counter()
            for first in range(0, added, 256):
                runner.read([session], [ids[first : first + 256].tolist()])
            read = time.perf_counter()
            made = Continuation(
                parent, resident.tokens(), OwnRows(ids, session.tail_rows()), EXACT, f"child {number}"
            )
            child = publish_child(store, made)
            published = time.perf_counter()
            own = read_own_rows(store, child)
            opened = time.perf_counter()
            runner.restore(runner.start(resident, default), own.rows)
            ended = time.perf_counter()
            for name, spent in zip(
                times, (read - begun, published - read, opened - published, ended - opened), strict=True
            ):
                times[name].append(spent)
    sizes = [folder_bytes(store, child.id) for child in store.children(parent.id)]
    return {
        "children": children,
        "added": added,
        "parent_bytes": folder_bytes(store, parent.id),
        "children_bytes": sum(sizes),
        "child_bytes": sizes[0],
        **{name: min(spent) for name, spent in times.items()},
    }


def folder_bytes(store: Store, id_: str) -> int:
    """Of all files of a context."""
    files = (store.path / "contexts" / id_).rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


if __name__ == "__main__":
    typer.run(main)
