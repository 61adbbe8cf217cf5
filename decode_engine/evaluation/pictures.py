"""Pictures of an evaluation's results: quality against keys kept, and where in the model attention mass is captured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decode_engine.evaluation.summary import ALL_TASKS, MassMap, Score
from index_store.errors import SparseKVError

QUALITY, COSTS, MASS_MAP = "quality.png", "costs.png", "mass_map.png"
_LEAST = 1e-7  # what is exact within rounding has no place on a logarithmic axis
_MARKERS = "os^D"
_MAP_KEEP, _MAP_MASS = 0.02, 0.9  # the map shows every method at the budget nearest to these
_MAP_COLUMNS = 6


class PictureUnavailableError(SparseKVError, reason="MATPLOTLIB_MISSING"):
    """The picture needs a package that is not installed."""


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


def draw_pictures(folder: Path, scores: Sequence[Score], maps: Sequence[MassMap]) -> list[str]:
    """Draws what there is to draw into the folder; returns the files' names."""
    check_pictures()
    draw_quality(folder / QUALITY, scores)
    drawn = [QUALITY]
    if any(_has_place(score) for score in scores):
        draw_costs(folder / COSTS, scores)
        drawn.append(COSTS)
    if maps:
        draw_mass_maps(folder / MASS_MAP, maps)
        drawn.append(MASS_MAP)
    return drawn


_Value = Callable[[Score], float | None]
_ROWS: tuple[tuple[str, _Value, _Value, str], ...] = (
    ("exact match", lambda s: s.exact_match, lambda s: s.exact_match_se, "linear"),
    ("KL(full || method), nats per token", lambda s: s.kl, lambda s: s.kl_se, "log"),
    ("relative output error of a layer", lambda s: s.output_error, lambda s: s.output_error_se, "log"),
)


