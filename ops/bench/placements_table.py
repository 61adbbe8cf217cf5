"""A table and a picture for a document of what `placements_gpu.py` printed: tokens per second, by placement."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import typer

from decode_engine.evaluation.comparison.pictures import check_pictures

HEAD = (
    "| tokens x sessions | method | where | P50 | P99 | tokens/s | against `full` | from the host | reused | waits |\n"
    "|---|---|---|---:|---:|---:|---:|---:|---:|---:|"
)

PLACES = ("device", "hybrid", "host", "streamed")


def read_lines(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The figures in files of output, the last one of each case. Raises typer.BadParameter where there is none."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in (line for file in files for line in file.read_text().splitlines() if line.startswith("{")):
        row = json.loads(line)
        if row.get("bench") == "placements":
            case = (row[key] for key in ("tokens", "batch", "method", "placement", "lanes", "prefetch"))
            found[tuple(case)] = row
    if not found:
        raise typer.BadParameter(f"no line of placements_gpu.py in {', '.join(map(str, files))}")
    return sorted(found.values(), key=lambda row: (row["tokens"], row["batch"]))


def where(row: dict[str, Any]) -> str:
    """For people."""
    more = [f"{row['lanes']} lanes"] * (row["lanes"] > 1) + ["prefetch"] * row["prefetch"]
    return ", ".join([row["placement"], *more])


def label(row: dict[str, Any]) -> str:
    """Of its bars."""
    return f"{row['method']}, {where(row)}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; a case whose check failed says so instead of times."""
    lines = [HEAD]
    for row in rows:
        cells = [f"{row['tokens'] // 1024}K x {row['batch']}", f"`{row['method']}`", where(row)]
        if "error" in row:
            cells += ["not timed", *["-"] * 6]
        else:
            cells += [
                f"{row['step_ms']:.2f}",
                f"{row['p99_ms']:.2f}"
                if row["steps"] >= 100
                else f"{row['p99_ms']:.2f} ({row['steps']} steps)",
                f"{row['tokens_per_s']:.0f}",
                f"{row['to_full']:.2f}x" if "to_full" in row else "-",
                f"{row['host_mb']:.0f} MB" if row["host_mb"] else "-",
                f"{row['reused']:.0%}" if row["host_mb"] and row["captured"] else "-",
                f"{row['wait']:.0%}" if row.get("wait") else "-",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Bars of tokens per second by shape, a panel for each length. Raises typer.BadParameter where none was timed."""
    check_pictures()
    import matplotlib.pyplot as plt

    timed = [row for row in rows if "error" not in row]
    if not timed:
        raise typer.BadParameter(f"no case was timed, there is nothing to draw into {path}")
    lengths = sorted({row["tokens"] for row in timed})
    # Placements side by side, whatever the cases of a shape are.
    timed.sort(key=lambda row: (PLACES.index(row["placement"]), row["prefetch"], row["lanes"]))
    labels = list(dict.fromkeys(label(row) for row in timed))
    width = 0.85 / len(labels)
    colours = plt.get_cmap("tab10").colors
    figure, axes = plt.subplots(1, len(lengths), figsize=(6 * len(lengths), 4), squeeze=False, sharey=True)
    for axis, length in zip(axes[0], lengths, strict=True):
        batches = sorted({row["batch"] for row in timed if row["tokens"] == length})
        for place, batch in enumerate(batches):
            own = [row for row in timed if (row["tokens"], row["batch"]) == (length, batch)]
            for number, row in enumerate(own):
                at = place + (number - (len(own) - 1) / 2) * width
                colour = colours[labels.index(label(row)) % len(colours)]
                axis.bar(at, row["tokens_per_s"], width, label=label(row), color=colour)
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.set_xlabel("sessions")
        axis.set_title(f"{length:,} tokens")
        axis.set_yscale("log")
        axis.set_ylim(bottom=min(row["tokens_per_s"] for row in timed) / 2)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("tokens per second")
    handles = {
        name: handle
        for axis in axes[0]
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend([handles[name] for name in labels], labels, loc="lower center", ncol=2, fontsize=8)
    figure.tight_layout(rect=(0, 0.04 + 0.05 * math.ceil(len(labels) / 2), 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    files: Annotated[list[Path], typer.Argument(help="Output of placements_gpu.py.")],
    picture: Annotated[Path | None, typer.Option(help="Where the picture goes (needs matplotlib).")] = None,
) -> None:
    """Prints the table."""
    rows = read_lines(files)
    typer.echo(table(rows))
    if picture is not None:
        draw(picture, rows)


if __name__ == "__main__":
    typer.run(main)
