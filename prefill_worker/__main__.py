"""`prefill-worker`: reads a document once with a model and stores what later requests need."""

from __future__ import annotations

import json
import signal
import sys
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from index_store.errors import SparseKVError

if TYPE_CHECKING:
    from prefill_worker.job import PrefillReport

INTERRUPTED = 130
TERMINATED = 143

app = typer.Typer(
    help="Reads a document once with a model; stores keys, values and search indexes for later requests.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class OutputFormat(StrEnum):
    """How the result is printed."""

    TEXT = "text"
    JSON = "json"


class Tables(StrEnum):
    """Layouts of query tables."""

    DENSE = "dense"
    LISTS = "lists"


class Split(StrEnum):
    """Which dimensions form a subspace."""

    STRIDED = "strided"
    CONTIGUOUS = "contiguous"


@app.callback()
def _root() -> None:
    """Makes `run` a command of its own, so that others can join it."""


@app.command()
def run(
    model: Annotated[str, typer.Option(help="'reader', or the path of a Hugging Face model folder.")],
    input_: Annotated[
        list[Path], typer.Option("--input", help="Text file; may be repeated; - is standard input.")
    ],
    store: Annotated[Path, typer.Option(help="Folder of the store; made when it is not there.")],
    more_inputs: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="More text files.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Display name; by default the first file's name.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Method whose index to build; may be repeated. Default: csattention."),
    ] = None,
    tables: Annotated[Tables | None, typer.Option(help="Layout of query tables.")] = None,
    subspaces: Annotated[int | None, typer.Option(help="Slices of the head dimension.")] = None,
    centroids: Annotated[int | None, typer.Option(help="Query centroids per slice.")] = None,
    split: Annotated[Split | None, typer.Option(help="How dimensions form slices.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Example prompts: one question per line, or .jsonl.")
    ] = None,
    dense_layers: Annotated[str, typer.Option(help="auto, none, or layers such as 0,1.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Of stored keys and values: auto, float32, float16, bfloat16.")
    ] = "auto",
    chunk: Annotated[int, typer.Option(help="Tokens per forward pass.")] = 2048,
    query_sample: Annotated[
        int, typer.Option(help="Queries per KV head that indexes are built from.")
    ] = 8192,
    ttl: Annotated[
        str | None, typer.Option(help="Time to live, for example 30m, 12h, 7d; default: for ever.")
    ] = None,
    salt: Annotated[str, typer.Option(help="Keeps equal documents of different owners apart.")] = "",
    seed: Annotated[int, typer.Option(help="Of the query sample and the clustering.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    format_: Annotated[OutputFormat, typer.Option("--format", help="Of the result on standard output.")] = (
        OutputFormat.TEXT
    ),
) -> None:
    """Prefills a document, stores it and prints what was stored. The same content again does nothing."""
    # Imported here, not above: torch and transformers take seconds, which --help and usage errors need not wait
    # for, and an interrupt while they load must end as cleanly as one later.
    try:
        from index_store.methods import DEFAULT_METHOD
        from prefill_worker.config import PrefillConfig
        from prefill_worker.job import run_job
        from prefill_worker.progress import reporter_for

        config = PrefillConfig(
            model=model,
            store=store,
            input=(*input_, *(more_inputs or ())),
            name=name,
            method=tuple(method or ()) or (DEFAULT_METHOD,),
            tables=tables and tables.value,
            subspaces=subspaces,
            centroids=centroids,
            split=split and split.value,
            calibration=calibration,
            dense_layers=dense_layers,
            dtype=dtype,
            chunk=chunk,
            query_sample=query_sample,
            ttl=ttl,
            salt=salt,
            seed=seed,
            device=device,
        )
        report = run_job(config, reporter_for(sys.stderr))
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing incomplete was kept", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if format_ is OutputFormat.JSON:
        typer.echo(json.dumps(report_json(report)))
    else:
        _print_text(report)


def report_json(report: PrefillReport) -> dict[str, object]:
    """The result as one JSON object."""
    manifest = report.manifest
    return {
        "id": manifest.id,
        "name": manifest.name,
        "created": report.created,
        "model": manifest.model.name,
        "methods": manifest.method.split(","),
        "dtype": manifest.dtype,
        "tokens": manifest.token_count,
        "kv_bytes": manifest.kv_bytes,
        "index_bytes": {index.name: index.nbytes for index in manifest.indexes},
        "bytes_per_token": round(manifest.bytes_per_token(), 1),
        "dense_layers": list(manifest.dense_layers),
        "expires_at": None if manifest.expires_at is None else manifest.expires_at.isoformat(),
        "seconds": {phase: round(seconds, 3) for phase, seconds in report.seconds.items()},
    }


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
        *((f"index {index.name}", f"{index.nbytes:,} bytes") for index in manifest.indexes),
        ("bytes per token", f"{manifest.bytes_per_token():,.1f}"),
        ("dense layers", dense),
        ("expires", "never" if manifest.expires_at is None else f"{manifest.expires_at:%F %T} UTC"),
        *((f"seconds, {phase}", f"{seconds:.2f}") for phase, seconds in report.seconds.items()),
    ]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:<{width}}  {value}")


def main() -> None:
    """Runs the command line: exit code 0 done, 1 an error told in one sentence, 2 wrong usage, 130 interrupted."""
    signal.signal(signal.SIGTERM, _end_on_signal)
    try:
        app()
    except SparseKVError as error:
        typer.echo(f"error: {error.message}", err=True)
        sys.exit(1)


def _end_on_signal(number: int, frame: FrameType | None) -> None:
    """Lets a termination request leave through the clean-ups that an interrupt goes through."""
    sys.exit(TERMINATED)


if __name__ == "__main__":
    main()
