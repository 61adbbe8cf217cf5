"""Decode steps of a whole model with its contexts in GPU memory, or partly or wholly in the host's.

The model is transformers' Llama in the shape of Llama-3.1-8B with random weights, bfloat16; steps run through the
engine's own graphs, as in `decode_gpu.py` and `host_gpu.py`. All placements share the model, its compilation and the
contents of the contexts: as many layers as fit into `--host-gb` have keys, values and indexes of their own
(`distinct`), the model's layers take turns over them, and no two sessions share any.

Cases are `METHOD@WHERE`, methods as in `decode_gpu.py`:

- `device`: everything in GPU memory. `hybrid`: keys and values in page-locked host memory, the rows that a step attends
  to are fetched. `host`: query tables too, searched by the host's cores; `host2` with a batch in two lanes, for batches
  of four or more.
- `full@streamed`: every step reads all keys and values from host memory, through the general path; one session.

`step_ms` is the median (P50) and `p99_ms` the 99th percentile of the wall clock of a step with everything around it,
over `steps` steps after a warm-up, `--turns` or as many as `--seconds` allow; `tokens_per_s` follows from the median,
`to_full` is that of `full@device` in the same run over it: above 1, the case is faster. `host_mb` were read from host
memory per step, and `reused` is the share of rows that were found on the device instead. `wait` is the share of its
steps in which a lane stood still for the host's search.

Before a case is timed, the logits of the same graph with a budget of all keys are compared with those of full
attention to the same contexts in GPU memory by the general path, unless that would read more than `CHECKED_GB` from
host memory; searches on the host have to list the very keys that the general path lists.

One JSON line per case; the exit code is 1 when a check fails. `placements_table.py` makes a table and a picture.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import torch
import typer
from general_steps import (
    PROMPT,
    WARM_UP,
    CheckFailedError,
    compare,
    forward,
    parse_method,
    start_sessions,
    step_figures,
    time_steps,
)
from host_gpu import Lanes, check_lists
from placed_contexts import PlacedContexts, make_ranges
from random_model import make_model

from decode_engine.config import Compilation, search_cores
from decode_engine.device.step_model import step_model
from decode_engine.evaluation.machine import describe_machine
from decode_engine.host.workers import SearchThreads
from index_store.budgets.ratio import Ratio
from index_store.context import ResidentContext
from index_store.methods import Method, get_method
from index_store.placement import Placement

TABLES = "csattention+dropped:0.01/m8/pooled"
CASES = ",".join(
    [
        "full@device",
        f"{TABLES}@device",
        "pq+dropped:0.01@device",
        "pq+dropped:0.01@hybrid",
        f"{TABLES}@host",
        f"{TABLES}@host2",
        "full@streamed",
    ]
)
SHAPES = "131072x1,32768x1,131072x4,32768x4,32768x16,131072x16"
CHECKED_GB = 20.0
LANES_FROM = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A method in a placement; by the general path where every step streams what it reads."""

    label: str
    method: Method
    placement: Placement
    lanes: int = 1
    streamed: bool = False

    @classmethod
    def parse(cls, text: str) -> Case:
        """METHOD@WHERE. Raises typer.BadParameter for anything else."""
        label, _, where = text.rpartition("@")
        if where == "streamed":
            if label != "full":
                raise typer.BadParameter(f"{text}: only full is streamed")
            return cls(label, parse_method(label), Placement.HYBRID, streamed=True)
        names = {**{place.value: (place, 1) for place in Placement}, "host2": (Placement.HOST, 2)}
        if where not in names:
            raise typer.BadParameter(
                f"{text}: where is {where!r}, expected {', '.join([*names, 'streamed'])}"
            )
        return cls(label, parse_method(label), *names[where])

    def fits(self, batch: int) -> bool:
        """Whether there is a point in timing it with so many sessions."""
        return batch == 1 if self.streamed else self.lanes == 1 or batch >= LANES_FROM


