"""`prefill-worker`: reads a document once with a model and stores what later requests need."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from index_store.cli.app import GroupedCommand, new_app
from index_store.cli.console import print_json
from index_store.cli.entry import INTERRUPTED
from index_store.cli.logs import LogLevel, LogLevelOption, logging_to_stderr
from index_store.cli.options import FormatOption, InputFile, OutputFormat, QuietOption, configured
from index_store.cli.report import layers_text, print_rows, rows_text
from prefill_worker.config import AddIndexConfig, CorpusConfig, DetachConfig, PrefillConfig, WorkerConfig

if TYPE_CHECKING:
    from index_store.store.description.manifest import IndexEntry, Manifest
    from prefill_worker.jobs.prepared_job import PrefillReport

app = new_app(
    "Reads a document once with a model; stores keys, values and search indexes for later requests."
)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ends an interrupted job with a sentence, from the moment on in which its configuration is made."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing incomplete was kept", err=True)
        raise typer.Exit(INTERRUPTED) from None


GROUPS = {
    "The document": "input messages calibration name move_name ttl renew salt",
    "Indexes": "method index dense_layers query_sample seed",
    "Reading": "chunk attention muse_block muse_clusters muse_cap muse_iterations muse_dipole",
    "Storing and computing": "dtype rows device device_memory objects",
    "Many documents": "text_field name_field workers retries failures ray_address",
}
_MOST_TOLD = 20
"""Failures that are printed."""


@app.command(cls=GroupedCommand)
@_interruptible()
@configured(PrefillConfig, GROUPS)
def run(
    config: PrefillConfig,
    more_inputs: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="More files, after --input.")
    ] = None,
    quiet: QuietOption = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Prefill a document, store it, print what was stored. The store is made when it is not there.

    Where the store has the document already, what is missing is added: indexes, a name, a time to live.
    """
    for path in more_inputs or ():
        InputFile(dash=True).check("FILE", path)
    config = replace(config, input=(*config.input, *(more_inputs or ())))
    # Imported here, not above: torch and transformers take seconds, which --help and usage errors need not wait for.
    from index_store.cli.console import reporter_for
    from prefill_worker.jobs.job import run_job

    courier = None
    if config.objects is not None:
        from index_store.objects.courier import Courier
        from index_store.objects.tier import Tier

        store = config.open_store()
        courier = Courier(store, Tier.of(store))
        courier.look()  # what others made is not made again
    report = run_job(config, reporter_for(sys.stderr, quiet=quiet))
    _print(report, output)
    if courier is not None:
        courier.upload(report.manifest.id)


