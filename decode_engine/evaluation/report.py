"""Writes an evaluation's results: a table on the terminal, JSON, CSV and a picture."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from decode_engine.evaluation.scoring import Score
from index_store.errors import SparseKVError


class PictureUnavailableError(SparseKVError):
    """The picture needs a package that is not installed."""

    reason = "MATPLOTLIB_MISSING"


def results_table(scores: Sequence[Score], title: str) -> Table:
    """One line per context length, method and keep ratio; +- are standard errors."""
    table = Table(title=title)
    table.add_column("context", justify="right")
    table.add_column("method", no_wrap=True)
    for heading in ("keep", "exact match", "loss", "KL", "KL answer", "KL text", "sparse", "all", "ms/token"):
        table.add_column(heading, justify="right")
    previous = None
    for score in scores:
        if previous not in {None, score.context_length}:
            table.add_section()
        previous = score.context_length
        table.add_row(
            f"{score.context_length:,}",
            score.method,
            "-" if score.keep is None else f"{score.keep:.2%}",
            f"{score.exact_match:.3f} {_error(score.exact_match_se, 3)}",
            f"{score.exact_match_loss:+.3f} {_error(score.exact_match_loss_se, 3)}",
            f"{score.kl:.4f} {_error(score.kl_se, 4)}",
            f"{score.kl_answer:.4f} {_error(score.kl_answer_se, 4)}",
            f"{score.kl_text:.4f} {_error(score.kl_text_se, 4)}",
            "-" if score.touched_sparse is None else f"{score.touched_sparse:.1%}",
            f"{score.touched_all:.1%}",
            f"{score.milliseconds_per_token:.1f}",
        )
    questions = sorted({score.questions for score in scores})
    table.caption = (
        f"n = {', '.join(map(str, questions))} questions; loss: exact match of full attention minus the method's; "
        "KL(full || method) in nats per token;\n"
        "sparse, all: keys touched, in the layers where the method selects and in all layers"
    )
    return table


def _error(value: float | None, digits: int) -> str:
    return "" if value is None else f"±{value:.{digits}f}"


def write_results(folder: Path, scores: Sequence[Score], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Writes results.json, results.csv and results.md; returns the object that results.json holds."""
    results = {**setting, "scores": [asdict(score) for score in scores]}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Score)])
        writer.writeheader()
        writer.writerows(asdict(score) for score in scores)
    (folder / "results.md").write_text(markdown_table(scores))
    return results


def markdown_table(scores: Sequence[Score]) -> str:
    """The table for a document, one row per context length, method and keep ratio."""
    lines = [
        "| context | method | keep | exact match | KL | KL, answer | KL, text | keys, sparse | keys, all |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for score in scores:
        cells = (
            f"{score.context_length:,}",
            f"`{score.method}`",
            "-" if score.keep is None else f"{score.keep:.0%}",
            f"{score.exact_match:.3f} {_error(score.exact_match_se, 3)}",
            f"{score.kl:.4f} {_error(score.kl_se, 4)}",
            f"{score.kl_answer:.4f} {_error(score.kl_answer_se, 4)}",
            f"{score.kl_text:.4f} {_error(score.kl_text_se, 4)}",
            "-" if score.touched_sparse is None else f"{score.touched_sparse:.1%}",
            f"{score.touched_all:.1%}",
        )
        lines.append(f"| {' | '.join(cell.strip() for cell in cells)} |")
    return "\n".join(lines) + "\n"


def check_pictures() -> None:
    """Raises PictureUnavailableError, before any long work, when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise PictureUnavailableError(
            "matplotlib is not installed, so the picture cannot be drawn: pip install 'sparsekv[plots]', "
            "or leave the picture out with --no-picture"
        ) from error
    matplotlib.use("Agg")


def draw_picture(path: Path, scores: Sequence[Score]) -> None:
    """Quality against budget: exact match above, KL on questions and answers below, one column per length."""
    check_pictures()
    import matplotlib.pyplot as plt

    lengths = sorted({score.context_length for score in scores})
    figure, axes = plt.subplots(
        2, len(lengths), figsize=(5.2 * len(lengths), 7.2), sharex=True, sharey="row", squeeze=False
    )
    for column, length in enumerate(lengths):
        rows = [score for score in scores if score.context_length == length]
        for full in (score for score in rows if score.keep is None):
            axes[0][column].axhline(full.exact_match, color="black", linestyle="--", label=full.method)
        for method in dict.fromkeys(score.method for score in rows if score.keep is not None):
            line = sorted(
                (score for score in rows if score.method == method), key=lambda score: score.keep or 0.0
            )
            budget = [100.0 * (score.keep or 0.0) for score in line]
            exact, kl = [score.exact_match for score in line], [score.kl for score in line]
            axes[0][column].errorbar(
                budget,
                exact,
                [score.exact_match_se or 0.0 for score in line],
                marker="o",
                capsize=3,
                label=method,
            )
            axes[1][column].errorbar(
                budget, kl, [score.kl_se or 0.0 for score in line], marker="o", capsize=3, label=method
            )
        axes[0][column].set_title(f"{length:,} tokens of context")
        axes[1][column].set(xscale="log", yscale="log", xlabel="keys kept per KV head and step, %")
        kept = sorted({100 * score.keep for score in scores if score.keep is not None})
        axes[1][column].set_xticks(kept, labels=[f"{percent:g}" for percent in kept])
        axes[1][column].minorticks_off()
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("exact match")
    axes[1][0].set_ylabel("KL(full || method), nats per token")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
