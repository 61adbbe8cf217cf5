"""Exact decode attention of many sessions on one context on a GPU, against torch's attention to it with all queries.

usage: python ops/bench/one_layer/shared_gpu.py [--bars] [--figures one-128k,mixed] [--head-dim 256] [--group 16]
    [--flashinfer] [--rows int8]

Regime: one layer of a decode step, 8 KV heads with 4 query heads each or as many as --group says, head dimension 128
or, with --head-dim, 64 or 256, bfloat16; contexts in the GPU's memory, sessions with tails of 64 keys of their own. Two
layers' worth or more take turns, so that no step finds its data in the second-level cache. Numbers are random: time
does not depend on what they mean.

With `--rows int8` contexts have their rows in 8 bits, and torch reads what these decode to.

`one-LENGTH`: 1, 4, 16 and 64 sessions on one context. `mixed`: 8, 4, 2, 1 and 1 sessions on five contexts of 128K keys.

`graph_us` is one layer inside a CUDA graph of all of them, with tails and the merge. `torch_us` is the fastest of
torch's cuDNN, flash and memory-efficient attention, over keys and values as they are stored and over separate copies,
with the queries of a context's sessions packed as one sequence, [1, KV heads, sessions x group, d], and no mask; of a
mixed batch, the sum over its contexts. It leaves out tails, and merging them: these are in our times alone. `ratio` is
our time over torch's, 1.05 at most is asked for; `over_one` is our time over the best of one session, by either (1.15
for 16 sessions). `byte_us` is the time of reading contexts and tails once at a plain copy's bandwidth, and `over_bytes`
our time over it (1.1 for the mixed batch). Before a time is reported, the output of the first, a middle and the last
session is compared with float64 attention to context and tail.

--flashinfer also times FlashInfer (`pip install flashinfer-python`), where all sessions are on one context.
`flashinfer_single_us` is its attention of one sequence over keys and values as they are stored; as with torch the
queries of all sessions are the sequence, and there are no tails. `flashinfer_cascade_us` is its cascade of two levels,
context and tails, with the merge, over pages that are copied beforehand; it is planned beforehand, too. Both outputs
are compared like ours. `flashinfer_float8_us` is full attention over a copy in 8 bits, with the queries packed and
without tails: the fastest of the ways in `flashinfer_baseline`, and `flashinfer_paged_us` the same in the dtype of keys
and values; ways that are refused or wrong are told. Ratios and bars do not depend on them. `flashinfer` is its version.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.flashinfer_baseline import flashinfer_us, load_flashinfer, paged_us
from harness.layer import COLD_BYTES, DEVICE, DTYPE, GROUP, HEAD_DIM, KV_HEADS, step_plan
from harness.report import check_close, failure, reporting
from harness.timing import copy_bandwidth, fastest, graph_us, packed_attention_us
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.shared_attention import Seat, shared_shape
from decode_engine.kernels.coarse.reference import CoarseSequence
from decode_engine.kernels.families import ATTENTION
from decode_engine.steps.attention.listed_steps import DenseSteps
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.parameters import BLOCK, value_groups
from index_store.indexes.coarse_rows.two_planes import TwoPlanes, find_low_plane
from index_store.methods.presets import METHODS
from index_store.store.description.dtypes import AS_DTYPE, INT8, ROW_CODINGS

TAIL = 64
RATIO_BAR, ONE_BAR, BYTES_BAR = 1.05, 1.15, 1.1


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured. groups: how many sessions each context has."""

    name: str
    length: int
    groups: tuple[int, ...]

    @property
    def sessions(self) -> int:
        return sum(self.groups)

    def contexts(self) -> list[int]:
        """Of every session."""
        return [number for number, count in enumerate(self.groups) for _ in range(count)]


FIGURES = (
    *(
        Figure(f"one-{length // 1024}k", length, (sessions,))
        for length in (32768, 131072, 524288)
        for sessions in (1, 4, 16, 64)
    ),
    Figure("mixed", 131072, (8, 4, 2, 1, 1)),
)


