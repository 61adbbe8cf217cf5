"""`prefill-worker`: reads a document once with a model and stores what later requests need."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from index_store.cli.console import FormatOption, OutputFormat, StoreOption, print_json
from index_store.cli.entry import INTERRUPTED
from prefill_worker.cli import flags

if TYPE_CHECKING:
    from index_store.store.manifest import IndexEntry, Manifest
    from prefill_worker.jobs.job import PrefillReport

app = typer.Typer(
    help="Reads a document once with a model; stores keys, values and search indexes for later requests.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Makes `run` a command of its own, so that others can join it."""


@app.command()
def run(
    model: flags.Model,
    input_: flags.Input,
    store: StoreOption,
    more_inputs: flags.MoreInputs = None,
    name: flags.Name = None,
    method: flags.Method = None,
    index: flags.Index = None,
    tables: flags.Tables = None,
    subspaces: flags.Subspaces = None,
    centroids: flags.Centroids = None,
    split: flags.Split = None,
    calibration: flags.Calibration = None,
    dense_layers: flags.DenseLayers = "auto",
    dtype: flags.Dtype = "auto",
    chunk: flags.Chunk = 2048,
    attention: flags.Attention = flags.AttentionKind.EXACT,
    muse_block: flags.MuseBlock = 8192,
    muse_clusters: flags.MuseClusters = 64,
    muse_cap: flags.MuseCap = 1.5,
    muse_iterations: flags.MuseIterations = 1,
    muse_dipole: flags.MuseDipole = True,
    query_sample: flags.QuerySample = 8192,
    ttl: flags.Ttl = None,
    salt: flags.Salt = "",
    seed: flags.Seed = 0,
    device: flags.Device = "auto",
    device_memory: flags.DeviceMemory = "auto",
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Prefills a document, stores it and prints what was stored. The same content again does nothing.

    The store is made when it is not there.
    """
    # Imported here, not above: torch and transformers take seconds, which --help and usage errors need not wait
    # for, and an interrupt while they load must end as cleanly as one later.
    try:
        from index_store.cli.progress import reporter_for
        from index_store.memory.memory_sizes import parse_size
        from index_store.methods.method import DEFAULT_METHOD
        from prefill_worker.config import PrefillConfig
        from prefill_worker.jobs.job import run_job

        config = PrefillConfig(
            model=model,
            store=store,
            input=(*input_, *(more_inputs or ())),
            name=name,
            method=tuple(method or (() if index else (DEFAULT_METHOD,))),
            index=tuple(index or ()),
            tables=tables and tables.value,
            subspaces=subspaces,
            centroids=centroids,
            split=split and split.value,
            calibration=calibration,
            dense_layers=dense_layers,
            dtype=dtype,
            chunk=chunk,
            attention=attention.value,
            muse_block=muse_block,
            muse_clusters=muse_clusters,
            muse_cap=muse_cap,
            muse_iterations=muse_iterations,
            muse_dipole=muse_dipole,
            query_sample=query_sample,
            ttl=ttl,
            salt=salt,
            seed=seed,
            device=device,
            device_memory=None if device_memory == "auto" else parse_size(device_memory),
        )
        report = run_job(config, reporter_for(sys.stderr))
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing incomplete was kept", err=True)
        raise typer.Exit(INTERRUPTED) from None
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
        "not_applied": list(report.not_applied),
        "model": manifest.model.name,
        "methods": list(manifest.methods),
        "dtype": manifest.dtype,
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
        typer.echo(
            f"The store has this context already; nothing was done. Made at {manifest.created_at:%F %T} UTC."
        )
    dense = ", ".join(map(str, manifest.dense_layers)) or "none"
    rows = [
        ("context", manifest.id),
        ("name", manifest.name),
        ("model", manifest.model.name),
        ("tokens", f"{manifest.token_count:,}"),
        ("keys and values", f"{manifest.kv_bytes:,} bytes, {manifest.dtype}"),
        *((f"index {index.name}", _index_text(index, manifest)) for index in manifest.indexes),
        ("bytes per token", f"{manifest.bytes_per_token():,.1f}"),
        ("dense layers", dense),
        ("expires", "never" if manifest.expires_at is None else f"{manifest.expires_at:%F %T} UTC"),
        *((f"seconds, {phase}", f"{seconds:.2f}") for phase, seconds in report.seconds.items()),
    ]
    if report.memory is not None and report.memory.device_peak is not None:
        rows.append(("device memory at most", f"{report.memory.device_peak:,} bytes beside the weights"))
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:<{width}}  {value}")
