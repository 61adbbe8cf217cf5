"""A plan with numbers: what a fleet needs, and what breaks first, by simulation from measured figures.

usage: python ops/plan/plan.py knobs [--part 20] [--out docs/pictures/plan.png]
       python ops/plan/plan.py scales
       python ops/plan/plan.py validate --out DIR [--contexts 24] [--seconds 90]
       python ops/plan/plan.py compare DIR

`knobs`: the fleet of `fleet.Fleet` under the load of `fleet.Load`, then with each knob doubled, or halved: shares of
requests by tier, quantiles of the first token, how busy links and sessions are. A `--part`-th of the fleet is
simulated (`fleet.sample` says how). `scales`: the same fleet by parts of 10, 20 and 50, which should agree.
`validate`: asks one server on this machine, whose memory holds a third of the contexts, by Zipf's law; it writes the
requests and the figures into a folder, and compares hits and first tokens with the simulation's, as `compare` does.
One JSON line per figure.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import typer
from fleet import TIERS, Fleet, Load, Sample, sample
from simulation import simulate

KNOBS: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]] = {
    "as planned": ({}, {}),
    "2 x requests": ({}, {"rate": 2}),
    "2 x contexts": ({}, {"contexts": 2}),
    "2 x tokens of a context": ({}, {"tokens": 2}),
    "2 x tokens of an answer": ({"answer": 2}, {}),
    "flatter: Zipf .8": ({}, {"zipf": 0.8}),
    "half the device memory": ({"device": 0.5}, {}),
    "half the host memory": ({"host": 0.5}, {}),
    "half the disks' rate": ({"disk_rate": 0.5}, {}),
    "half the disks": ({"disk": 0.5}, {}),
    "half the replicas": ({"replicas": 0.5}, {}),
    "failures every 2 minutes": ({"lifetime_s": 0.0002}, {}),
}
"""By name, what fleet and load are multiplied by."""

app = typer.Typer(add_completion=False, no_args_is_help=True)


def run(fleet: Fleet, load: Load, part: int, seconds: float, seed: int = 0) -> dict[str, float]:
    """Figures of a `part`-th of a fleet, after as many requests as fill its tiers."""
    random = np.random.default_rng(seed)
    contexts = sample(load, part, random)
    rate = float(contexts.rates_C.sum())
    shares = contexts.rates_C / rate
    count = int(rate * seconds)
    warm = random.choice(len(shares), 8 * len(shares), p=shares)
    piece = replace(fleet, replicas=fleet.replicas // part)
    times = np.cumsum(random.exponential(1 / rate, count))
    asked = random.choice(len(shares), count, p=shares)
    result = simulate(piece, contexts, times, asked, seed, warm, measured_from=seconds / 4)
    moved = {f"{tier}_gb_s": result.moved[tier] / times[-1] / piece.replicas / 1e9 for tier in TIERS[1:]}
    return {**result.figures(), **moved}


def turned(name: str) -> tuple[Fleet, Load]:
    """Fleet and load with a knob turned."""
    fleet, load = Fleet(), Load()
    for_fleet, for_load = KNOBS[name]
    grown: Any = {key: type(getattr(fleet, key))(getattr(fleet, key) * by) for key, by in for_fleet.items()}
    more: Any = {key: type(getattr(load, key))(getattr(load, key) * by) for key, by in for_load.items()}
    return replace(fleet, **grown), replace(load, **more)


def tell(row: Mapping[str, Any]) -> None:
    """One line."""
    rounded = {key: round(each, 4) if isinstance(each, float) else each for key, each in row.items()}
    typer.echo(json.dumps(rounded))


@app.command()
def knobs(
    part: Annotated[int, typer.Option(min=1, help="One of so many parts of the fleet is simulated.")] = 20,
    seconds: Annotated[float, typer.Option(min=1, help="Of requests.")] = 20.0,
    out: Annotated[Path | None, typer.Option(help="A picture.")] = None,
) -> None:
    """The planned fleet, and each knob doubled or halved."""
    rows = []
    for name in KNOBS:
        began = time.monotonic()
        rows.append({"knob": name, **run(*turned(name), part, seconds)})
        tell({**rows[-1], "took_s": time.monotonic() - began})
    if out is not None:
        draw(rows, out)


@app.command()
def scales(seconds: Annotated[float, typer.Option(min=1, help="Of requests.")] = 20.0) -> None:
    """The same fleet by parts of several sizes."""
    for part in (10, 20, 50):
        tell({"part": part, **run(Fleet(), Load(), part, seconds)})


@app.command()
def validate(
    out: Annotated[Path, typer.Option(help="A folder for store, trace and figures.")],
    contexts: Annotated[int, typer.Option(min=3, help="A third of which fit into memory.")] = 24,
    tokens: Annotated[int, typer.Option(min=64, help="Of each context.")] = 2048,
    seconds: Annotated[float, typer.Option(min=1, help="Of requests.")] = 90.0,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second.")] = 2.0,
) -> None:
    """One real server under a Zipf load, and its prediction."""
    from real_server import record

    record(out, contexts, tokens, seconds, rate)
    compare(out)


@app.command()
def compare(folder: Annotated[Path, typer.Argument(help="With trace.jsonl and figures.json.")]) -> None:
    """A recorded run, and its prediction from the figures beside it."""
    trace = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    figures = json.loads((folder / "figures.json").read_text())
    count = figures["contexts"]
    asked = np.array([each["context"] for each in trace])
    sizes = np.full(count, float(figures["context_bytes"]))
    shape = Sample(
        np.bincount(asked, minlength=count).astype(float), np.full(count, float(figures["tokens"])), sizes
    )
    known = {
        key: figures[key] for key in ("sessions", "device", "host_rate", "step_s", "token_s", "prompt_s")
    }
    fleet = Fleet(replicas=1, host=1e15, disk=1e15, lifetime_s=1e15, **known)
    answers = np.full(len(trace), float(figures["answer"]))
    warm = np.tile(np.arange(count), 2)  # what was asked for alone, before, has read every file
    times = np.array([each["at_s"] for each in trace])
    found = simulate(fleet, shape, times, asked, 0, warm, answers_N=answers).figures()
    first = np.array([each["first_s"] for each in trace])
    hits = np.mean([each["hit"] for each in trace])
    tell({"what": "measured", "hits": float(hits), **quantiles(first)})
    tell({"what": "predicted", "hits": found["device"], "p50_s": found["p50_s"], "p99_s": found["p99_s"]})


def quantiles(first_N: Any) -> dict[str, float]:
    """Of seconds to first tokens."""
    p50, p99 = np.quantile(first_N, [0.5, 0.99])
    return {"p50_s": float(p50), "p99_s": float(p99)}


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Shares by tier, first tokens, and how busy what is busiest is, a bar for each knob."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6))
    left, middle, right = figure.subplots(1, 3, sharey=True)
    names, places = [row["knob"] for row in rows], range(len(rows))
    before = np.zeros(len(rows))
    for tier, colour in zip(TIERS, ("#3b6ea8", "#7fb069", "#e6a23c", "#c0504d"), strict=True):
        share = np.array([100 * row[tier] for row in rows])
        left.barh(places, share, left=before, color=colour, label=tier)
        before += share
    left.set(xlabel="% of requests, by tier", yticks=list(places), yticklabels=names)
    left.legend(fontsize=7, ncols=2, loc="lower left")
    middle.barh(places, [row["p99_s"] for row in rows], color="#c9d6e8", label="P99")
    middle.barh(places, [row["p50_s"] for row in rows], height=0.4, color="#3b6ea8", label="P50")
    middle.set(xscale="log", xlabel="seconds to the first token")
    middle.legend(fontsize=7)
    uses = ("use_host", "use_disk", "use_objects", "use_sessions")
    for offset, (use, colour) in enumerate(
        zip(uses, ("#7fb069", "#e6a23c", "#c0504d", "#555555"), strict=True)
    ):
        heights = [place + 0.2 * (offset - 1.5) for place in places]
        right.barh(
            heights, [row[use] for row in rows], height=0.2, color=colour, label=use.removeprefix("use_")
        )
    right.axvline(1.0, color="black", linewidth=0.8)
    right.set(xlabel="busy share of a link, and of sessions")
    right.legend(fontsize=7)
    left.invert_yaxis()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    app()