@app.command(cls=GroupedCommand)
@_interruptible()
@configured(CorpusConfig, GROUPS)
def corpus(
    config: CorpusConfig, quiet: QuietOption = False, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Prefill many documents by workers on Ray.

    Files of text are a document each; lines of .jsonl files are objects, rows of .parquet files have columns. What the
    store has is left alone, so the same command goes on after it was ended or killed. Ends with 1 where a document
    failed. Needs `sparsekv[ray]`.
    """
    from prefill_worker.corpus.on_ray import run_corpus

    as_json = output is OutputFormat.JSON
    report = run_corpus(config, sys.stderr, quiet=quiet, lines=as_json)
    failures = report.failures()
    if config.failures is not None:
        config.failures.write_text("".join(f"{json.dumps(each)}\n" for each in failures))
    if as_json:
        print_json({**report.describe(), "failures": failures})
    else:
        typer.echo(f"{report.told()}, in {report.seconds:,.1f} s")
        for each in failures[:_MOST_TOLD]:
            typer.echo(f"failed: {each['source']}: {each['problem']}", err=True)
        if len(failures) > _MOST_TOLD:
            typer.echo(f"failed: {len(failures) - _MOST_TOLD:,} more; --failures FILE lists all", err=True)
    if failures:
        raise typer.Exit(1)


@app.command("add-index")
@_interruptible()
@configured(AddIndexConfig)
def add_index(
    config: AddIndexConfig, quiet: QuietOption = False, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Add indexes to a stored context from what it stores.

    Needs neither its document nor its model: only its keys and values are read.
    """
    from index_store.cli.console import reporter_for
    from prefill_worker.jobs.added_indexes import run_add_index

    _print(run_add_index(config, reporter_for(sys.stderr, quiet=quiet)), output)


@app.command("detach")
@_interruptible()
@configured(DetachConfig)
def detach(
    config: DetachConfig, quiet: QuietOption = False, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Make a context that continues another one stand alone.

    Its indexes are built anew. It keeps its id and its name, and does not need the one that it continued. Workers
    (`serve`) do so by themselves where it has outgrown that one.
    """
    from index_store.cli.console import reporter_for
    from prefill_worker.jobs.children import run_detach

    _print(run_detach(config, reporter_for(sys.stderr, quiet=quiet)), output)


@app.command()
@configured(WorkerConfig, by_file=True)
def serve(
    config: WorkerConfig, log_level: LogLevelOption = LogLevel.INFO, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Make the contexts that are ordered over the network.

    Takes jobs from the queue beside the store's contexts, where `decode-engine serve` puts them. Several workers
    may share it, on any machines that share the store; a job whose worker ends is gone on with by another one. Logs
    go to standard error, as JSON lines with --format json.
    """
    from prefill_worker.worker.queue_worker import serve_queue

    with logging_to_stderr(log_level, output is OutputFormat.JSON):
        serve_queue(config)


def _print(report: PrefillReport, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json(report_json(report))
    else:
        _print_text(report)


def report_json(report: PrefillReport) -> dict[str, object]:
    """The result as one JSON object."""
    manifest = report.manifest
    return {
        "id": manifest.id,
        "name": manifest.name,
        "created": report.created,
        "changed": dict(report.changed),
        "model": manifest.model.name,
        "methods": list(manifest.methods),
        "dtype": manifest.dtype,
        "rows": manifest.rows,
        "tokens": manifest.token_count,
        "kv_bytes": manifest.kv_bytes,
        "index_bytes": {index.name: index.nbytes for index in manifest.indexes},
        "index_bytes_per_token": {
            index.name: round(index.nbytes / manifest.token_count, 1) for index in manifest.indexes
        },
        "bytes_per_token": round(manifest.bytes_per_token(), 1),
        "dense_layers": list(manifest.dense_layers),
        "expires_at": None if manifest.expires_at is None else manifest.expires_at.isoformat(),
        "seconds": {phase: round(seconds, 3) for phase, seconds in report.seconds.items()},
        "memory": None if report.memory is None else asdict(report.memory),
    }


def _index_text(index: IndexEntry, manifest: Manifest) -> str:
    layers = f"{len(index.layers)} of {manifest.model.layers} layers"
    return f"{index.nbytes:,} bytes, {index.nbytes / manifest.token_count:,.1f} per token, {layers}"


def _print_text(report: PrefillReport) -> None:
    manifest = report.manifest
    if not report.created:
        changed = "; ".join(f"{what}: {words}" for what, words in report.changed.items())
        typer.echo(
            f"The store has this context already, made at {manifest.created_at:%F %T} UTC. "
            f"{f'Changed: {changed}.' if changed else 'Nothing was done.'}"
        )
    rows = [
        ("context", manifest.id),
        ("name", manifest.name),
        ("methods", ", ".join(manifest.methods)),
        ("model", manifest.model.name),
        ("tokens", f"{manifest.token_count:,}"),
        ("keys and values", f"{manifest.kv_bytes:,} bytes, {rows_text(manifest.rows, manifest.dtype)}"),
        *((f"index {index.name}", _index_text(index, manifest)) for index in manifest.indexes),
        ("bytes per token", f"{manifest.bytes_per_token():,.1f}"),
        ("dense layers", layers_text(manifest.dense_layers, manifest.model.layers)),
        ("expires", "never" if manifest.expires_at is None else f"{manifest.expires_at:%F %T} UTC"),
        *((f"seconds, {phase}", f"{seconds:.2f}") for phase, seconds in report.seconds.items()),
    ]
    if report.memory is not None and report.memory.device_peak is not None:
        rows.append(("device memory at most", f"{report.memory.device_peak:,} bytes beside the weights"))
    print_rows(rows)
