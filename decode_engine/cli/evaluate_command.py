"""The commands `evaluate` and `evaluate-merge`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from decode_engine.cli.logs import say_device
from decode_engine.evaluation.settings import EvaluationConfig
from index_store.cli.console import on_terminal, print_json, show_stages
from index_store.cli.options import FormatOption, OutputFolder, OutputFormat, QuietOption, configured

if TYPE_CHECKING:
    from decode_engine.evaluation.comparison.results import Results

PictureOption = Annotated[bool, typer.Option(help="Draw quality and captured mass (needs matplotlib).")]


@configured(EvaluationConfig)
def evaluate_command(
    config: EvaluationConfig,
    picture: PictureOption = True,
    quiet: QuietOption = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Compare methods with full attention.

    Measured are exact match and KL on questions about long contexts, and errors inside layers. Contexts are made from
    held-out text and prefilled through prefill-worker; those that the store has already are reused.
    """
    from decode_engine.evaluation.comparison.evaluate import evaluate
    from decode_engine.evaluation.comparison.pictures import check_pictures

    if picture:
        check_pictures()
    say_device(config.device, quiet=quiet)
    with show_stages(sys.stderr, quiet=quiet) as start_stage:
        results = evaluate(config, start_stage)
    show_results(results, config.out, picture=picture, output=output)


def show_results(results: Results, out: Path, *, picture: bool, output: OutputFormat) -> None:
    """Draws the pictures and prints the tables, or the JSON."""
    from decode_engine.evaluation.comparison.pictures import draw_pictures
    from decode_engine.evaluation.comparison.results import FILES
    from decode_engine.evaluation.comparison.tables import costs_table, results_table, tasks_table, warnings

    for warning in (*results.setting.get("misfits", ()), *warnings(results.scores)):
        sys.stderr.write(f"warning: {warning}\n")
    files = [*FILES, *(draw_pictures(out, results.scores, results.maps) if picture else ())]
    if output is OutputFormat.JSON:
        print_json(results.as_json())
        return
    settings = results.setting["settings"]
    terminal = Console() if on_terminal() else Console(width=200)
    title = f"{settings['model']}, {settings['questions']} questions per context length"
    terminal.print(results_table(results.scores, title, results.prompts))
    for table in (tasks_table(results.scores), costs_table(results.scores)):
        if table is not None:
            terminal.print(table)
    terminal.print(f"Written to {out}: {', '.join(files)}")


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """`decode-engine evaluate-merge`."""

    runs: Annotated[tuple[Path, ...], Argument(metavar="RUN", help="Folders of runs (their --out).")]
    out: Annotated[Path, Option(help="Folder for the combined tables and pictures."), OutputFolder()]


@configured(MergeConfig)
def evaluate_merge_command(
    config: MergeConfig, picture: PictureOption = True, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Combine runs that differ in methods and budgets only.

    They are of one model, with the same lengths, questions and seed.
    """
    from decode_engine.evaluation.comparison.pictures import check_pictures
    from decode_engine.evaluation.comparison.results import merge_results, write_results

    if picture:
        check_pictures()
    results = merge_results(config.runs)
    config.out.mkdir(parents=True, exist_ok=True)
    write_results(config.out, results)
    show_results(results, config.out, picture=picture, output=output)
