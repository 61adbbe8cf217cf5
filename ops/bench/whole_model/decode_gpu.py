"""Decode steps of a whole model on a GPU, through the engine's own captured graphs: how long they take, and where.

usage: python ops/bench/whole_model/decode_gpu.py [--bars] [--methods full,refined:0.01] [--shapes 131072x1]
       [--placement hybrid] [--rows int8] [--trained]

The model is transformers' Llama in the shape of Llama-3.1-8B with random weights, bfloat16. Contexts are random and
lie in the GPU's memory; several layers' worth of keys, values and indexes take turns over the model's layers, and
every sequence of a batch has a context of its own, so that nothing is found in the second-level cache; with a shape
such as `131072x16@1` there are fewer contexts, which the sequences take in turns. With
`--placement hybrid` keys and values are in host memory that the GPU reads instead, those of as many layers as fit into
`--host-gb`: all of them for one sequence of 128K tokens. All methods run through the same code: one operator for
attention, one CUDA graph a step, greedy sampling; by default as it is served, not compiled, with small functions of the
layers in one launch each.

With `--trained` the contexts are a trained model's, and so are the queries of every step, the same at each; that is for
contexts in GPU memory, one for each sequence, and methods whose indexes are not built from queries.

- `none`: a stand-in for attention that reads nothing: what is left is the rest of the model.
- `full`: attention to every key by the engine's own kernel, which reads a context once for all sessions on it; see
  `shared_gpu.py` for how it compares with torch's fastest.
- `float8`: attention to every key of a copy in 8 bits by FlashInfer (`pip install flashinfer-python`), the faster of
  the ways in `flashinfer_baseline`, without tails: what a step with such a cache takes at best. `full` with
  `--rows int8` is our own over exact rows in 8 bits.
- `streamed`: attention to every key by the general path, which streams them from host memory; no graph.
- methods: as in `decode-engine methods`; `NAME:KEEP` gives the share of keys that is kept, `/m8` and `/pooled` variants
  of query tables. Those without kernels run on the general path, as they do when they are served (`captured` is false).

`step_ms` is one step with everything around it (median, wall clock), `p99_ms` the 99th percentile (of fewer than a
hundred steps, the slowest), `steps` how many were timed: `--turns`, on the general path fewer where these would take
longer than ten seconds. `flight_ms` and `flight_p99_ms` are the times of steps of which each is launched before the
tokens of the one before are read; there are none where threads search on the host. `flight_alike` is the share of
sessions to which both say the same in the beginning. `graph_ms` is the replay alone, `eager_ms` the same launched from
Python. `tokens_per_s` follows from `step_ms`. In `hybrid`, `host_mb` were read from host memory in a step, and `reused`
is the share of rows that were found in slots on the device instead. `split_us` is the time of a replay by what its
kernels do.
Before a time is reported the logits of the same graph with a budget of all keys are compared with those of full
attention by the general path; so are those of methods on the general path whose search can yield all keys. What
selections cost in answers is the evaluation's business.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.flashinfer_baseline import float8_steps
from harness.made_up.contexts import HOST_GB, PlacedContexts, make_model, make_ranges, read_bytes, release
from harness.made_up.trained_rows import asked, record_rows
from harness.parsing import parse_method, parse_shared_shapes
from harness.report import failure, reporting
from harness.steps.captured_steps import (
    SteppedSessions,
    tidy_up,
    time_captured,
    time_flight,
    whole_difference,
)
from harness.steps.general_steps import full_logits, measure_general
from harness.timing import copy_bandwidth, event_ms
from torch import Tensor

from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.settings.command_options import search_cores
from decode_engine.steps import batch_kinds
from decode_engine.steps.attention.step_attention import StepAttention
from decode_engine.steps.step_graph import Choice, StepGraph, step_model
from index_store.indexes.registry import INDEX_KINDS
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.selection.budgets import Threshold
from index_store.store.description.dtypes import AS_DTYPE
from index_store.store.description.manifest import Manifest

TURNS = 25
REST_BAR, SPEEDUP_BARS = 1.35, {1: 1.7, 4: 2.5}

KINDS = {
    "search": r"(pick|cut|sample|sample_pooled|score|combine|select|tables|keep|join|lookup|pass)_kernel",
    "fetch": r"(early|find|bring|settle|copy)_kernel",
    "host": r"(post|await)_kernel",
    "turns": r"(take|give)_kernel",
    "states": r"state_copy_kernel",
    "remainder": r"(correct|remainder)_kernel",
    "attend": r"(attend|window|shared|tail_write|values|merge)_kernel",
}
"""What kernels do, by their whole name; all others are the rest of the model. A lookup scores clusters, which
is for the search or for the remainder; values are those of coarse rows, and of exact ones beside them."""


STAND_INS = ("none", "float8")
"""For the engine's own attention to all keys."""


