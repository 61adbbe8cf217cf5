"""What `prefill-worker corpus` is told."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from index_store.cli.documents import STANDARD_INPUT
from index_store.cli.options import AtLeast, Filled, OutputFile
from index_store.errors import InvalidArgumentError
from prefill_worker.config import JobConfig, PrefillConfig


@dataclass(frozen=True, slots=True)
class CorpusConfig(JobConfig):
    """Many documents, and how each is to be made.

    sources: files, folders, URLs of object stores. workers: processes that read, each with the model in memory.
    retries: of a document that failed, by an error that may pass or with its worker.
    """

    sources: Annotated[
        tuple[str, ...],
        Argument(
            metavar="SOURCE",
            help="Files and folders of text, JSON lines and Parquet, or s3://, gs://, az://.",
        ),
        Filled(),
    ] = ()
    text_field: Annotated[str, Option(help="Member or column with the text."), Filled()] = "text"
    name_field: Annotated[str, Option(help="Member or column with the context's name."), Filled()] = "name"
    workers: Annotated[
        int,
        Option(help="Processes that read, each with the model, and with a GPU or its share of the cores."),
        AtLeast(1, 10_000),
    ] = 1
    retries: Annotated[int, Option(help="Of a document that failed."), AtLeast(0, 100)] = 2
    failures: Annotated[
        Path | None, Option(metavar="FILE.jsonl", help="Where to list documents that failed."), OutputFile()
    ] = None
    ray_address: Annotated[
        str | None,
        Option(
            metavar="ADDRESS", help="A running Ray cluster; by default one of this machine alone is started."
        ),
    ] = None

    def __post_init__(self) -> None:
        JobConfig.__post_init__(self)
        if not self.sources:
            raise InvalidArgumentError("SOURCE is missing: name files, folders or URLs of documents")

    def job(self) -> PrefillConfig:
        """What is told of each of the jobs; its input comes otherwise."""
        shared = {field.name: getattr(self, field.name) for field in fields(JobConfig)}
        return PrefillConfig(**shared, input=(STANDARD_INPUT,))