class Bench:
    """The model and what its steps are compared with."""

    def __init__(self, model: Any, run: Any, threads: int, turns: int, seconds: float) -> None:
        self._model, self._run = model, run
        self._threads, self._turns, self._seconds = threads, turns, seconds
        self._expected = torch.empty(0)

    def expect(self, contexts: list[ResidentContext]) -> None:
        """Computes what full attention to these contexts gives, by the general path."""
        sessions = start_sessions(contexts, get_method("full"))
        self._expected = forward(self._model, sessions, first_tokens(contexts))

    def measure(self, case: Case, contexts: list[ResidentContext]) -> dict[str, Any]:
        """The case's figures. Raises CheckFailedError when its first step is wrong."""
        if case.streamed:
            return self._measure_streamed(case, contexts)
        searching = SearchThreads(self._threads, case.lanes)
        try:
            return self._measure_captured(case, contexts, searching)
        finally:
            searching.close()

    def _measure_captured(
        self, case: Case, contexts: list[ResidentContext], searching: SearchThreads
    ) -> dict[str, Any]:
        lanes = Lanes(self._run, self._model, contexts, case.method, searching)
        difference = self._check_whole(case, lanes, contexts)
        begin = time.perf_counter()
        tokens = lanes.step(first_tokens(contexts))
        ready_s = time.perf_counter() - begin
        if case.placement is Placement.HOST and case.method.sparse:
            check_lists(lanes, case.method)
        _, tokens = time_steps(lanes.step, tokens, WARM_UP, self._seconds)
        before, waited_ms = moved(lanes), lanes.waited_ms()
        times, _ = time_steps(lanes.step, tokens, self._turns, self._seconds)
        read, reused = (end - start for start, end in zip(before, moved(lanes), strict=True))
        waited_s = (lanes.waited_ms() - waited_ms) / 1e3
        model = contexts[0].manifest.model
        rows = read // (2 * model.head_dim * contexts[0].kv(0).element_size())
        return step_figures(times, len(contexts)) | {
            "host_mb": round(read / len(times) * 1e-6, 3),
            "reused": round(reused / max(1, rows + reused), 4),
            "wait": round(waited_s / sum(times), 4),
            "captured": all(graph.captured for graph in lanes.graphs),
            "first_step_s": round(ready_s, 1),
            "logits_difference": difference,
        }

    def _check_whole(self, case: Case, lanes: Lanes, contexts: list[ResidentContext]) -> float | None:
        """Compares a step with a budget of all keys, where that takes no long time, and starts anew."""
        read = sum(context.manifest.kv_bytes for context in contexts) if case.placement.kv_on_host else 0
        if case.placement is Placement.HOST or read > CHECKED_GB * 1e9:
            return None
        if case.method.sparse:
            lanes.start(contexts, replace(case.method, budget=Ratio(1.0)))
        lanes.step(first_tokens(contexts))
        difference = compare(lanes.logits(), self._expected)
        lanes.start(contexts, case.method)
        return round(difference, 4)

    def _measure_streamed(self, case: Case, contexts: list[ResidentContext]) -> dict[str, Any]:
        sessions = start_sessions(contexts, case.method)
        tokens = first_tokens(contexts)
        logits_BV = forward(self._model, sessions, tokens)
        difference = compare(logits_BV, self._expected)

        def step(tokens: Sequence[int]) -> list[int]:
            chosen: list[int] = forward(self._model, sessions, tokens).argmax(-1).tolist()
            return chosen

        _, tokens = time_steps(step, logits_BV.argmax(-1).tolist(), WARM_UP, self._seconds)
        times, _ = time_steps(step, tokens, self._turns, self._seconds)
        return step_figures(times, len(contexts)) | {
            "host_mb": round(sum(context.manifest.kv_bytes for context in contexts) * 1e-6, 3),
            "reused": 0.0,
            "captured": False,
            "logits_difference": round(difference, 4),
        }


def first_tokens(contexts: Sequence[ResidentContext]) -> list[int]:
    """A token for each session, after the few that it has read."""
    return list(range(PROMPT + 3, PROMPT + 3 + len(contexts)))


