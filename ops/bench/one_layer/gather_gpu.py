"""Decode attention to a context in host memory, against torch's best full attention in the GPU's memory.

usage: python ops/bench/one_layer/gather_gpu.py [--bars] [--cases 0.01:0,0.05:0.8] [--no-mapped]

Regime: one layer of a decode step, batch 1, 32 query heads, 8 KV heads, head dimension 128, bfloat16: 512 bytes per
row. Every layer's keys and values are one range of host memory, made as the arena makes them; --no-mapped for
page-locked memory, the arena's second choice. Several layers take turns, so that no step finds its rows in the
second-level cache, nor the addresses of all layers translated.

- `copy`: bandwidth of a plain copy of one layer.
- `gather`: random rows of one layer, ascending in every head, copied into device memory by the kernel that reads host
  memory (`kernels.gather_rows`); half a million rows, again and again. `wide`: rows of all layers in one launch.
  `spread`: every launch writes elsewhere, to more than the second-level cache holds.
- `hybrid`: a whole step through `HybridSteps`: search over product codes (random ones: they cost the same), the rows
  found in the slot cache or fetched, attention to them, to sinks, recent window and tail, merge. In place of what the
  search lists, prepared lists are attended, of which a known share was in the step before (`reuse`), and the rest was
  attended so long ago that it has left the cache. `reused` and `bypassed` are the cache's own counts, as shares of all
  rows; sinks and recent window are always reused. `rows_us` is the step without its search, `search_us` the search
  alone, `fetch_us` the launches of the fetch, `device_us` search and attention with keys and values in the GPU's
  memory, `direct_us` the step without a cache, where attention reads host memory itself; both over four lists only.

Times are medians inside a CUDA graph of many steps. `full_us` is the fastest of torch's backends on the same keys,
values and queries in the GPU's memory in the same run; `ratio` is the step's to it, `rows_ratio` that of the step
without its search. Bars for steps of which nothing is reused are for the whole step, others for what moves and attends
rows. Before a time is reported, copied rows are compared bit for bit, and the step's output bit for bit with the same
step without a cache, and with eager float32 attention.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.checks import CheckFailedError, check_close
from harness.layer import DEVICE, DTYPE, GROUP, HEAD_DIM, KV_HEADS, ROW, SCALE, SINKS, step_plan
from harness.report import reporting
from harness.timing import event_ms, fastest, full_attention_us, graph_us
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists, ListedSequence, attend_lists_reference
from decode_engine.kernels.records import records_of
from decode_engine.kernels.slots.slot_cache import CopyShape, RowCopies, RowCounts, SlotCache, copy_rows
from decode_engine.steps.attention.listed_steps import HybridSteps, ListedSteps
from decode_engine.steps.attention.selections import CodeSelection
from decode_engine.steps.attention.step_attention import KeySelection, StepPlan
from index_store.indexes.product_codes.index import ProductCodes
from index_store.memory.host_memory import HostBlock, copy_source, default_page_locker
from index_store.memory.mapped_memory import is_mapped
from index_store.memory.placement import slots_per_head
from index_store.methods.presets import get_method
from index_store.selection.budgets import Ratio

SUBSPACES, CODEWORDS = 8, 256
RECENT, TAIL = 128, 64
COLD_BYTES = 256 * 2**20
"""That gathers of one graph read: several times the second-level cache."""
RING = 3
"""Caches' worth of keys that lists take turns over, so that keys come back only after they have left the cache."""
GATHER_BAR = 50.0
BARS = {(0.01, 0.0): 0.9, (0.02, 0.0): 1.7, (0.05, 0.8): 1.05, (0.02, 0.8): 0.5, (0.01, 0.8): 0.3}
"""Ratios by keep and reuse."""


