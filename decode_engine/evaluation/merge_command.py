"""The command `decode-engine evaluate-merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decode_engine.evaluation.command import PictureOption, show_results
from decode_engine.evaluation.pictures import check_pictures
from decode_engine.evaluation.results import merge_results, write_results
from index_store.console import FormatOption, OutputFormat


def evaluate_merge_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs (their --out).")],
    out: Annotated[Path, typer.Option(help="Folder for the combined tables and pictures.")],
    picture: PictureOption = True,
    output_format: FormatOption = OutputFormat.TEXT,
) -> None:
    """Combines runs that differ in methods and budgets only: one model, the same lengths, questions and seed."""
    if picture:
        check_pictures()
    results = merge_results(runs)
    out.mkdir(parents=True, exist_ok=True)
    write_results(out, results)
    show_results(results, out, picture=picture, output_format=output_format)