class SharedMemory:
    """Contexts, queries and tails of several layers, for as many sessions as the largest figure has."""

    def __init__(
        self,
        length: int,
        contexts: int,
        sessions: int,
        head_dim: int = HEAD_DIM,
        group: int = GROUP,
        coded: bool = False,
    ) -> None:
        groups = value_groups(head_dim, BLOCK)
        coded_bytes = 2 * head_dim + 4 * groups + 4 * head_dim // BLOCK
        self.row_bytes = coded_bytes if coded else 2 * head_dim * DTYPE.itemsize
        self.layers = max(2, min(8, -(-COLD_BYTES // (contexts * KV_HEADS * length * self.row_bytes))))

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_()

        self.kv = normal(self.layers, contexts, KV_HEADS, length, 2, head_dim)
        self.q = 3 * normal(self.layers, sessions, KV_HEADS, group, head_dim)
        self.tail = normal(sessions, KV_HEADS, TAIL, 2, head_dim)
        self.planes: list[list[TwoPlanes]] = []
        for layer in self.kv if coded else ():
            self.planes.append([])
            for kv in layer:
                coarse = code_rows(kv, 0, 4, 4, groups)
                self.planes[-1].append(TwoPlanes(coarse, find_low_plane(kv, coarse), DTYPE))
                for head in range(KV_HEADS):
                    some = slice(head, head + 1)
                    kv[some] = self.planes[-1][-1].heads(some).decode(0, length).to(DTYPE)

    def records(self, layer: int, contexts: Sequence[int]) -> Tensor:
        """[B, RECORD_FIELDS] on the device, for sessions on these contexts."""
        rows = torch.zeros(len(contexts), records.RECORD_FIELDS, dtype=torch.int64)
        for b, context in enumerate(contexts):
            for address, found in ((records.KV, self.kv[layer, context]), (records.TAIL, self.tail[b])):
                rows[b, address] = found.data_ptr()
                rows[b, address + 1] = found.stride(0) * found.element_size()
            if self.planes:
                planes = self.planes[layer][context]
                fields = CoarseSequence(planes.coarse, 0, self.kv.shape[3], 0).fields()
                fields |= {records.KV: planes.data_ptr(), records.KV_HEAD: planes.low_HN2C.stride(0)}
                for field, value in fields.items():
                    rows[b, field] = value
            rows[b, records.KEYS], rows[b, records.TAIL_KEYS] = self.kv.shape[3], TAIL
        return rows.to(DEVICE)


def check_sessions(
    memory: SharedMemory, figure: Figure, what: str, out_BHGD: Tensor, tails: bool = True, layer: int = 0
) -> None:
    """Of the first, a middle and the last session. tails: attended to as well. Raises CheckFailedError."""
    contexts = figure.contexts()
    for b in {0, figure.sessions // 2, figure.sessions - 1}:
        for h in range(KV_HEADS):
            kv = memory.kv[layer, contexts[b], h]
            kv = (torch.cat([kv, memory.tail[b, h]]) if tails else kv).double()
            logits = memory.q[layer, b, h].double() @ kv[:, 0].t() * kv.shape[2] ** -0.5
            check_close(f"{what} {b}", out_BHGD[b, h], logits.softmax(-1) @ kv[:, 1], 2e-2)


class Bench:
    """The steps of a figure."""

    def __init__(self, memory: SharedMemory, figure: Figure) -> None:
        self.memory, self.figure = memory, figure
        self.contexts = figure.contexts()
        group, head_dim = memory.q.shape[3:]
        plan = step_plan(
            METHODS["full"], memory.layers, figure.sessions, figure.length, head_dim=head_dim, group=group
        )
        self.attention = DenseSteps(replace(plan, planes=bool(memory.planes)))
        seats = [Seat(b, context, figure.length, TAIL) for b, context in enumerate(self.contexts)]
        self.attention.arrange(seats, False)
        self.records = [memory.records(layer, self.contexts) for layer in range(memory.layers)]

    def attend(self, layer: int) -> Tensor:
        queries = self.memory.q[layer, : self.figure.sessions]
        return self.attention.attend(layer, queries, self.records[layer])

    def check(self, layer: int = 0) -> None:
        """Raises CheckFailedError."""
        check_sessions(self.memory, self.figure, "session", self.attend(layer), layer=layer)

    def microseconds(self) -> float:
        """Of a layer, after a check."""
        self.check()
        steps = [partial(self.attend, layer) for layer in range(self.memory.layers)]
        return graph_us(steps, max(1, 8 // len(steps)))


def packed_us(memory: SharedMemory, figure: Figure) -> dict[str, float]:
    """Torch's time of each backend and layout, summed over the contexts."""
    kv, found = memory.kv, {}
    for number, count in enumerate(figure.groups):
        if count in found:
            continue
        q = memory.q[:, :count].permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()
        found[count] = packed_attention_us(q[:, None], kv[:, number, None])
    names = set.intersection(*(set(times) for times in found.values()))
    return {name: sum(found[count][name] for count in figure.groups) for name in sorted(names)}


def measure(memory: SharedMemory, figure: Figure, bandwidth: float, flashinfer: bool) -> dict[str, Any]:
    """The figure's row. Raises CheckFailedError for a wrong output."""
    group, head_dim = memory.q.shape[3:]
    shape = shared_shape(group, head_dim, bool(memory.planes), figure.sessions)
    row: dict[str, Any] = {
        "figure": figure.name,
        "tokens": figure.length,
        "sessions": figure.sessions,
        "groups": list(figure.groups),
        "layers": memory.layers,
        "head_dim": head_dim,
        "group": group,
        "graph_us": Bench(memory, figure).microseconds(),
    }
    packed = packed_us(memory, figure)
    best = fastest(packed)
    nbytes = (len(figure.groups) * figure.length + figure.sessions * TAIL) * KV_HEADS * memory.row_bytes
    row |= {"torch_us": best["full_us"], "torch_backend": best["full_backend"], "bytes": nbytes}
    row["byte_us"] = nbytes / bandwidth * 1e6
    row["ratio"] = row["graph_us"] / row["torch_us"]
    row["over_bytes"] = row["graph_us"] / row["byte_us"]
    if flashinfer and len(figure.groups) == 1:
        count, check = figure.sessions, partial(check_sessions, memory, figure)
        row |= flashinfer_us(memory.q[:, :count], memory.kv[:, 0], memory.tail[:count], check)
        for name, dtype in (("float8", torch.float8_e4m3fn), ("paged", memory.kv.dtype)):
            ways, left_out = paged_us(memory.q[:, :count], memory.kv, dtype)
            row |= {f"flashinfer_{name}_us": min(ways.values()), f"flashinfer_{name}_ways_us": ways}
            row[f"flashinfer_{name}_left_out"] = left_out
    return row | {"torch_backends_us": packed, "launch": asdict(shape), "copy_tb_per_s": bandwidth / 1e12}


def missed(row: dict[str, Any]) -> list[str]:
    """What a figure falls short of."""
    name, found = f"{row['figure']}, {row['sessions']} sessions", []
    if row["figure"] == "mixed":
        if row["over_bytes"] > BYTES_BAR:
            found.append(f"{name}: {row['over_bytes']:.2f} of the bytes' time, bar {BYTES_BAR}")
    elif row["ratio"] > RATIO_BAR:
        found.append(f"{name}: {row['ratio']:.2f} of torch's time, bar {RATIO_BAR}")
    if row["sessions"] == 16 and row.get("over_one", 0.0) > ONE_BAR:
        found.append(f"{name}: {row['over_one']:.2f} of one session's time, bar {ONE_BAR}")
    return found


def rows_of(
    figures: Sequence[Figure],
    head_dim: int,
    group: int,
    bandwidth: float,
    flashinfer: bool,
    coded: bool,
) -> Iterator[dict[str, Any]]:
    """Of figures that share a memory; an error does not end the others."""
    sessions = max(figure.sessions for figure in figures)
    memory = SharedMemory(figures[0].length, len(figures[0].groups), sessions, head_dim, group, coded)
    one: float | None = None
    for figure in figures:
        try:
            row = measure(memory, figure, bandwidth, flashinfer)
        except Exception as error:
            yield {"figure": figure.name, "tokens": figure.length, "sessions": figure.sessions} | failure(
                error
            )
            continue
        if figure.groups == (1,):
            one = min(row["graph_us"], row["torch_us"])
        yield row if one is None else row | {"over_one": row["graph_us"] / one}


def main(
    figures: Annotated[str, typer.Option(help="Names or prefixes, comma-separated; empty: all.")] = "",
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a figure misses its bar.")] = False,
    head_dim: Annotated[int, typer.Option(help="Channels of a head: 64, 128 or 256.")] = HEAD_DIM,
    group: Annotated[int, typer.Option(help="Query heads of a KV head: 1 to 16.")] = GROUP,
    flashinfer: Annotated[
        bool, typer.Option("--flashinfer", help="Also time FlashInfer, on one context.")
    ] = False,
    rows: Annotated[str, typer.Option(help="Of contexts: dtype or int8.")] = AS_DTYPE,
) -> None:
    """Times one layer's exact decode attention of many sessions on one context; one JSON line per figure."""
    prefixes = tuple(figures.split(",")) if figures else ("",)
    refusal = ATTENTION.refusal(group, head_dim)
    if refusal is not None:
        raise typer.BadParameter(refusal)
    if flashinfer:
        load_flashinfer()  # refused before any work where it is missing
    if rows not in ROW_CODINGS:
        raise typer.BadParameter(f"rows are {rows!r}, expected one of {', '.join(ROW_CODINGS)}")
    chosen = [figure for figure in FIGURES if figure.name.startswith(prefixes)]
    with reporting("shared_gpu", bars) as report:
        torch.manual_seed(0)
        bandwidth = copy_bandwidth()
        for _, some in groupby(chosen, key=lambda figure: figure.name):
            for row in rows_of(list(some), head_dim, group, bandwidth, flashinfer, rows == INT8):
                report.add(row, *(missed(row) if "error" not in row else ()))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