class Memory:
    """Keys and values of several layers, [H, N, 2, d] each, in both memories."""

    def __init__(self, length: int, layers: int, mapped: bool) -> None:
        self.length, self.layers, self.mapped = length, layers, mapped
        shape = (layers, 1, KV_HEADS, length, 2, HEAD_DIM)
        self.device_kv = torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_()
        locker = default_page_locker()
        size = self.device_kv[0].nbytes
        self.blocks = [HostBlock(size, locker, gathered=mapped, huge_pages=not mapped) for _ in range(layers)]
        self.host_kv = [block.take(shape[2:], DTYPE) for block in self.blocks]
        for block, host, device in zip(self.blocks, self.host_kv, self.device_kv, strict=True):
            host.copy_(device[0])
            block.lock()
        if DEVICE.type == "cuda" and mapped != all(is_mapped(host) for host in self.host_kv):
            raise CheckFailedError(
                f"host memory is {'not ' if mapped else ''}mapped by the GPU in large pages"
            )
        self.q = 2.0 * torch.randn(layers, 1, KV_HEADS, GROUP, HEAD_DIM, device=DEVICE).to(DTYPE)
        self.tail = torch.randn(KV_HEADS, TAIL, 2, HEAD_DIM, device=DEVICE).to(DTYPE)
        codes = (layers, KV_HEADS, length, SUBSPACES)
        self.codes = torch.empty(codes, dtype=torch.uint8, device=DEVICE).random_(0, CODEWORDS)
        self.codebooks = torch.randn(KV_HEADS, SUBSPACES, CODEWORDS, HEAD_DIM // SUBSPACES, device=DEVICE)

    def sequence(self, kv_HN2D: Tensor, keep: int) -> ListedSequence:
        return ListedSequence(kv_HN2D, self.tail, TAIL, SINKS, self.length - RECENT, keep)

    def records(self, layer: int, kv_HN2D: Tensor, keep: int, cache: SlotCache | None) -> Tensor:
        """[1, RECORD_FIELDS] on the device."""
        row = records_of([self.sequence(kv_HN2D, keep)], "cpu")
        row[0, records.CODES] = self.codes[layer].data_ptr()
        row[0, records.CODEBOOKS] = self.codebooks.data_ptr()
        for field, value in ({} if cache is None else cache.fields(layer)).items():
            row[0, field] = value
        return row.to(DEVICE)


class PreparedLists(KeySelection):
    """Searches product codes, and lists keys that were chosen before."""

    searching: ClassVar[bool] = True

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.search = CodeSelection(plan)
        self.lists = self.search.lists

    refusal = CodeSelection.refusal
    fields = CodeSelection.fields

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        if self.searching:
            self.search.select(layer, q_BHGD, records_BF)
        return self.lists


class DeviceListedSteps(ListedSteps):
    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = {ProductCodes.kind: PreparedLists}


class HostListedSteps(HybridSteps):
    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = {ProductCodes.kind: PreparedLists}


def ring_lists(length: int, budget: int, reuse: float, slots: int) -> list[KeyLists]:
    """Lists of `budget` keys per head, ascending; each has about a share of them from the one before, cyclically."""
    searched = length - RECENT - SINKS
    shift = max(1, round((1.0 - reuse) * budget))
    turns = max(2, min(RING * slots + budget, searched) // shift)
    lists = [KeyLists.allocate(KV_HEADS, 1, length, DEVICE) for _ in range(turns)]
    for head in range(KV_HEADS):
        ring = torch.randperm(searched, device=DEVICE)[: turns * shift] + SINKS
        for turn, listed in enumerate(lists):
            at = (turn * shift + torch.arange(budget, device=DEVICE)) % len(ring)
            listed.ids_RPW[head, 0, :budget] = ring[at].sort().values
    for listed in lists:
        listed.counts_RP.fill_(budget)
    return lists


class HybridBench:
    """Steps at one budget and share of reuse."""

    def __init__(self, memory: Memory, keep: float, reuse: float, shape: CopyShape | None) -> None:
        self.memory = memory
        self.budget = round(keep * memory.length)
        method = replace(get_method("pq+dropped"), budget=Ratio(keep), recent=RECENT, sinks=SINKS)
        self.plan = step_plan(method, memory.layers, 1, memory.length)
        slots = slots_per_head(memory.length)
        layers = range(memory.layers)
        self.cache = SlotCache.make(layers, KV_HEADS, memory.length, slots, HEAD_DIM, DTYPE, DEVICE)
        self.lists = [ring_lists(memory.length, self.budget, reuse, slots) for _ in layers]
        self.hybrid, self.device = HostListedSteps(self.plan), DeviceListedSteps(self.plan)
        self.hybrid.rows.copy_shape = shape
        kv = memory.host_kv
        self.cached = [memory.records(n, kv[n], self.budget, self.cache) for n in layers]
        self.direct = [memory.records(n, kv[n], self.budget, None) for n in layers]
        self.on_device = [memory.records(n, memory.device_kv[n, 0], self.budget, None) for n in layers]

    def step(self, steps: ListedSteps, rows: list[Tensor], turn: int, layer: int) -> Tensor:
        selection = steps.selection
        if not isinstance(selection, PreparedLists):
            raise CheckFailedError(f"lists come from {type(selection).__name__}")
        selection.lists = self.lists[layer][turn]
        return steps.attend(layer, self.memory.q[layer], rows[layer])

    def all_steps(
        self, step: Callable[[int, int], object], turns: int | None = None
    ) -> list[Callable[[], object]]:
        """Layer after layer in every turn."""
        return [
            partial(step, turn, layer)
            for turn in range(turns or len(self.lists[0]))
            for layer in range(self.memory.layers)
        ]

    def check(self) -> float:
        """Relative error of steps; raises CheckFailedError where it is too large, or the cache changes bits."""
        error = 0.0
        for turn in range(2):
            for layer in {0, self.memory.layers - 1}:
                found = self.step(self.hybrid, self.cached, turn, layer).clone()
                if not torch.equal(found, self.step(self.hybrid, self.direct, turn, layer)):
                    raise CheckFailedError(f"turn {turn}, layer {layer}: the cache changes bits")
                expected = attend_lists_reference(
                    self.memory.q[layer].flatten(0, 1),
                    [self.memory.sequence(self.memory.device_kv[layer, 0], self.budget)],
                    self.lists[layer][turn],
                    SCALE,
                ).out
                error = max(error, check_close(f"turn {turn}, layer {layer}", found, expected, 1e-2))
        return error

    def shares(self) -> dict[str, float]:
        """Of all rows of one round: what the cache reused, fetched and left in host memory."""
        self.round()
        before = self.cache.counts()
        self.round()
        after = self.cache.counts()
        counts = RowCounts(
            after.wanted - before.wanted, after.reused - before.reused, after.bypassed - before.bypassed
        )
        return {
            "reused": counts.reused / counts.wanted,
            "fetched": counts.fetched / counts.wanted,
            "bypassed": counts.bypassed / counts.wanted,
            "fetched_bytes": counts.fetched * ROW / (len(self.lists[0]) * self.memory.layers),
        }

    def round(self) -> None:
        for step in self.all_steps(partial(self.step, self.hybrid, self.cached)):
            step()

    def times(self) -> dict[str, float]:
        steps = self.all_steps(partial(self.step, self.hybrid, self.cached))
        found = {"step_us": graph_us(steps)}
        PreparedLists.searching = False
        found["rows_us"] = graph_us(steps)
        PreparedLists.searching = True
        few = min(4, len(self.lists[0]))
        found["device_us"] = graph_us(self.all_steps(partial(self.step, self.device, self.on_device), few))
        found["direct_us"] = graph_us(self.all_steps(partial(self.step, self.device, self.direct), few))
        search = CodeSelection(self.plan)
        asked = zip(range(self.memory.layers), self.memory.q, self.on_device, strict=True)
        found["search_us"] = graph_us([partial(search.select, *arguments) for arguments in asked])
        joined = torch.empty(KV_HEADS, self.plan.max_keys, dtype=torch.int32, device=DEVICE)

        def fetch(turn: int, layer: int) -> None:
            rows, lists = self.cached[layer], self.lists[layer][turn]
            self.hybrid.rows.locate(layer, rows, self.hybrid.selection, lists, joined)

        found["fetch_us"] = graph_us(self.all_steps(fetch))
        return found


def hybrid_figure(
    memory: Memory, full: dict[str, float], keep: float, reuse: float, shape: CopyShape | None
) -> dict[str, Any]:
    bench = HybridBench(memory, keep, reuse, shape)
    best = fastest(full)
    full_us = float(best["full_us"])
    result: dict[str, Any] = {"figure": "hybrid", "keep": keep, "reuse": reuse, "error": bench.check()}
    result |= bench.shares() | bench.times()
    # Sinks and recent window are reused besides.
    if not reuse - 0.05 <= result["reused"] <= reuse + 0.2:
        raise CheckFailedError(f"{result['reused']:.1%} of the rows were reused, expected about {reuse:.0%}")
    result |= {**best, "slots": bench.cache.tags_LHS.shape[2]}
    result["fetch_gb_per_s"] = result["fetched_bytes"] / result["fetch_us"] * 1e-3
    result["ratio"], result["rows_ratio"] = result["step_us"] / full_us, result["rows_us"] / full_us
    return result | {"bar": BARS.get((keep, reuse)), "bar_for": "rows_ratio" if reuse else "ratio"}


def copy_figure(memory: Memory) -> dict[str, Any]:
    """A plain copy of one layer after the other."""
    target = torch.empty_like(memory.host_kv[0], device=DEVICE)
    sources = [copy_source(kv, target.device) for kv in memory.host_kv]
    times = sorted(
        event_ms(partial(target.copy_, source, non_blocking=True)) for _ in range(3) for source in sources
    )
    return {"figure": "copy", "gb_per_s": target.nbytes / times[len(times) // 2] * 1e-6}


def gather_figure(memory: Memory, keep: float, shape: CopyShape, figure: str) -> dict[str, Any]:
    """Random rows, of one layer per launch or, `wide`, of all of them."""
    wide, spread = figure == "wide", figure == "spread"
    budget, searched = round(keep * memory.length), torch.arange(KV_HEADS)[:, None] * memory.length
    rows = budget * KV_HEADS * (memory.layers if wide else 1)
    launches = max(2, -(-COLD_BYTES // (rows * ROW)))
    targets = torch.empty(launches if spread else 1, rows, 2, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    into = torch.arange(rows, device=DEVICE) * ROW
    count = torch.tensor([rows], dtype=torch.int32, device=DEVICE)
    prepared, chosen = [], []
    for launch in range(launches):
        sources, picks = [], []
        for layer in range(memory.layers) if wide else [launch % memory.layers]:
            ids = torch.rand(KV_HEADS, memory.length).topk(budget).indices.sort().values
            sources.append((ids + searched).flatten() * ROW + memory.host_kv[layer].data_ptr())
            picks.append((layer, ids))
        place = targets[launch % len(targets)].data_ptr()
        prepared.append(RowCopies(torch.cat(sources).to(DEVICE), place + into, count))
        chosen.append(picks)
    for launch, (copies, picks) in enumerate(zip(prepared[:2], chosen[:2], strict=True)):
        copy_rows(copies, ROW, shape)
        expected = torch.cat(
            [
                memory.device_kv[layer, 0].gather(
                    1, ids.to(DEVICE)[..., None, None].expand(-1, -1, 2, HEAD_DIM)
                ).flatten(0, 1)
                for layer, ids in picks
            ]
        )  # fmt: skip
        if not torch.equal(targets[launch % len(targets)], expected):
            raise CheckFailedError(f"rows that {shape} copied are not those in host memory")
    us = graph_us([partial(copy_rows, copies, ROW, shape) for copies in prepared])
    return {"figure": figure, "keep": keep, "us": us, "gb_per_s": rows * ROW / us * 1e-3, **asdict(shape)}


def figures(
    memory: Memory, cases: list[tuple[float, float]], shape: CopyShape | None
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """All figures, and how they miss their bars."""
    yield copy_figure(memory), []
    gathers = []
    for keep, figure in ((0.01, "gather"), (0.05, "gather"), (0.01, "wide"), (0.01, "spread")):
        row = gather_figure(memory, keep, shape or CopyShape(), figure)
        gathers += [row["gb_per_s"]] if figure == "gather" else []
        slow = len(gathers) == 2 and figure == "gather" and max(gathers) < GATHER_BAR
        yield row, [f"gather: {max(gathers):.1f} GB/s at best, bar {GATHER_BAR}"] if slow else []
    full = full_attention_us(memory.q.flatten(2, 3), memory.device_kv) if cases else {}
    for keep, reuse in cases:
        row = hybrid_figure(memory, full, keep, reuse, shape)
        found, bar = row[row["bar_for"]], row["bar"]
        missed = bar is not None and found > bar
        yield row, [f"keep {keep}, reuse {reuse}: {found:.2f}x, bar {bar}x"] if missed else []


def main(
    length: Annotated[int, typer.Option(help="Tokens of the context.")] = 131072,
    layers: Annotated[int, typer.Option(help="That take turns; each is a range of host memory.")] = 12,
    cases: Annotated[str, typer.Option(help="keep:reuse of hybrid steps, comma-separated.")] = (
        "0.01:0,0.02:0,0.05:0,0.01:0.8,0.02:0.8,0.05:0.8,0.01:0.5"
    ),
    shape: Annotated[
        str, typer.Option(help="programs:tile:warps of launches that read host memory; theirs by default.")
    ] = "",
    mapped: Annotated[
        bool, typer.Option(help="Memory that the GPU maps in large pages, else page-locked.")
    ] = True,
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a bar is missed.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Times gathers from host memory, and hybrid decode steps; one JSON line per figure."""
    chosen = CopyShape(*(int(part) for part in shape.split(":"))) if shape else None
    wanted = [(float(keep), float(reuse)) for keep, reuse in (c.split(":") for c in cases.split(",") if c)]
    with reporting("gather_gpu", bars) as report:
        torch.manual_seed(seed)
        more = {"context": length, "layers": layers, "mapped": mapped}
        for row, missed in figures(Memory(length, layers, mapped), wanted, chosen):
            report.add(row | more, *missed)


if __name__ == "__main__":
    typer.run(main)