class NothingSteps(StepAttention):
    """Stands for attention that costs nothing."""

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        return None

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return {}

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        return q_BHGD.clone()

    def kept_B(self) -> Tensor:
        return torch.zeros(self.plan.size, dtype=torch.int64, device=self.plan.device)


class Bench:
    """The model, and the contexts of a shape."""

    def __init__(
        self, model: Any, run: Any, contexts: list[ResidentContext], threads: SearchThreads, turns: int
    ) -> None:
        self._model, self._run, self._contexts = model, run, contexts
        self._threads, self._turns = threads, turns
        self._expected: Callable[[], Tensor] = cache(lambda: full_logits(model, contexts))

    def measure(self, label: str, method: Method) -> dict[str, Any]:
        """The figures of a method. Raises CheckFailedError for wrong logits."""
        stand_in: type[StepAttention] | None = NothingSteps if label == "none" else None
        if label == "float8":
            stand_in = float8_steps(self._contexts)
        with nullcontext() if stand_in is None else patch.object(batch_kinds, "DenseSteps", stand_in):
            return self._measure(label, method)

    def _measure(self, label: str, method: Method) -> dict[str, Any]:
        stepped = SteppedSessions(self._run, self._model, self._contexts, self._threads)
        if label == "streamed" or not stepped.takes(method):
            return measure_general(self._model, self._contexts, method, self._turns)
        difference = 0.0 if label in STAND_INS else whole_difference(stepped, method, self._expected())
        timed = time_captured(stepped, method, self._turns)
        moved = timed.moved() if self._contexts[0].placement.kv_on_host else {}
        attended = stepped.sessions[0].figures.sparse_fraction if method.sparse else 1.0
        flown = time_flight(stepped, method, self._turns, timed.said)
        graph = stepped.graphs[0]
        return {
            **timed.steps(),
            **flown,
            "graph_ms": round(statistics.median(event_ms(graph.run) for _ in range(TURNS)), 3),
            "eager_ms": round(eager_ms(graph), 3),
            "captured": graph.captured,
            "first_step_s": round(timed.first_s, 1),
            "logits_difference": difference,
            "attended": round(attended, 4),
            "split_us": split_us(graph),
            **moved,
        }


def shape_figures(bench: Bench, labels: Sequence[str], weights_ms: float) -> Iterator[dict[str, Any]]:
    """A row for each method, its error where it fails."""
    full_ms: float | None = None
    for label in labels:
        row: dict[str, Any] = {"method": label}
        try:
            row |= bench.measure(label, as_method(label))
        except Exception as error:  # other methods may well run
            row |= failure(error)
        else:
            if label == "none":
                row["rest_over_weights"] = round(row["graph_ms"] / weights_ms, 3)
            elif label == "full":
                full_ms = row["step_ms"]
            elif full_ms is not None:
                row["speedup"] = round(full_ms / row["step_ms"], 3)
        tidy_up()
        yield row


def as_method(label: str) -> Method:
    """Of whose indexes and placement it makes use."""
    return parse_method("full" if label in (*STAND_INS, "streamed") else label)


def eager_ms(graph: StepGraph) -> float:
    """Median time of the step launched from Python."""
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.compute()
        graph.choose_eagerly(Choice())
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[3:])


def split_us(graph: StepGraph) -> dict[str, float]:
    """Microseconds of a replay by what its kernels do; empty where the profiler does not work.

    A kernel that was launched early, to wait in its place for the one before, counts from that one's end.
    """
    graph.run()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.run()
            torch.cuda.synchronize()
    except RuntimeError as error:
        typer.echo(f"no split, the profiler failed: {error}", err=True)
        return {}
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type.name == "CUDA"
    ]
    totals: dict[str, float] = defaultdict(float)
    reached = 0.0
    for begin, end, name in sorted(spans):
        kind = next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), "rest")
        totals[kind] += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return {name: round(total, 1) for name, total in totals.items()}