def draw_quality(path: Path, scores: Sequence[Score]) -> None:
    """Exact match, KL and output error against the share of the keys that was read, one column per length."""
    import matplotlib.pyplot as plt

    overall = [score for score in scores if score.task == ALL_TASKS]
    lengths = sorted({score.context_length for score in overall})
    methods = list(dict.fromkeys(score.method for score in overall if score.touched_sparse is not None))
    figure, axes = plt.subplots(
        len(_ROWS),
        len(lengths),
        figsize=(5.4 * len(lengths) + 2.4, 10.2),
        sharex="col",
        sharey="row",
        squeeze=False,
    )
    for column, length in enumerate(lengths):
        rows = [score for score in overall if score.context_length == length]
        for full in (score for score in rows if score.touched_sparse is None):
            axes[0][column].axhline(full.exact_match, color="black", linestyle="--", label=full.method)
        for number, method in enumerate(methods):
            _draw_method(axes[:, column], number, method, [score for score in rows if score.method == method])
        axes[0][column].set_title(f"{length:,} tokens of context")
        axes[-1][column].set_xscale("log")
        axes[-1][column].set_xlabel("keys read per KV head and step in searching layers, %")
        for set_formatter in (
            axes[-1][column].xaxis.set_major_formatter,
            axes[-1][column].xaxis.set_minor_formatter,
        ):
            set_formatter(lambda value, _: f"{value:g}")
        for axis in axes[:, column]:
            axis.grid(alpha=0.3, which="both")
    for row, (label, _, _, scale) in enumerate(_ROWS):
        axes[row][0].set(ylabel=label, yscale=scale)
    axes[0][0].set_ylim(-0.03, 1.03)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        found, labels = axis.get_legend_handles_labels()
        handles = {**dict(zip(labels, found, strict=True)), **handles}
    figure.tight_layout()
    figure.legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def draw_costs(path: Path, scores: Sequence[Score]) -> None:
    """KL against the bytes that a step reads in all layers: a point per method and budget, and the Pareto front.

    Bars are standard errors. Methods without a point on any front are pale. Full attention, whose KL of 0 has no place
    on a logarithmic axis, is a line at 100 %.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    placed = [score for score in scores if _has_place(score)]
    lengths = sorted({score.context_length for score in placed})
    methods = list(dict.fromkeys(score.method for score in placed))
    figure, axes = plt.subplots(
        1, len(lengths), figsize=(5.4 * len(lengths) + 2.4, 4.6), sharey=True, squeeze=False
    )
    handles: dict[str, Any] = {}
    fronts = {
        length: pareto_front([_place(score) for score in placed if score.context_length == length])
        for length in lengths
    }
    best = {score.method for score in placed if _place(score) in fronts[score.context_length]}
    for axis, length in zip(axes[0], lengths, strict=True):
        rows = [score for score in placed if score.context_length == length]
        for number, method in enumerate(methods):
            shown = [score for score in rows if score.method == method]
            if shown:
                x, y = zip(*map(_place, shown), strict=True)
                bars = [min(score.kl_se or 0.0, 0.9 * score.kl) for score in shown]  # down to above 0
                above = [score.kl_se or 0.0 for score in shown]
                strength = {"alpha": 1.0 if method in best else 0.3, "linestyle": "none", "label": method}
                axis.errorbar(x, y, (bars, above), **_look(number), **strength, elinewidth=0.8)
        front = fronts[length]
        axis.axvline(100.0, color="black", linestyle="--", linewidth=1.0, label="full: 100 %, KL 0")
        axis.step(
            *zip(*front, strict=True),
            where="post",
            color="0.4",
            linewidth=1.0,
            zorder=0,
            label="Pareto front",
        )
        axis.set(xscale="log", yscale="log", xlabel="bytes read per step in all layers, % of keys and values")
        axis.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # few enough for their labels to have room
        for set_formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
            set_formatter(lambda value, _: f"{value:g}")
        errors = "" if any(score.kl_se is not None for score in rows) else "\n(no error bars: one draw)"
        axis.set_title(f"{length:,} tokens of context{errors}")
        axis.grid(alpha=0.3, which="both")
        found, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    axes[0][0].set_ylabel("KL(full || method), nats per token")
    figure.tight_layout()
    figure.legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those points (cost, loss) of which no other has both less cost and no more loss, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, loss in sorted(points):
        if not front or loss < front[-1][1]:
            front.append((cost, loss))
    return front


def _has_place(score: Score) -> bool:
    """Whether a score is a point of a method over all tasks; what is exact has no place on a logarithmic axis."""
    known = score.search_share is not None and score.bytes_all is not None
    return score.task == ALL_TASKS and known and score.kl > _LEAST


def _place(score: Score) -> tuple[float, float]:
    return 100.0 * (score.bytes_all or 0.0), score.kl


def _look(number: int) -> dict[str, Any]:
    import matplotlib.pyplot as plt

    colours = [colour for name in ("tab10", "Dark2") for colour in plt.get_cmap(name).colors]
    return {
        "marker": _MARKERS[number % len(_MARKERS)],
        "color": colours[number % len(colours)],
        "markersize": 5,
    }


def _draw_method(axes: Sequence[Any], number: int, method: str, scores: Sequence[Score]) -> None:
    line = sorted(scores, key=lambda score: score.touched_sparse or 0.0)
    for axis, (_, value, error, scale) in zip(axes, _ROWS, strict=True):
        shown = [
            (100.0 * (score.touched_sparse or 0.0), found, error(score) or 0.0)
            for score in line
            if (found := value(score)) is not None and (scale == "linear" or found > _LEAST)
        ]
        if shown:
            x, y, bars = zip(*shown, strict=True)
            axis.errorbar(
                x,
                y,
                bars,
                **_look(number),
                linestyle=("-", "--", ":", "-.")[number // 10 % 4],
                linewidth=1.2,
                capsize=2,
                label=method,
            )


def draw_mass_maps(path: Path, maps: Sequence[MassMap]) -> None:
    """Attention mass captured by every query head of every searching layer, per method, after the longest context."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    longest = max(found.context_length for found in maps)
    chosen = _one_budget([found for found in maps if found.context_length == longest])
    columns = min(_MAP_COLUMNS, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.6 * columns + 1, 2.7 * rows + 0.5), squeeze=False, layout="constrained"
    )
    image = None
    layers = sorted({layer for found in chosen for layer in found.layers})
    colours = plt.get_cmap("viridis").with_extremes(bad="0.85")
    for axis, found in zip(axes.flat, chosen, strict=False):
        rows_of = dict(zip(found.layers, found.captured, strict=True))
        missing = (math.nan,) * len(found.captured[0])
        captured = [rows_of.get(layer, missing) for layer in layers]
        image = axis.imshow(captured, vmin=0.0, vmax=1.0, cmap=colours, aspect="auto")
        axis.set_title(f"{found.method}\n{found.budget}", fontsize=8)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(lambda row, _: str(layers[int(row)]) if 0 <= row < len(layers) else "")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.tick_params(labelsize=6)
    for axis in list(axes.flat)[len(chosen) :]:
        axis.axis("off")
    figure.supxlabel("query head")
    figure.supylabel("layer")
    figure.suptitle(f"attention mass captured after {longest:,} tokens (grey: does not search)", fontsize=10)
    if image is not None:
        figure.colorbar(image, ax=axes, shrink=0.8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _one_budget(maps: Sequence[MassMap]) -> list[MassMap]:
    """For each method the map at the budget nearest to the one that is shown."""

    def distance(found: MassMap) -> float:
        if found.keep is not None:
            return abs(math.log(found.keep / _MAP_KEEP))
        return abs((found.mass or 0.0) - _MAP_MASS)

    best: dict[str, MassMap] = {}
    for found in maps:
        if found.method not in best or distance(found) < distance(best[found.method]):
            best[found.method] = found
    return list(best.values())
