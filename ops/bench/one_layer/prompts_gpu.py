"""Attention of many prompts to one context on a GPU: as chosen, by the flash kernel, and by cuDNN's in one call.

usage: python ops/bench/one_layer/prompts_gpu.py [--rows 256,1024,2048,4096] [--keys 32768,100000,131072] [--sweep]

Regime: one layer of a pass over prompts, 32 query heads, 8 KV heads, head dimension 128, bfloat16; the context's keys
and values in the GPU's memory as they are stored, no mask, out and log-sum-exp. `rows` are the queries of one KV head:
tokens of the pass times 4. Numbers are random: time does not depend on what they mean.

- `chosen`: as prompts attend (`index_store/attention/fused.py`), with all copies and merges. `divided` is false
  where that is one call of the flash kernel. `chosen_first_ms` is the first call of these sizes by the clock, after the
  preparations at a server's start, which took `prepare_ms`: nothing more is to be prepared then.
- `flash`: one call of the flash kernel. `cudnn`: one of cuDNN's, without copies; `cudnn_first_ms` is the first by the
  clock, which prepares for these sizes. It is left out where keys are not a multiple of 128: cuDNN before 9.15.1 may be
  wrong there.

`_ms` are medians, `_tflops` multiply-adds counted twice over them. Before times are reported, out and log-sum-exp of
some queries by every way are compared with float32 attention. --sweep also times other divisions, to stderr.

One JSON line per figure; the exit code is 1 when a check fails.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.checks import check_close, failure
from harness.layer import DEVICE, DTYPE, HEAD_DIM, KV_HEADS, SCALE
from harness.parsing import parse_counts
from harness.report import reporting
from harness.timing import event_ms, seconds
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import (
    Division,
    attend_divided,
    attend_fused,
    attend_many,
    division_on,
    prepare_many,
)

TURNS = 9
WARM_UP = 2
CHECKED = 5
LIMIT, LSE_LIMIT = 2e-2, 1e-3
MULTIPLE = 128


class Case:
    """Queries of one pass [H, R, 1, d], and the keys and values of a context."""

    def __init__(self, rows: int, kv_HN2D: Tensor) -> None:
        self.rows, self.count = rows, kv_HN2D.shape[1]
        self.queries = (3 * torch.randn(KV_HEADS, rows, 1, HEAD_DIM, device=DEVICE)).to(DTYPE)
        self.kv_HN2D = kv_HN2D

    def chosen(self) -> AttentionState:
        return attend_many(self.queries, self.kv_HN2D)

    def in_one_call(self, cudnn: bool) -> AttentionState:
        kv = self.kv_HN2D[None]
        query = self.queries.transpose(1, 2).reshape(1, KV_HEADS, self.rows, HEAD_DIM)
        return attend_fused(query, kv[:, :, :, 0], kv[:, :, :, 1], causal=False, cudnn=cudnn)

    def divided(self, division: Division) -> AttentionState:
        return attend_divided(self.queries[:, :, 0], self.kv_HN2D, division)

    def check(self, name: str, state: AttentionState) -> float:
        """Relative error of some queries' out. Raises CheckFailedError."""
        rows = torch.linspace(0, self.rows - 1, CHECKED).long().tolist()
        out = state.out.reshape(KV_HEADS, self.rows, HEAD_DIM)
        lse = state.lse.reshape(KV_HEADS, self.rows)
        errors = []
        for head in range(KV_HEADS):
            keys, values = self.kv_HN2D[head].float().unbind(1)
            logits = self.queries[head, rows, 0].float() @ keys.t() * SCALE
            errors.append(check_close(name, out[head, rows], logits.softmax(-1) @ values, LIMIT))
            check_close(f"{name}, log-sum-exp", lse[head, rows], logits.logsumexp(-1), LSE_LIMIT)
        return max(errors)

    def measure(self, name: str, way: Callable[[], AttentionState]) -> dict[str, float]:
        """First call, median and rate, after a check. Raises CheckFailedError."""
        first = seconds(way, DEVICE)
        error = self.check(name, way())
        ms = statistics.median([event_ms(way) for _ in range(WARM_UP + TURNS)][WARM_UP:])
        operations = 4 * KV_HEADS * self.rows * self.count * HEAD_DIM
        found = {"first_ms": first * 1e3, "ms": ms, "tflops": operations / ms / 1e9, "error": error}
        return {f"{name}_{what}" if what != "error" else f"{name}_difference": x for what, x in found.items()}


def neighbours(division: Division) -> list[Division]:
    """Other divisions, for --sweep."""
    longest, shortest = division.longest, division.shortest
    return [
        replace(division, rows=2 * division.rows),
        replace(division, rows=division.rows // 2),
        replace(division, longest=2 * longest, shortest=2 * shortest),
        replace(division, longest=longest // 2, shortest=shortest // 2),
        replace(division, rows=2 * division.rows, longest=2 * longest, shortest=2 * shortest),
    ]


def figure(case: Case, division: Division | None) -> dict[str, Any]:
    """A figure's row. Raises CheckFailedError for a wrong result."""
    row: dict[str, Any] = {"divided": division is not None and division.pays(case.rows, case.count)}
    row |= case.measure("chosen", case.chosen)
    row |= case.measure("flash", partial(case.in_one_call, False))
    if case.count % MULTIPLE == 0:
        row |= case.measure("cudnn", partial(case.in_one_call, True))
    return row | {"over_flash": row["flash_ms"] / row["chosen_ms"]}


def figures(rows: list[int], keys: list[int], sweep: bool) -> Iterator[dict[str, Any]]:
    """All of them; an error does not end the others."""
    kv_HN2D = torch.empty(KV_HEADS, max(keys), 2, HEAD_DIM, dtype=DTYPE, device=DEVICE).normal_()
    division = division_on(kv_HN2D, DTYPE)
    took = seconds(lambda: prepare_many(KV_HEADS, HEAD_DIM, DTYPE, DEVICE), DEVICE)
    again = seconds(lambda: prepare_many(KV_HEADS, HEAD_DIM, DTYPE, DEVICE), DEVICE)
    if division is not None:
        shapes = {"rows": division.rows, "longest": division.longest, "shortest": division.shortest}
        yield {"figure": "prepare", **shapes, "prepare_ms": took * 1e3, "again_ms": again * 1e3}
    for count in keys:
        kv = kv_HN2D[:, :count].clone()  # strides as a context of this length has them
        for number in rows:
            case, named = Case(number, kv), {"figure": "attend", "rows": number, "keys": count}
            try:
                yield named | figure(case, division)
                for other in neighbours(division) if sweep and division is not None else ():
                    tried = case.measure("divided", partial(case.divided, other))
                    typer.echo(f"{number} rows, {count} keys, {other}: {tried}", err=True)
            except Exception as error:
                yield named | failure(error)


def main(
    rows: Annotated[str, typer.Option(help="Queries of a KV head, comma-separated.")] = "256,1024,2048,4096",
    keys: Annotated[str, typer.Option(help="Lengths of contexts, comma-separated.")] = "32768,100000,131072",
    sweep: Annotated[bool, typer.Option("--sweep", help="Also time other divisions, to stderr.")] = False,
) -> None:
    """Times attention of many prompts to one context in one layer; one JSON line per figure."""
    with reporting("prompts_gpu") as report, torch.inference_mode():
        torch.manual_seed(0)
        for row in figures(parse_counts(rows), parse_counts(keys), sweep):
            report.add(row)


if __name__ == "__main__":
    typer.run(main)
