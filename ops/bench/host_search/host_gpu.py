"""Decode steps of a whole model whose query tables are searched on the CPU: how long the GPU waits for it.

usage: python ops/bench/host_search/host_gpu.py [--bars] [--shapes 32768x4] [--lanes 1,2] [--waves 0]

The model is transformers' Llama in the shape of Llama-3.1-8B with random weights, bfloat16, and every session has a
random context of its own, as in `decode_gpu.py`; keys and values are in host memory that the GPU reads, tables in the
host's too, those of as many layers as fit into `--host-gb`.
Steps run through the engine's own graphs, mailboxes and threads, a batch in one lane or split into several.

`step_ms` is a step with everything around it (median, wall clock), `p99_ms` the 99th percentile. `lane_wait_ms` is what
the launches that wait counted in a lane, where another lane may compute meanwhile; `still_ms` the time in which no lane
did anything but wait, by the device's clock in as many further steps, and `wait` the share of the step that it is.
`device_ms` is the same replays with all lists there before they are asked for and their rows in slots: what the GPU
has to compute; `host_mb` are fetched in a step besides. `table_mb` are read by the search of a step, `read_gb_s` is
what the same threads read in the same run when they do nothing else (`search_cpu.py`), and `model_ms` follows: device
and search one after the other in one lane, the longer of both in several.

Before times are reported, the lists of the last layer of every session must be those that the general path selects for
the queries that the device has posted, and logits of the step must be near those of the general path (where rounding
to bfloat16 changes which keys are selected).

One JSON line per figure; the exit code is 1 when one fails, or when --bars is given and two lanes or more, in as many
waves as they are served in, wait for 10 % of a step or longer at 32,768 tokens, batch 4.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.checks import compare, failure
from harness.made_up.contexts import PlacedContexts, make_ranges, release
from harness.made_up.random_model import make_model
from harness.parsing import parse_counts, parse_method, parse_shapes
from harness.report import reporting
from harness.steps.captured_steps import Lanes, tidy_up, time_captured
from harness.steps.general_steps import first_tokens, forward, start_sessions
from search_cpu import read_us
from torch import Tensor

from decode_engine.host_search.mailbox import SearchThreads, usual_waves
from decode_engine.settings.command_options import search_cores
from decode_engine.steps.step_graph import step_model
from index_store.indexes.query_tables.parameters import TableParameters
from index_store.memory.placement import HOST_SEARCHED, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method

TURNS = 25
TOLERANCE = 0.35
"""Root mean square of the difference of logits, relative to their spread."""
WAIT_BAR, BAR_SHAPE = 0.1, (32768, 4)
_READ_BYTES = 2**22


def table_bytes(contexts: Sequence[ResidentContext], method: Method) -> int:
    """That the search of one step reads."""
    if method.index is None:
        return 0
    subspaces = TableParameters.parse(method.index.parameters).subspaces
    total = 0
    for manifest in (context.manifest for context in contexts):
        model = manifest.model
        queries = 1 if method.search.get("group") == "pooled" else model.query_heads // model.kv_heads
        total += model.layers * model.kv_heads * queries * subspaces * manifest.token_count
    return total


def read_bandwidth(contexts: Sequence[ResidentContext], method: Method, threads: int) -> float:
    """GB/s at which so many threads read tables."""
    name = "" if method.index is None else method.index.name
    tables = [context.index(name, 0).arrays()["scores"] for context in contexts]
    return _READ_BYTES / read_us(tables, _READ_BYTES, threads) / 1e3


class Bench:
    """The model, and the contexts of a shape."""

    def __init__(
        self, model: Any, run: Any, contexts: list[ResidentContext], threads: int, turns: int
    ) -> None:
        self._model, self._run, self._contexts = model, run, contexts
        self._threads, self._turns = threads, turns

    def shared(self, method: Method) -> tuple[Tensor, float]:
        """What all figures of a method need: logits of the general path, and GB/s at which threads read tables."""
        sessions = start_sessions(self._contexts, method)
        expected_BV = forward(self._model, sessions, first_tokens(self._contexts))
        return expected_BV, read_bandwidth(self._contexts, method, self._threads)

    def measure(
        self, method: Method, expected_BV: Tensor, bandwidth: float, lane_count: int, waves: int
    ) -> dict[str, Any]:
        """The figures of one method in so many lanes. Raises CheckFailedError for wrong logits or lists."""
        searching = SearchThreads(self._threads, lane_count, waves)
        try:
            lanes = Lanes(self._run, self._model, self._contexts, searching)
            lanes.start(method)
            lanes.step(first_tokens(self._contexts))
            difference = compare(lanes.logits(), expected_BV, TOLERANCE)
            timed = time_captured(lanes, method, self._turns)
            still_ms, device_ms = lanes.standing_still_ms(timed.tokens, self._turns), lanes.device_ms()
        finally:
            searching.close()
        table_mb = table_bytes(self._contexts, method) * 1e-6
        search_ms = table_mb / bandwidth
        model_ms = device_ms + search_ms if lane_count == 1 else max(device_ms, search_ms)
        steps = timed.steps()
        return {
            **steps,
            "host_mb": timed.moved()["host_mb"],
            "lane_wait_ms": round(timed.waited_s / len(timed.seconds) * 1e3, 3),
            "still_ms": round(still_ms, 3),
            "wait": round(still_ms / steps["step_ms"], 4),
            "device_ms": round(device_ms, 3),
            "table_mb": round(table_mb, 1),
            "read_gb_s": round(bandwidth, 1),
            "model_ms": round(model_ms, 3),
            "logits_difference": round(difference, 4),
        }


def method_figures(
    bench: Bench, method: Method, lane_counts: Sequence[int], wave_counts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A row for each number of waves and lanes, its error where it fails."""
    lacking: dict[str, str] = {}
    shared: tuple[Tensor, float] | None = None
    try:
        shared = bench.shared(method)
    except Exception as error:
        lacking = failure(error)
    for waves, lanes in itertools.product(wave_counts, lane_counts):
        row: dict[str, Any] = {"waves": waves, "lanes": lanes}
        try:
            row |= lacking if shared is None else bench.measure(method, *shared, lanes, waves)
        except Exception as error:  # others may well run
            row |= failure(error)
        tidy_up()
        yield row


