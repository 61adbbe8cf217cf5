"""Decode steps of a whole model with its contexts in GPU memory, or partly or wholly in the host's.

usage: python ops/bench/whole_model/placements_gpu.py [--seconds 3] [--cases full@device,refined+dropped:0.01@hybrid]
       python ops/bench/whole_model/placements_gpu.py --rows int8

The model is transformers' Llama in the shape of Llama-3.1-8B with random weights, bfloat16; steps run through the
engine's own graphs, as in `decode_gpu.py`. All placements share the model and the
contents of the contexts: as many layers as fit into `--host-gb` have keys, values and indexes of their own
(`distinct`), the model's layers take turns over them. No two sessions share any, but with a shape such as
`131072x16@1` there are fewer contexts, which the sessions take in turns. With `--rows int8` all of them have their rows
in 8 bits, also those of `full@device`.

Cases are `METHOD@WHERE`, methods as in `decode_gpu.py`:

- `device`: everything in GPU memory. `hybrid`: keys and values in host memory, the rows that a step attends to are
  fetched. `host`: query tables are in host memory as well, searched by the host's cores.
- `full@hybrid`, `full@streamed`: every step reads all keys and values from host memory, in place by a captured step's
  attention, or through two blocks of GPU memory by the general path; one context.

`step_ms` is the median (P50) and `p99_ms` the 99th percentile of the wall clock of a step with everything around it,
over `steps` steps after a warm-up, `--turns` or as many as `--seconds` allow; `tokens_per_s` follows from the median,
`to_full` is that of `full@device` in the same run over it: above 1, the case is faster. `host_mb` were read from host
memory per step, where `full` counts a context for each session on it, and `reused` is the share of rows that were found
on the device, or brought there by another session in the same step, instead. `wait` is the share of a step
in which the device waited for the host's search.

Before a case is timed, the logits of the same graph with a budget of all keys are compared with those of full
attention to the same contexts in GPU memory by the general path, unless that would read more than `CHECKED_GB` from
host memory; searches on the host have to list the very keys that the general path lists.

One JSON line per case, as it comes; one that fails says why, the others run all the same, and the exit code is 1.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.made_up.contexts import (
    HOST_GB,
    PlacedContexts,
    distinct_layers,
    make_model,
    make_ranges,
    release,
)
from harness.parsing import parse_method, parse_shared_shapes
from harness.report import compare, failure, reporting
from harness.steps.captured_steps import SteppedSessions, tidy_up, time_captured, whole_difference
from harness.steps.general_steps import (
    first_tokens,
    forward,
    full_logits,
    start_sessions,
    step_figures,
    time_general,
)

from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.host_search.shared_search_numba import compile_search
from decode_engine.settings.command_options import search_cores
from decode_engine.steps.step_graph import StepModel, step_model
from index_store.memory.placement import SLOT_SHARE, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.store.description.dtypes import AS_DTYPE, ROW_CODINGS

TABLES = "csattention+dropped:0.01/m8/pooled"
CASES = ",".join(
    [
        "full@device",
        f"{TABLES}@device",
        "refined+dropped:0.01@device",
        "refined+dropped:0.01@hybrid",
        f"{TABLES}@host",
        "full@hybrid",
        "full@streamed",
    ]
)
SHAPES = "131072x1,32768x1,131072x4,32768x4,32768x16,131072x16"
CHECKED_GB = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """A method in a placement; by the general path where every step streams what it reads."""

    label: str
    method: Method
    placement: Placement
    streamed: bool = False

    @classmethod
    def parse(cls, text: str) -> Case:
        """METHOD@WHERE. Raises typer.BadParameter for anything else."""
        label, _, where = text.rpartition("@")
        if where == "streamed":
            if label != "full":
                raise typer.BadParameter(f"{text}: only full is streamed")
            return cls(label, parse_method(label), Placement.HYBRID, streamed=True)
        names = [place.value for place in Placement]
        if where not in names:
            raise typer.BadParameter(f"{text}: where is {where!r}, expected {', '.join(names)}, streamed")
        return cls(label, parse_method(label), Placement(where))

    def names(self) -> dict[str, Any]:
        """What says in a line which case it is."""
        place = "streamed" if self.streamed else self.placement.value
        return {"method": self.label, "placement": place}

    def fits(self, contexts: int) -> bool:
        """Whether there is a point in timing it with so many contexts."""
        return self.method.sparse or not self.placement.kv_on_host or contexts == 1


class Bench:
    """The model and what its steps are compared with.

    run: its steps.
    """

    def __init__(
        self,
        model: Any,
        run: StepModel,
        threads: int,
        turns: int,
        seconds: float,
    ) -> None:
        self._model, self._run = model, run
        self._threads, self._turns, self._seconds = threads, turns, seconds
        self._expected = torch.empty(0)

    def expect(self, contexts: list[ResidentContext]) -> None:
        """Computes what full attention to these contexts gives, by the general path."""
        self._expected = full_logits(self._model, contexts)

    def measure(self, case: Case, contexts: list[ResidentContext]) -> dict[str, Any]:
        """The case's figures. Raises CheckFailedError when its first step is wrong."""
        if case.streamed:
            return self._measure_streamed(case, contexts)
        searching = SearchThreads(self._threads)
        try:
            return self._measure_captured(case, contexts, searching)
        finally:
            searching.close()

    def _measure_captured(
        self, case: Case, contexts: list[ResidentContext], searching: SearchThreads
    ) -> dict[str, Any]:
        stepped = SteppedSessions(self._run, self._model, contexts, searching)
        readers = (
            contexts if case.method.sparse else set(contexts)
        )  # which is read once for all sessions on it
        read = sum(context.manifest.kv_bytes for context in readers) if case.placement.kv_on_host else 0
        checked = read <= CHECKED_GB * 1e9
        difference = whole_difference(stepped, case.method, self._expected) if checked else None
        timed = time_captured(stepped, case.method, self._turns, self._seconds)
        return {
            **timed.steps(),
            **timed.moved(),
            "wait": round(timed.waited_s / sum(timed.seconds), 4),
            "captured": all(graph.captured for graph in stepped.graphs),
            "first_step_s": round(timed.first_s, 1),
            "logits_difference": difference,
        }

    def _measure_streamed(self, case: Case, contexts: list[ResidentContext]) -> dict[str, Any]:
        sessions = start_sessions(contexts, case.method)
        difference = compare(forward(self._model, sessions, first_tokens(contexts)), self._expected)
        seconds = time_general(self._model, sessions, self._turns, self._seconds)
        return step_figures(seconds, len(contexts)) | {
            "host_mb": round(sum(context.manifest.kv_bytes for context in set(contexts)) * 1e-6, 3),
            "reused": 0.0,
            "captured": False,
            "logits_difference": round(difference, 4),
        }


