"""The command `fetch-model`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from index_store.cli.checks import Filled
from index_store.cli.console import print_json
from index_store.cli.options import FormatOption, OutputFormat, QuietOption, configured
from index_store.cli.progress import reporter_for
from index_store.errors import format_bytes


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """`decode-engine fetch-model`."""

    repo: Annotated[str, Argument(metavar="REPO", help="OWNER/NAME at the Hugging Face hub."), Filled()]
    revision: Annotated[str, Option(help="A branch, a tag or a commit."), Filled()] = "main"
    file: Annotated[
        str | None,
        Option(metavar="NAME.gguf", help="The GGUF file to fetch, of a repository that has several."),
        Filled(),
    ] = None


@configured(FetchConfig)
def fetch_model_command(
    config: FetchConfig, quiet: QuietOption = False, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Fetch a model from the Hugging Face hub into its cache.

    Only what is loaded is fetched: settings, tokenizer and safetensors, or one GGUF file. What is there already stays,
    also where the hub cannot be reached. HF_HOME, HF_ENDPOINT and HF_TOKEN mean what they always do.
    """
    from index_store.models.files.hub import fetch_model

    reporter = reporter_for(sys.stderr, quiet=quiet)
    done = total = 0

    def plan(size: int, needed: int, cache: Path) -> None:
        nonlocal total
        total = needed
        reporter.note(
            f"{config.repo}: {format_bytes(size)}, of which {format_bytes(needed)} are fetched to {cache}"
        )

    with reporter.phase("fetch", "MB") as update:

        def add(count: int) -> None:
            nonlocal done
            done += count
            update(done >> 20, max(done, total) >> 20)

        fetched = fetch_model(config.repo, config.revision, config.file, plan, add)
    if output is OutputFormat.JSON:
        told = {"files": list(fetched.files), "size": fetched.size, "fetched": fetched.fetched}
        print_json({"path": str(fetched.path), "repo": config.repo, "revision": config.revision, **told})
        return
    typer.echo(fetched.path)
    typer.echo(
        f"Use it as --model, for example: decode-engine serve --store store --model {fetched.path}", err=True
    )