def main(
    methods: Annotated[str, typer.Option(help="Comma-separated; see decode_gpu.py.")] = (
        "csattention+dropped:0.01/m8/pooled,csattention:0.01/pooled,csattention:0.01"
    ),
    shapes: Annotated[str, typer.Option(help="LENGTHxBATCH, comma-separated.")] = "32768x4",
    lanes: Annotated[str, typer.Option(help="Numbers of lanes, comma-separated.")] = "1,2",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    threads: Annotated[int, typer.Option(help="Threads that search, 0 for all cores but two.")] = 0,
    turns: Annotated[int, typer.Option(help="Steps that are timed.")] = TURNS,
    waves: Annotated[
        str,
        typer.Option(help="Parts in which lists of a layer are waited for, comma-separated; 0: as served."),
    ] = "0",
    host_gb: Annotated[
        float, typer.Option(help="Page-locked for keys and values, and again for each kind of tables.")
    ] = 8.6,
    bars: Annotated[bool, typer.Option(help="Fail when a figure misses its bar.")] = False,
) -> None:
    """Times decode steps that are searched for on the host."""
    listed, sizes = {label: parse_method(label) for label in methods.split(",")}, parse_shapes(shapes)
    for label, method in listed.items():
        if method.index is None or method.index.kind not in HOST_SEARCHED:
            raise typer.BadParameter(f"{label}: the host searches query tables and nothing else")
    lane_counts, wave_counts = parse_counts(lanes), parse_counts(waves, least=0)
    threads = threads or search_cores()
    with reporting("host_gpu", bars) as report:
        model, identity = make_model(layers)
        ranges = make_ranges(host_gb, list(listed.values()))
        run = step_model(model)
        for length, batch in sizes:
            placed = PlacedContexts(identity, list(listed.values()), length, batch, model.device, ranges)
            contexts = placed.make(Placement.HOST)
            placed.release()
            tidy_up()
            bench = Bench(model, run, contexts, threads, turns)
            fitting = [count for count in lane_counts if count <= batch]
            for label, method in listed.items():
                for row in method_figures(bench, method, fitting, wave_counts):
                    line: dict[str, Any] = {
                        "figure": "host", "method": label, "tokens": length, "batch": batch, "layers": layers,
                        "threads": threads,
                    } | row  # fmt: skip
                    report.add(line, *missed(line))
            release(contexts)


def missed(line: Mapping[str, Any]) -> list[str]:
    """What a figure falls short of."""
    served = (0, usual_waves(-(-line["batch"] // line["lanes"])))
    barred = (line["tokens"], line["batch"]) == BAR_SHAPE and line["lanes"] > 1 and line["waves"] in served
    wait = line.get("wait", 0.0)
    return (
        [f"{line['method']}: waits for {wait:.1%}, bar {WAIT_BAR:.0%}"] if barred and wait >= WAIT_BAR else []
    )


if __name__ == "__main__":
    typer.run(main)
