"""What sessions on one context list: recorded from a trained model, and how many rows of host memory their steps read.

usage: python ops/bench/whole_model/shared_lists.py --out DIR [--context-length 32k] [--method pq+dropped:0.01]
       [--device cuda] [--lists FILE]

Regime: the packaged reader, the packaged novels' first tokens as the context, prefilled by prefill-worker's command.
Every session reads a prompt of its own from later pages and samples tokens with temperature 1. What the searches of all
layers list is recorded, and written to `--lists` for `placements_gpu.py --lists`, which replays it.

Then slots are simulated, as many as `--slots` shares of the context's rows say (1 in 16 is what a context has): `each`
session reads what it misses by itself, or a row that several miss is read `once`. A row is the key and the value of
one token for one KV head. Of the rows that sessions want in a step, `union` is the share that is left when those that
several want count once, `read` the share that is read from host memory, `bypassed` that of rows without a slot, which
every session reads in place. `mb` are these reads of a step at an 8B shape (32 layers, 8 KV heads, rows of 512 bytes)
whose lists are as long in the context as those recorded, and `ms` the time that they take at 50 GB/s.

One JSON line per number of sessions, share of slots, and way to read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.parsing import parse_counts, parse_method
from harness.report import reporting
from harness.steps.recorded_lists import RecordedLists, count_rows, record_lists

from decode_engine.evaluation.prefill_command import PrefillCommand
from decode_engine.evaluation.tasks import parse_length, source_text
from decode_engine.model.runner import ModelRunner
from index_store.memory.arena import Arena
from index_store.memory.placement import MemoryBytes, slots_per_head
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store

LAYERS, KV_HEADS, ROW_BYTES, BYTES_PER_S = 32, 8, 512, 50e9
PROMPT, BEYOND = 64, 4096
"""Tokens of a prompt, and from the beginning of one to that of the next."""


def record(
    out: Path, length: int, expression: str, device: str, sessions: int, steps: int, warm_up: int
) -> RecordedLists:
    """Lists of so many sessions on a context of so many tokens."""
    runner = ModelRunner(resolve_model("reader"), device)
    ids = runner.tokenizer.encode(source_text(()))
    body, out = length - len(runner.tokenizer.prefix_ids), out / str(length)
    out.mkdir(parents=True, exist_ok=True)
    document = out / "context.txt"
    document.write_text(runner.tokenizer.decode(ids[:body]), encoding="utf-8")
    method = parse_method(expression)
    preset = method.name.partition("+")[0].partition("@")[0]
    done = PrefillCommand("reader", out / "store", [preset], device=device).run(document, "shared-lists")
    begins = [body + BEYOND * number for number in range(sessions)]
    prompts = [ids[begin : begin + PROMPT] for begin in begins]
    store = Store(out / "store")
    room = MemoryBytes(2**40, 2**40)
    try:
        with Arena(room, device=runner.device).acquire(store, str(done["id"])) as context:
            return record_lists(runner, context, method, prompts, steps, warm_up)
    finally:
        runner.close()


def main(
    out: Annotated[Path, typer.Option(help="Folder for the store.")],
    context_length: Annotated[str, typer.Option(help="Tokens of the context.")] = "32k",
    method: Annotated[str, typer.Option(help="NAME:KEEP that lists keys in all layers.")] = "pq+dropped:0.01",
    device: Annotated[str, typer.Option(help="That reads and decodes.")] = "cpu",
    sessions: Annotated[str, typer.Option(help="Numbers of sessions, comma-separated.")] = "1,4,16",
    steps: Annotated[int, typer.Option(help="Steps that are recorded.")] = 60,
    warm_up: Annotated[int, typer.Option(help="Steps before, and of these again before rows count.")] = 20,
    slots: Annotated[str, typer.Option(help="One row in so many has a slot, comma-separated.")] = "16,8,4",
    lists: Annotated[Path | None, typer.Option(help="Write what was recorded here.")] = None,
) -> None:
    """Records lists and counts rows."""
    numbers, shares = parse_counts(sessions), parse_counts(slots)
    with reporting("shared_lists", gpu=False) as report:
        recorded = record(out, parse_length(context_length), method, device, max(numbers), steps, warm_up)
        if lists is not None:
            recorded.save(lists)
        rows = recorded.ids_SBRW.shape[2]
        for number in numbers:
            for share in shares:
                room = slots_per_head(recorded.tokens, share)
                for once in (False, True):
                    counts = count_rows(recorded, range(number), room, warm_up, once=once)
                    of_step = counts.read / (steps - warm_up) / rows * LAYERS * KV_HEADS * ROW_BYTES
                    report.add(
                        {
                            "context": recorded.tokens, "method": method, "sessions": number, "slots": share,
                            "reads": "once" if once else "each",
                            "wanted": counts.wanted / (steps - warm_up) / rows,
                            "union": counts.union / counts.wanted,
                            "read": counts.read / counts.wanted,
                            "bypassed": counts.bypassed / counts.wanted,
                            "mb": of_step / 1e6, "ms": of_step / BYTES_PER_S * 1e3,
                        }
                    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