def moved(lanes: Lanes) -> tuple[int, int]:
    """Bytes read from host memory and rows found on the device by all sessions until now."""
    figures = [session.figures for session in lanes.sessions]
    return sum(each.host_bytes_read for each in figures), sum(each.rows_reused for each in figures)


def main(
    cases: Annotated[str, typer.Option(help="METHOD@WHERE, comma-separated.")] = CASES,
    shapes: Annotated[str, typer.Option(help="LENGTHxBATCH, comma-separated.")] = SHAPES,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    compilation: Annotated[
        Compilation, typer.Option(help="Of the model: half a minute for every size of batch, and of lane.")
    ] = Compilation.OFF,
    threads: Annotated[int, typer.Option(help="Threads that search, 0 for all cores but two.")] = 0,
    turns: Annotated[int, typer.Option(help="Steps that are timed, of every case.")] = 100,
    seconds: Annotated[float, typer.Option(help="After which steps of a case are no longer begun.")] = 4.0,
    host_gb: Annotated[
        float, typer.Option(help="Page-locked for keys and values, and again for tables.")
    ] = 17.2,
    huge_pages: Annotated[
        bool, typer.Option("--huge-pages", help="For keys and values; a loaded context has small ones.")
    ] = False,
) -> None:
    """Times decode steps of a whole model in all placements; one JSON line per case."""
    if not torch.cuda.is_available():
        typer.echo("error: this benchmark needs a CUDA device", err=True)
        raise typer.Exit(1)
    listed = [Case.parse(text) for text in cases.split(",")]
    machine, begun = describe_machine(), time.perf_counter()
    model, identity = make_model(layers)
    ranges = make_ranges(host_gb, huge_pages)
    threads = threads or search_cores()
    bench = Bench(model, step_model(model, compilation), threads, turns, seconds)
    typer.echo(f"model and host memory are ready after {time.perf_counter() - begun:.0f} s", err=True)
    failed = False
    for shape in shapes.split(","):
        length, batch = (int(part) for part in shape.split("x"))
        fitting = [case for case in listed if case.fits(batch)]
        methods = list({case.label: case.method for case in fitting}.values())
        placed = PlacedContexts(identity, methods, length, batch, ranges)
        line: dict[str, Any] = {
            "bench": "placements", "tokens": length, "batch": batch, "layers": layers, "distinct": placed.distinct,
            "compilation": compilation.value, "threads": threads, "huge_pages": huge_pages,
            "machine": machine,
        }  # fmt: skip
        for row in shape_figures(bench, placed, fitting):
            failed = failed or "error" in row
            typer.echo(json.dumps(line | row))
            sys.stdout.flush()
        placed.release()
        tidy_up()
        typer.echo(f"{shape} is done after {time.perf_counter() - begun:.0f} s", err=True)
    raise typer.Exit(1 if failed else 0)


def shape_figures(bench: Bench, placed: PlacedContexts, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """A row for each case, in their order."""
    in_device = placed.make(Placement.DEVICE)
    bench.expect(in_device)
    release(in_device)
    full: float | None = None
    for case in cases:
        tidy_up()
        contexts = placed.make(case.placement)
        row: dict[str, Any] = {
            "method": case.label, "placement": "streamed" if case.streamed else case.placement.value,
            "lanes": case.lanes,
        }  # fmt: skip
        try:
            row |= bench.measure(case, contexts)
        except (CheckFailedError, torch.cuda.OutOfMemoryError) as error:
            row["error"] = str(error)[:300]
        else:
            if (case.label, case.placement) == ("full", Placement.DEVICE):
                full = row["tokens_per_s"]
            if full is not None:
                row["to_full"] = round(row["tokens_per_s"] / full, 3)
        release(contexts)
        yield row


def release(contexts: Sequence[ResidentContext]) -> None:
    for context in contexts:
        context.release()


def tidy_up() -> None:
    """Gives back what graphs and contexts held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