def main(
    methods: Annotated[str, typer.Option(help="Comma-separated; NAME:KEEP.")] = (
        "none,full,csattention+dropped:0.01/m8/pooled,csattention+dropped:0.01,csattention:0.01,csattention:0.05,"
        "multipole:0.05,refined:0.01"
    ),
    shapes: Annotated[
        str, typer.Option(help="LENGTHxBATCH or LENGTHxBATCH@CONTEXTS, comma-separated.")
    ] = "131072x1,131072x4,32768x16",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    placement: Annotated[Placement, typer.Option(help="Of the contexts.")] = Placement.DEVICE,
    host_gb: Annotated[float, typer.Option(help="Page-locked for keys and values in host memory.")] = HOST_GB,
    turns: Annotated[int, typer.Option(help="Steps that are timed, of every method.")] = TURNS,
    coded: Annotated[str, typer.Option("--rows", help="Of contexts: dtype or int8.")] = AS_DTYPE,
    trained: Annotated[bool, typer.Option("--trained", help="A trained model's keys and queries.")] = False,
    bars: Annotated[
        bool, typer.Option(help="Fail when a figure misses its bar; bars are for contexts in GPU memory.")
    ] = False,
) -> None:
    """Times decode steps of a whole model."""
    labels, sizes = methods.split(","), parse_shared_shapes(shapes)
    listed = [as_method(label) for label in labels]
    if trained:
        check_trained(listed, sizes, placement)
    with reporting("decode_gpu", bars) as report:
        model, identity = make_model(layers)
        weights_ms = read_bytes(model) / copy_bandwidth() * 1e3
        rows = record_rows(max(length for length, _, _ in sizes), model.device.type) if trained else None
        tidy_up()
        searched = listed if placement is Placement.HOST else []
        ranges = make_ranges(host_gb, searched) if placement.kv_on_host else []
        run, threads = step_model(model), SearchThreads(search_cores())
        for length, batch, count in sizes:
            placed = PlacedContexts(
                identity, listed, length, count, model.device, ranges, rows=coded, trained=rows
            )
            made = placed.make(placement)
            queries = None if rows is None else placed.trained_queries(identity, rows)
            placed.release()
            contexts = [made[session % count] for session in range(batch)]
            with nullcontext() if queries is None else asked(queries):
                for row in shape_figures(Bench(model, run, contexts, threads, turns), labels, weights_ms):
                    line: dict[str, Any] = {
                        "figure": "decode", "method": row["method"], "placement": placement.value, "tokens": length,
                        "batch": batch, "contexts": count, "layers": layers,
                        "rows": coded, "trained": trained,
                        "weights_ms": round(weights_ms, 3),
                    } | row  # fmt: skip
                    report.add(line, *missed(line))
            release(made)
            tidy_up()
        threads.close()


def check_trained(
    methods: Sequence[Method], sizes: Sequence[tuple[int, int, int]], placement: Placement
) -> None:
    """Raises typer.BadParameter where a trained model's queries would say nothing about a step's time."""
    built_from = {
        spec.name for each in methods for spec in each.index_specs() if INDEX_KINDS[spec.kind].needs_queries
    }
    if built_from:
        raise typer.BadParameter(f"--trained has no queries to build {', '.join(sorted(built_from))} from")
    calibrated = [each.name for each in methods if isinstance(each.budget, Threshold)]
    if calibrated:
        raise typer.BadParameter(f"--trained has no queries to calibrate {', '.join(calibrated)} with")
    if placement is not Placement.DEVICE or any(batch != count for _, batch, count in sizes):
        raise typer.BadParameter(
            "--trained has the same queries at every step: for contexts in GPU memory, one for each sequence"
        )


def missed(line: Mapping[str, Any]) -> list[str]:
    """What a figure falls short of."""
    label, batch = line["method"], line["batch"]
    if label == "none":
        rest = line.get("rest_over_weights", 99.0)
        return [f"none, batch {batch}: {rest} times the weights, bar {REST_BAR}"] if rest > REST_BAR else []
    bar = SPEEDUP_BARS.get(batch, 0.0)
    barred = label.startswith("csattention") and label.split("/")[0].endswith(":0.01")
    speedup = line.get("speedup", 0.0)
    return [f"{label}, batch {batch}: {speedup}x, bar {bar}x"] if barred and speedup < bar else []


if __name__ == "__main__":
    typer.run(main)