def main(
    cases: Annotated[str, typer.Option(help="METHOD@WHERE, comma-separated.")] = CASES,
    shapes: Annotated[
        str, typer.Option(help="LENGTHxBATCH or LENGTHxBATCH@CONTEXTS, comma-separated.")
    ] = SHAPES,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    threads: Annotated[int, typer.Option(help="Threads that search, 0 for all cores but two.")] = 0,
    turns: Annotated[int, typer.Option(help="Steps that are timed, of every case.")] = 100,
    seconds: Annotated[float, typer.Option(help="After which steps of a case are no longer begun.")] = 4.0,
    host_gb: Annotated[
        float, typer.Option(help="Page-locked for keys and values, and again for tables.")
    ] = HOST_GB,
    slot_share: Annotated[int, typer.Option(help="One row in so many has a slot.")] = SLOT_SHARE,
    rows: Annotated[str, typer.Option(help="Of contexts: dtype or int8.")] = AS_DTYPE,
) -> None:
    """Times decode steps of a whole model in all placements; one JSON line per case."""
    listed, sizes = [Case.parse(text) for text in cases.split(",")], parse_shared_shapes(shapes)
    if unfit := [f"{n}x{batch}" for n, batch, count in sizes if not any(c.fits(count) for c in listed)]:
        raise typer.BadParameter(f"no case is for batches such as {', '.join(unfit)}")
    if rows not in ROW_CODINGS:
        raise typer.BadParameter(f"--rows is {rows!r}, expected {' or '.join(ROW_CODINGS)}")
    with reporting("placements") as report:
        begun = time.perf_counter()
        on_host = any(case.placement is Placement.HOST for case in listed)
        compiling = threading.Thread(target=compile_search if on_host else lambda: None)
        compiling.start()  # takes as long as what comes now, which waits for the device and the system
        model, identity = make_model(layers)
        ranges = make_ranges(host_gb, methods_of(listed) if on_host else [])
        compiling.join()
        threads = threads or search_cores()
        bench = Bench(model, step_model(model), threads, turns, seconds)
        typer.echo(f"model and host memory are ready after {time.perf_counter() - begun:.0f} s", err=True)
        for length, batch, count in sizes:
            line: dict[str, Any] = {
                "tokens": length, "batch": batch, "contexts": count, "layers": layers,
                "distinct": distinct_layers(identity, length, count, ranges),
                "threads": threads, "slot_share": slot_share, "rows": rows,
            }  # fmt: skip
            fitting = [case for case in listed if case.fits(count)]
            make = partial(
                PlacedContexts, identity, methods_of(fitting), length, count, model.device, ranges,
                slot_share, rows,
            )  # fmt: skip
            for row in shape_figures(bench, make, fitting, batch):
                report.add(line | row)
            tidy_up()
            typer.echo(
                f"{length}x{batch}@{count} is done after {time.perf_counter() - begun:.0f} s", err=True
            )


def methods_of(cases: Sequence[Case]) -> list[Method]:
    """Each once."""
    return list({case.label: case.method for case in cases}.values())


def shape_figures(
    bench: Bench, make: Callable[[], PlacedContexts], cases: Sequence[Case], batch: int
) -> Iterator[dict[str, Any]]:
    """A row for each case, in their order; the error in all of them where there is nothing to run them on."""
    lacking: dict[str, str] = {}
    placed: PlacedContexts | None = None
    try:
        placed = make()
        in_device = placed.make(Placement.DEVICE)
        bench.expect(seated(in_device, batch))
        release(in_device)
    except Exception as error:
        lacking = failure(error)
    full: float | None = None
    for case in cases:
        tidy_up()
        row = case.names() | (
            lacking if placed is None or lacking else case_figures(bench, placed, case, batch)
        )
        if "error" not in row:
            if (case.label, case.placement) == ("full", Placement.DEVICE):
                full = row["tokens_per_s"]
            if full is not None:
                row["to_full"] = round(row["tokens_per_s"] / full, 3)
        yield row
    if placed is not None:
        placed.release()


def seated(contexts: Sequence[ResidentContext], batch: int) -> list[ResidentContext]:
    """The context of each session."""
    return [contexts[session % len(contexts)] for session in range(batch)]


def case_figures(bench: Bench, placed: PlacedContexts, case: Case, batch: int) -> dict[str, Any]:
    """The case's figures, or its error."""
    contexts: list[ResidentContext] = []
    try:
        contexts = placed.make(case.placement)
        return bench.measure(case, seated(contexts, batch))
    except Exception as error:  # other cases may well run
        return failure(error)
    finally:
        release(contexts)


if __name__ == "__main__":
    typer.run(main)
