"""A whole prefill job beside the model's own time, and how fast the context that it wrote is loaded.

usage: python ops/bench/prefill/whole_job.py [--tokens 131072] [--folder DISK]

On a GPU the model is transformers' Llama in the shape of Llama-3.1-8B with random weights, bfloat16; where there is
none, the packaged reader. The document is random. The job is what `prefill-worker run` does once the model is loaded,
with the indexes of the default method; a short one comes first and compiles kernels. One JSON line:

- `model_s`: the model reads the document chunk by chunk, and nothing is written. `job_s`: the whole job, up to the
  published context; `of_model` is their ratio, `beyond_s` their difference.
- The job's stages, of which those in threads add up over these: `prefill_s` (the model reads; keys and values are
  written beside it), `index_s`, `thresholds_s`, `dense_layers_s`, `copy_s` (from the device), `write_s` (with
  checksums), `layers_s` (from the end of the reading to the last byte written), `sync_s` (until all is on the disk),
  `publish_s`.
- `checksum_gb_per_s`: of one thread. `disk_*_gb_per_s`: files of random bytes, written and synced by one thread and by
  eight, and read by eight after the page cache was dropped, of which `disk_cached` stayed.
- `cached_load_s`: the context into an empty arena, its files in the page cache; `second_load_s` once more, when
  page-locked buffers are there. `cold_load_s`: the page cache was dropped, `cold_cached` of it stayed.

Keys and values of three layers must be those that the model left when nothing was written, bit for bit, and every
checksum of the context must be right, or nothing is reported.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import numpy as np
import torch
import typer
from harness.checks import CheckFailedError
from harness.made_up.random_model import make_model
from harness.page_cache import cached_share, drop_from_page_cache, files_below, read_into_page_cache
from harness.report import reporting
from torch import Tensor

from index_store.cli.console import SilentReporter
from index_store.memory.arena import Arena
from index_store.memory.devices import context_device
from index_store.memory.placement import MemoryBytes
from index_store.methods.default import DEFAULT_METHOD
from index_store.models.loading import LoadedModel, ModelFolder, resolve_model
from index_store.store.catalog import Store
from index_store.store.description.dtypes import stored_dtype
from index_store.store.zarr_io import extend_crc32c
from prefill_worker.build.index_choice import choose_indexes
from prefill_worker.build.stages import Clock
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import carry_out
from prefill_worker.jobs.means import Means, load_for_reading
from prefill_worker.jobs.prepared_job import PreparedJob
from prefill_worker.jobs.report import PrefillReport
from prefill_worker.reading.capture import Capture, register_attention
from prefill_worker.reading.prefill import run_context

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARM_UP_TOKENS = 18 * 2048
"""Long enough for all kernels to be there."""
DISK_FILES, DISK_FILE_BYTES, DISK_PIECE = 8, 256 << 20, 4 << 20

Loaded = tuple[LoadedModel, Tensor | None]
Rows = Mapping[tuple[int, int], Tensor]
"""Keys and values [N, 2, d] by layer and KV head."""


def load(layers: int, folder: Path) -> tuple[ModelFolder, Loaded]:
    """The model, and a folder that describes it."""
    if DEVICE.type == "cpu":
        found = resolve_model("reader")
        return found, load_for_reading(found, DEVICE)
    model, identity = make_model(layers, attention=register_attention())
    model.config.architectures = [identity.architecture]
    model.config.save_pretrained(folder)
    frequencies = model.model.rotary_emb.inv_freq.float().cpu()
    return ModelFolder(folder, identity.name), (LoadedModel(model, identity, "bfloat16"), frequencies)


def make_job(folder: ModelFolder, loaded: Loaded, tokens: int, chunk: int, store: Path) -> PreparedJob:
    """Over random tokens."""
    identity, dtype = loaded[0].identity, loaded[0].kv_dtype
    config = PrefillConfig(
        model=str(folder.path), store=store, input=(Path("-"),), chunk=chunk, device=DEVICE.type
    )
    generator = torch.Generator().manual_seed(tokens)
    ids: list[int] = torch.randint(0, identity.vocab_size, (tokens,), generator=generator).tolist()
    return PreparedJob(
        config, folder, identity, dtype, ids, (), choose_indexes((DEFAULT_METHOD,), ()), "random"
    )


def read_alone(job: PreparedJob, loaded: Loaded) -> tuple[float, Rows]:
    """Seconds that the model takes by itself, and what it left in some layers and heads."""
    layers = job.identity.layers
    dtype, sampled = stored_dtype(job.dtype).torch_dtype, job.sampled_positions()
    capture = Capture(job.identity, len(job.token_ids), dtype, sampled, DEVICE)
    with closing(capture):
        spent = timed(lambda: run_context(loaded[0].model, capture, job.token_ids, job.config.pass_tokens))
        places = [(layer, layer % job.identity.kv_heads) for layer in {0, layers // 2, layers - 1}]
        return spent, {(layer, head): capture.kv(layer)[head].cpu() for layer, head in places}


def check(store: Store, report: PrefillReport, expected: Rows) -> None:
    """Raises CheckFailedError unless the store has what the model left, and nothing is damaged."""
    problems = store.verify(report.manifest.id)
    if problems:
        raise CheckFailedError(f"the context is damaged: {problems[0].message}")
    with store.open(report.manifest.id) as context:
        for (layer, head), rows in expected.items():
            found = context.array(report.manifest.kv.path, layer, head)
            if not torch.equal(found.view(torch.uint8), rows.view(torch.uint8)):
                raise CheckFailedError(
                    f"layer {layer}, KV head {head}: rows are not those that the model left"
                )


def load_figures(store: Store, report: PrefillReport) -> dict[str, float | None]:
    """Seconds to bring the context into an empty arena."""
    files = files_below(store.path / "contexts" / report.manifest.id)
    arena = Arena(MemoryBytes(2**40, 2**40), device=context_device(DEVICE))

    def bring() -> None:
        with arena.acquire(store, report.manifest.id):
            pass
        arena.clear()

    read_into_page_cache(files)
    found: dict[str, float | None] = {"cached_load_s": timed(bring), "second_load_s": timed(bring)}
    drop_from_page_cache(files)
    found["cold_cached"] = cached_share(files)
    found["cold_load_s"] = timed(bring)
    return found


def disk_figures(folder: Path, file_bytes: int) -> dict[str, float | None]:
    """What the disk below the folder does by itself, and a core with checksums."""
    data = np.random.default_rng(0).integers(0, 256, DISK_PIECE, dtype=np.uint8)
    paths = [folder / f"disk-{number}" for number in range(DISK_FILES)]

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(0, file_bytes, DISK_PIECE):
                file.write(data.data)
            os.fsync(file.fileno())

    nbytes = -(-file_bytes // DISK_PIECE) * DISK_PIECE / 1e9
    found: dict[str, float | None] = {"disk_write_one_gb_per_s": nbytes / timed(lambda: write(paths[0]))}
    with ThreadPoolExecutor(DISK_FILES) as pool:
        many = timed(lambda: list(pool.map(write, paths)))
    found["disk_write_gb_per_s"] = DISK_FILES * nbytes / many
    drop_from_page_cache(paths)
    found["disk_cached"] = cached_share(paths)
    found["disk_read_gb_per_s"] = DISK_FILES * nbytes / timed(lambda: read_into_page_cache(paths))
    for path in paths:
        path.unlink()
    pieces = np.tile(data, 16).reshape(-1, 1 << 20)

    def sums() -> None:
        checksum = 0
        for piece in pieces:
            checksum = extend_crc32c(checksum, piece)

    return {**found, "checksum_gb_per_s": pieces.nbytes / 1e9 / min(timed(sums) for _ in range(3))}


def timed(work: Callable[[], object]) -> float:
    """Seconds, until the device is done, too."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def figures(
    tokens: int,
    layers: int,
    chunk: int,
    folder: Path,
    warm_up: int = WARM_UP_TOKENS,
    disk: int = DISK_FILE_BYTES,
) -> dict[str, Any]:
    """One line. warm_up: tokens of the first document. disk: bytes of a file that the disk is measured with."""
    (folder / "model").mkdir()
    described, loaded = load(layers, folder / "model")
    means = Means(lambda model, device: loaded, stays=True)
    if DEVICE.type == "cuda":
        carry_out(
            make_job(described, loaded, warm_up, chunk, folder / "first"), SilentReporter(), Clock(), means
        )
    job = make_job(described, loaded, tokens, chunk, folder / "store")
    model_s, expected = read_alone(job, loaded)
    clock = Clock()
    begun = time.perf_counter()
    report = carry_out(job, SilentReporter(), clock, means)
    job_s = time.perf_counter() - begun
    store = Store(folder / "store")
    check(store, report, expected)
    nbytes = report.manifest.kv_bytes + report.manifest.index_bytes
    return {
        "tokens": tokens,
        "layers": job.identity.layers,
        "chunk": chunk,
        "indexes": [index.name for index in report.manifest.indexes],
        "gb": nbytes / 1e9,
        "model_s": model_s,
        "job_s": job_s,
        "of_model": job_s / model_s,
        "beyond_s": job_s - model_s,
        **{f"{stage}_s": spent for stage, spent in clock.seconds.items()},
        "written_gb_per_s": nbytes / 1e9 / job_s,
        **load_figures(store, report),
        **disk_figures(folder, disk),
    }


def main(
    tokens: Annotated[int, typer.Option(help="Of the document.")] = 131_072,
    layers: Annotated[int, typer.Option(help="Of the model on a GPU.")] = 32,
    chunk: Annotated[int, typer.Option(help="Tokens per pass.")] = 2048,
    folder: Annotated[Path | None, typer.Option(help="Where the store is made.")] = None,
) -> None:
    """Times one job; one JSON line."""
    with reporting("whole_job", gpu=False) as report, tempfile.TemporaryDirectory(dir=folder) as made:
        report.add(figures(tokens, layers, chunk, Path(made)))


if __name__ == "__main__":
    typer.run(main)
