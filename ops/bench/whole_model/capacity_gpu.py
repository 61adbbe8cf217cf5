"""Capacity of one GPU as users buy it: tokens a second, and time a token, against sessions on contexts of their own.

usage: python ops/bench/whole_model/capacity_gpu.py --lengths 128k --out DIR [--cases full@device,refined:0.01@hybrid]
       python ops/bench/whole_model/capacity_gpu.py --lengths 32k --out DIR --also DIR/capacity_128k.jsonl

The model has the shape of Llama-3.1-8B with random weights, contexts are random, and steps run in flight through the
engine's own graphs, as in `decode_gpu.py`. A case is `METHOD@WHERE`, with `/int8` over exact rows in 8 bits, and with
`/slots64` one slot for so many rows in host memory, as `serve --slot-share` says:

- `full`: our own full attention over bfloat16; over rows in 8 bits with `/int8`.
- `float8`: full attention over a cache in float8 by FlashInfer (`pip install flashinfer-python`), the faster of the
  ways in `flashinfer_baseline`, without tails.
- methods as in `decode_gpu.py`; `/2bits` before the `@` is their coarse copy in 2 bits. WHERE is `device` or `hybrid`.

How many sessions fit is counted as the engine counts (`sessions_gpu.py`): weights, contexts, slots, buffers of batches,
and 512 tokens of each session, in the card's memory but for a twentieth, and in `--host` of host memory for `hybrid`.
A cache in float8 counts a byte for each number. Every case is timed with 1, 4, 16 and 64 sessions as far as they fit,
and with as many as fit, which ends its line. Several layers' worth of contents take turns over the model's layers, so
what is timed takes less memory than what is counted; no session shares contents with another one in any layer.
Before anything is timed, the logits of each case with one session and a budget of all keys are compared with those of
full attention to the same contexts by the general path; of `float8` the attention itself is.

Bars: with as many sessions as `float8` holds, the best case has 1.8 times its tokens a second; and a case in `hybrid`
holds three times as many, each at 10 tokens a second or more.

One JSON line per figure, also in `DIR/capacity_LENGTH.jsonl`; a table and a picture of them, and of those of `--also`,
in `DIR/capacity.md` and `DIR/capacity.png`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.flashinfer_baseline import float8_steps
from harness.made_up.contexts import PlacedContexts, make_model, make_ranges, release, weight_bytes
from harness.made_up.sessions import Served, describe_context, most_sessions
from harness.parsing import parse_counts, parse_method
from harness.report import failure, reporting
from harness.steps.captured_steps import (
    SteppedSessions,
    tidy_up,
    time_captured,
    time_flight,
    whole_difference,
)
from harness.steps.general_steps import full_logits

from decode_engine.evaluation.pictures import check_pictures
from decode_engine.evaluation.tasks.documents import parse_length
from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.settings.command_options import search_cores
from decode_engine.steps import batch_kinds
from decode_engine.steps.step_graph import StepModel, step_model
from decode_engine.steps.stepper import MAX_ROWS
from index_store.memory.memory_sizes import parse_size
from index_store.memory.placement import SLOT_SHARE, MemoryBytes, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE, INT8
from index_store.store.description.manifest import Manifest

CASES = (
    "full@device,full@device/int8,float8@device,refined:0.01@device,refined:0.01@device/int8,"
    "refined:0.01/2bits@device,refined:0.0025@hybrid,refined:0.0025@hybrid/int8,refined:0.0025/2bits@hybrid,"
    "refined:0.0025/2bits@hybrid/int8/slots64"
)
COUNTS = "1,4,16,64"
SESSION_TOKENS = 512
SPARE = 1 / 20
SECONDS = 2.0
"""After which no further steps of a figure are begun."""

BASELINE = "float8@device"
LEAST_GAIN, LEAST_MORE, LEAST_RATE = 1.8, 3, 10.0


@dataclass(frozen=True, slots=True)
class Case:
    """A method over rows of one kind in a placement."""

    name: str
    label: str
    placement: Placement
    rows: str
    slot_share: int = SLOT_SHARE

    @classmethod
    def parse(cls, text: str) -> Case:
        """METHOD@WHERE[/int8][/slotsN]. Raises typer.BadParameter for anything else."""
        found = re.fullmatch(r"(.+)@(device|hybrid)(/int8)?(?:/slots([1-9]\d*))?", text)
        if not found or (found[1] == "float8" and not text.endswith("@device")):
            raise typer.BadParameter(
                f"case is {text!r}, expected METHOD@device or METHOD@hybrid, with /int8, /slots64 or without"
            )
        label, place, rows, slots = found.groups()
        if label == "full" and place == "hybrid":
            raise typer.BadParameter(f"{text}: each step would read all contexts from host memory")
        return cls(text, label, Placement(place), INT8 if rows else AS_DTYPE, int(slots or SLOT_SHARE))

    @property
    def method(self) -> Method:
        return parse_method("full" if self.label == "float8" else self.label)

    def served(self, identity: ModelIdentity, tokens: int) -> Served:
        """What its sessions take."""
        manifest = describe_context(identity, self.method, tokens, self.rows)
        kind = Float8Served if self.label == "float8" else Served
        return kind(manifest, self.method, self.placement, SESSION_TOKENS, self.slot_share)


class Float8Served(Served):
    """Of a cache in float8: a byte for each number."""

    @property
    def context(self) -> MemoryBytes:
        """Keys and values."""
        return MemoryBytes(device=kv_numbers(self.manifest))


def kv_numbers(manifest: Manifest) -> int:
    """Numbers of all keys and values of a context."""
    model = manifest.model
    return 2 * model.layers * model.kv_heads * model.head_dim * manifest.token_count


@dataclass(frozen=True, slots=True)
class Figure:
    """A case with so many sessions. most: that fit; limit: what the next one lacks."""

    case: Case
    tokens: int
    sessions: int
    most: int
    limit: str

    def line(self) -> dict[str, Any]:
        return {"case": self.case.name, "tokens": self.tokens, "sessions": self.sessions} | {
            "most": self.most, "limit": self.limit
        }  # fmt: skip


def planned(
    cases: Sequence[Case],
    identity: ModelIdentity,
    tokens: int,
    room: MemoryBytes,
    counts: Sequence[int],
    most: int,
) -> list[Figure]:
    """What is to be timed, by what it is made of: rows, placement and sessions."""
    figures = []
    for case in cases:
        fits, limit = most_sessions(case.served(identity, tokens), room, shared=False)
        held = min(fits, most, MAX_ROWS if case.label == "float8" else most)
        for count in sorted({*(each for each in counts if each < held), held} - {0}):
            figures.append(Figure(case, tokens, count, fits, limit))
    return sorted(figures, key=made_of)


def made_of(figure: Figure) -> tuple[str, str, int, int]:
    """Figures of one kind are timed on the same contexts."""
    case = figure.case
    return case.rows, case.placement.value, case.slot_share, figure.sessions


class Bench:
    """The model and its steps."""

    def __init__(self, model: Any, run: StepModel, threads: SearchThreads, turns: int) -> None:
        self._model, self._run, self._threads, self._turns = model, run, threads, turns

    def time(
        self, figure: Figure, contexts: Sequence[ResidentContext], expected: torch.Tensor | None
    ) -> dict[str, Any]:
        """Figures of a case. Raises CheckFailedError for wrong logits. expected: those of full attention."""
        case, method = figure.case, figure.case.method
        stand_in = float8_steps(contexts) if case.label == "float8" else None
        with nullcontext() if stand_in is None else patch.object(batch_kinds, "DenseSteps", stand_in):
            stepped = SteppedSessions(self._run, self._model, contexts, self._threads)
            row: dict[str, Any] = {}
            if expected is not None and stand_in is None:
                row["logits_difference"] = whole_difference(stepped, method, expected)
            timed = time_captured(stepped, method, self._turns, SECONDS)
            row |= timed.steps() | time_flight(stepped, method, self._turns, timed.said)
        token_ms = row.get("flight_ms", row["step_ms"])
        moved = timed.moved() if contexts[0].placement.kv_on_host else {}
        return (
            row | moved | {"token_ms": token_ms, "tokens_per_s": round(figure.sessions / token_ms * 1e3, 1)}
        )

    def of_kind(
        self, figures: Sequence[Figure], identity: ModelIdentity, host_gb: float
    ) -> Iterator[dict[str, Any]]:
        """A line for each figure over contexts of one kind, its error where it fails."""
        first = figures[0]
        placement, device = first.case.placement, self._model.device
        contexts: list[ResidentContext] = []
        error: dict[str, str] | None = None
        expected: torch.Tensor | None = None
        try:
            ranges = make_ranges(host_gb) if placement.kv_on_host else []
            methods = list(
                {
                    figure.case.method.name + figure.case.label: figure.case.method for figure in figures
                }.values()
            )
            share, rows = first.case.slot_share, first.case.rows
            placed = PlacedContexts(
                identity, methods, first.tokens, first.sessions, device, ranges, slot_share=share, rows=rows
            )
            if first.sessions == 1:
                in_device = placed.make(Placement.DEVICE)
                expected = full_logits(self._model, in_device)
                release(in_device)
            contexts = placed.make(placement)
            placed.release()
        except Exception as found:
            error = failure(found)
        for figure in figures:
            try:
                found_row = error or self.time(figure, contexts, expected)
            except Exception as found:  # others may well run
                found_row = failure(found)
            tidy_up()
            yield figure.line() | found_row
        release(contexts)
        tidy_up()


def falls_short(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How lines of one length miss the bars; nothing where the baseline was not timed."""
    timed = [row for row in rows if "token_ms" in row]
    base = max(
        (row for row in timed if row["case"] == BASELINE), key=lambda row: row["sessions"], default=None
    )
    if base is None:
        return []
    missed = []
    beside = [row for row in timed if row["sessions"] == base["sessions"] and row["case"] != BASELINE]
    gain = max((row["tokens_per_s"] for row in beside), default=0.0) / base["tokens_per_s"]
    if gain < LEAST_GAIN:
        missed.append(
            f"{base['tokens']} tokens: {gain:.2f}x of {BASELINE} with {base['sessions']} sessions, bar {LEAST_GAIN}x"
        )
    fast = [
        row["sessions"]
        for row in timed
        if "hybrid" in row["case"] and row["tokens_per_s"] >= LEAST_RATE * row["sessions"]
    ]
    wanted, held = LEAST_MORE * base["sessions"], max(fast, default=0)
    if held < wanted:
        missed.append(
            f"{base['tokens']} tokens: {held} sessions in hybrid at {LEAST_RATE:.0f} tokens/s, bar {wanted}"
        )
    return missed


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: for each length and case how many fit, and milliseconds and tokens a second by sessions."""
    counts = sorted({row["sessions"] for row in rows if row["sessions"] < row["most"]})
    head = ["tokens", "case", "fit", *(f"{count} sessions" for count in counts), "as many as fit"]
    lines = [head, ["---"] * len(head)]
    for (tokens, case), group in groupby(
        sorted(rows, key=lambda row: (row["tokens"], row["case"])),
        key=lambda row: (row["tokens"], row["case"]),
    ):
        own = list(group)
        cells = {row["sessions"]: cell(row) for row in own}
        last = max(own, key=lambda row: row["sessions"])
        listed = [cells.get(count, "") for count in counts]
        end = f"{last['sessions']}: {cells[last['sessions']]}" if last["sessions"] == last["most"] else ""
        lines.append([f"{tokens:,}", f"`{case}`", f"{own[0]['most']} ({own[0]['limit']})", *listed, end])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(row: Mapping[str, Any]) -> str:
    return f"{row['token_ms']:.2f} ms, {row['tokens_per_s']:,.0f}/s" if "token_ms" in row else "failed"


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Tokens a second and milliseconds a token by sessions, a column a length; a line ends where memory is full."""
    import matplotlib.pyplot as plt

    timed = [row for row in rows if "token_ms" in row]
    lengths = sorted({row["tokens"] for row in timed})
    figure, axes = plt.subplots(
        2,
        len(lengths),
        figsize=(6.2 * len(lengths) + 0.4, 8.4),
        sharex="col",
        squeeze=False,
        layout="constrained",
    )
    colours = {case: f"C{number}" for number, case in enumerate(dict.fromkeys(row["case"] for row in timed))}
    for column, tokens in enumerate(lengths):
        for case, colour in colours.items():
            own = sorted(
                (row for row in timed if (row["tokens"], row["case"]) == (tokens, case)),
                key=lambda row: row["sessions"],
            )
            full = [row for row in own if row["sessions"] == row["most"]]
            for place, name in zip(axes[:, column], ("tokens_per_s", "token_ms"), strict=True):
                dashed = "--" if case.startswith(("full", "float8")) else "-"
                place.plot(
                    [row["sessions"] for row in own],
                    [row[name] for row in own],
                    dashed,
                    marker="o",
                    markersize=4,
                    color=colour,
                    label=case,
                )
                place.plot(
                    [row["sessions"] for row in full],
                    [row[name] for row in full],
                    "X",
                    markersize=11,
                    color=colour,
                )
                place.set_xscale("log", base=2)
                place.xaxis.set_major_formatter("{x:.0f}")
                place.grid(alpha=0.3)
        axes[0][column].set_title(f"{tokens:,} tokens a session")
        axes[0][column].set_ylabel("tokens a second, all sessions")
        axes[1][column].set_ylabel("milliseconds a token")
        axes[1][column].set_xlabel("sessions, each on a context of its own (X: memory is full)")
    for place in axes.flat:
        place.set_ylim(bottom=0)
    axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    out: Annotated[Path, typer.Option(help="Folder for lines, table and picture.")] = Path("capacity"),
    lengths: Annotated[str, typer.Option(help="Of contexts, comma-separated: 32k,128k.")] = "32k,128k",
    cases: Annotated[str, typer.Option(help="METHOD@WHERE[/int8][/slotsN], comma-separated.")] = CASES,
    counts: Annotated[str, typer.Option(help="Of sessions, beside as many as fit.")] = COUNTS,
    most: Annotated[int, typer.Option(help="Sessions at most.")] = 2 * MAX_ROWS,
    host: Annotated[str, typer.Option(help="Bytes of host memory for contexts.")] = "1TiB",
    device: Annotated[str, typer.Option(help="Of GPU memory for everything; by default the card's.")] = "",
    host_gb: Annotated[float, typer.Option(help="Page-locked for contents of contexts in hybrid.")] = 17.2,
    layers: Annotated[int, typer.Option(help="Of the model.")] = 32,
    turns: Annotated[int, typer.Option(help="Steps that are timed of each figure.")] = 20,
    also: Annotated[list[Path], typer.Option(help="Lines of earlier runs, for table and picture.")] = [],  # noqa: B006
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a bar is missed.")] = False,
) -> None:
    """Times steps of every case with growing numbers of sessions."""
    chosen, sizes = (
        [Case.parse(text) for text in cases.split(",")],
        [parse_length(each) for each in lengths.split(",")],
    )
    check_pictures()
    with reporting("capacity_gpu", bars) as report:
        out.mkdir(parents=True, exist_ok=True)
        model, identity = make_model(layers)
        whole = parse_size(device) if device else int(card_bytes() * (1 - SPARE))
        room = MemoryBytes(parse_size(host), whole - weight_bytes(model))
        bench = Bench(model, step_model(model), threads := SearchThreads(search_cores()), turns)
        for tokens in sizes:
            figures = planned(chosen, identity, tokens, room, parse_counts(counts), most)
            begin = len(report.rows)
            with (out / f"capacity_{tokens}.jsonl").open("w", encoding="utf-8") as lines:
                for _, kind in groupby(figures, key=made_of):
                    for row in bench.of_kind(list(kind), identity, host_gb):
                        report.add(row)
                        lines.write(json.dumps(report.rows[-1]) + "\n")
                        lines.flush()
            report.missed += falls_short(report.rows[begin:])
        threads.close()
        rows = [json.loads(line) for path in also for line in path.read_text().splitlines()] + report.rows
        (out / "capacity.md").write_text(table_of(rows), encoding="utf-8")
        draw(out / "capacity.png", rows)


def card_bytes() -> int:
    """Of the GPU's memory."""
    return int(torch.cuda.get_device_properties(0).total_memory)


if __name__ == "__main__":
    typer.run(main)
