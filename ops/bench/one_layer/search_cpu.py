"""The search that placement `host` runs beside a GPU, on the CPU alone: query tables, several threads.

usage: python ops/bench/one_layer/search_cpu.py [--bars] [--lengths 128k] [--subspaces 8,16] [--threads 16]

Regime: one layer of one decode step, 8 KV heads, 4 query heads each, head dimension 128: tables of random scores (time
depends on their number, not on what they mean), those of several layers in turn, and other rows in every search, so
that little is found in the processor's caches. One thread plays the device: it asks for a search, takes part in it, and
asks for the next one when all lists are there. So a time is from queries to lists, with everything in between: picking
rows, sums, threshold, exact lists.

`read` is the bandwidth that the same threads reach in the same run when all they do is add up as many bytes as a search
reads, beginning together every time, and `of_read` the search's share of it. Before times are reported, the lists are
compared with those of the general path (`index_store.indexes.query_tables.index`), which must be the same.

Each result is one JSON line; the exit code is 1 when a check fails, or when --bars is given and a search over 131,072
keys on 16 threads takes more than 150 us (8 subspaces, pooled) or 280 us (16), or reaches less than 90 % of `read`.

Shape legend: H KV heads, G query heads per KV head, D head dim, N keys, m subspaces, C centroids.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import numpy as np
import torch
import typer
from harness.report import CheckFailedError, reporting
from harness.steps.search_loops import read_shares, search_all
from torch import Tensor

from decode_engine.evaluation.tasks import parse_length
from decode_engine.host_search.mailbox import Mailbox, MailboxSizes, SearchedRow, SearchWorkers
from decode_engine.host_search.shared_search_numba import LINE, read_word
from index_store.indexes.query_tables.index import QueryTables
from index_store.indexes.query_tables.search_numba import TILE
from index_store.memory.host_memory import HostBlock
from index_store.methods.method import INDEX_SPECS
from index_store.selection.cutting import best_keys

HEADS, GROUP, HEAD_DIM = 8, 4, 128
FIRST, RECENT = 8, 64
SEARCHES, WARM_UP, TURNS = 32, 3, 15
BARS = {8: 150.0, 16: 280.0}
OF_READ_BAR = 0.9
BAR_LENGTH, BAR_THREADS = 131072, 16


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of several layers, centroids of every search, and an index over what the last search reads.

    With centroids of its own every search of a step reads other rows, for one and the same query.
    """

    scores: list[Tensor]
    centroids: list[Tensor]
    scales: Tensor
    index: QueryTables

    @classmethod
    def random(cls, length: int, subspaces: int, layers: int, huge_pages: bool) -> Tables:
        rows = 512 // subspaces
        generator = torch.Generator().manual_seed(0)
        shape = (HEADS, subspaces, rows, length)
        scores = []
        for _ in range(layers):
            block = HostBlock(HEADS * 512 * length, huge_pages=huge_pages)
            scores.append(block.take(shape, torch.int8).random_(-127, 128, generator=generator))
        centroids = [
            torch.nn.functional.normalize(
                torch.randn(HEADS, subspaces, rows, HEAD_DIM // subspaces, generator=generator), dim=-1
            )
            for _ in range(SEARCHES)
        ]
        scales = 0.01 + 0.05 * torch.rand(HEADS, subspaces, generator=generator)
        parameters = {**INDEX_SPECS["query_tables"].parameters, "subspaces": subspaces, "centroids": rows}
        arrays = {"scores": scores[(SEARCHES - 1) % layers], "centroids": centroids[-1], "scales": scales}
        kv = torch.zeros(HEADS, 1, 2, HEAD_DIM).expand(-1, length, -1, -1)
        return cls(scores, centroids, scales, QueryTables.from_arrays(parameters, arrays, kv))

    def places(self, layer: int) -> list[int]:
        scores = self.scores[layer % len(self.scores)]
        return [scores.data_ptr(), self.centroids[layer].data_ptr(), self.scales.data_ptr()]


class Search:
    """Searches of one shape, by so many threads of which the caller is one."""

    def __init__(
        self, length: int, subspaces: int, *, pooled: bool, keep: float, threads: int, huge_pages: bool
    ) -> None:
        self.length, self.subspaces, self.pooled, self.threads = length, subspaces, pooled, threads
        layers = max(2, min(4, 2**30 // (512 * HEADS * length)))
        self.tables = Tables.random(length, subspaces, layers, huge_pages)
        self.sizes = MailboxSizes(
            1, HEADS, GROUP, HEAD_DIM, subspaces, 512 // subspaces, pooled, True, SEARCHES, length
        )
        self.mailbox = Mailbox(self.sizes, page_locked=False)
        self.workers = SearchWorkers(threads - 1) if threads > 1 else None
        places = np.array([self.tables.places(layer) for layer in range(SEARCHES)], np.int64)
        self.row = SearchedRow(0, FIRST, length - RECENT, round(keep * length), length, places)
        width = (self.sizes.queries + 1) * TILE
        self._own = (
            np.zeros((self.sizes.tiles, 3), np.int64),
            np.empty((self.sizes.tiles, width), np.float32),
            np.empty(TILE // 32 + 2, np.uint64),
            np.empty(2 * TILE, np.int32),
        )

    @property
    def bytes_read(self) -> int:
        """Of one search."""
        return HEADS * self.sizes.queries * self.subspaces * (self.row.end - self.row.first)

    def step(self, q_HGD: Tensor) -> float:
        """Searches once for every layer; microseconds of one search."""
        self.mailbox.shared.q_BX.copy_(q_HGD.view(1, -1))
        self.mailbox.begin([self.row], range(SEARCHES))
        if self.workers is not None:
            self.workers.begin(self.mailbox)
        time.sleep(0.002)  # until the threads are awake, as they are when a device has come to attention
        begin = time.perf_counter()
        search_all(self.mailbox.job, *self._own)
        seconds = time.perf_counter() - begin
        if self.workers is not None:
            self.workers.end()
        return seconds / SEARCHES * 1e6

    def check(self) -> None:
        """Raises CheckFailedError unless the lists are those of the general path."""
        q_HGD = torch.randn(HEADS, GROUP, HEAD_DIM, generator=torch.Generator().manual_seed(1))
        options = {"group": "pooled" if self.pooled else "per_head", "weights": "projection"}
        scaled_HTGD = (q_HGD * HEAD_DIM**-0.5)[:, None]
        ranking = self.tables.index.rank(scaled_HTGD, self.row.first, self.row.end, None, options)
        expected = best_keys(ranking, self.row.keep)
        self.step(q_HGD)
        for h in range(HEADS):
            wanted = expected.ids_HTK[h, 0, : int(expected.counts_HT[h, 0])]
            found = self.mailbox.answer(SEARCHES - 1, h)
            if found is None or not torch.equal(found, wanted):
                raise CheckFailedError(f"the list of KV head {h} is not the general path's")

    def times(self) -> list[float]:
        generator = torch.Generator().manual_seed(2)
        queries = [torch.randn(HEADS, GROUP, HEAD_DIM, generator=generator) for _ in range(TURNS)]
        for q_HGD in queries[:WARM_UP]:
            self.step(q_HGD)
        return [self.step(q_HGD) for q_HGD in queries]

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


def read_us(tables: Sequence[Tensor], size: int, threads: int) -> float:
    """Microseconds in which threads add up `size` bytes of tables together: median of several runs."""
    share = size // 8 // threads
    results = []
    for turn in range(TURNS):
        data = tables[turn % len(tables)].view(-1).numpy().view(np.int64)
        words = np.zeros(LINE, np.int64)
        readers = [
            threading.Thread(target=read_shares, args=(data, share, SEARCHES, threads, number, words))
            for number in range(1, threads)
        ]
        for reader in readers:
            reader.start()
        while read_word(words.ctypes.data) < threads - 1:
            time.sleep(0.0001)
        begin = time.perf_counter()
        read_shares(data, share, SEARCHES, threads, 0, words)
        results.append((time.perf_counter() - begin) / SEARCHES * 1e6)
        for reader in readers:  # takes longer than reading does
            reader.join()
    return statistics.median(results)


def measure(search: Search, keep: float, huge_pages: bool) -> dict[str, Any]:
    """The figures of one shape."""
    search.check()
    times = search.times()
    reading = read_us(search.tables.scores, search.bytes_read, search.threads)
    median = statistics.median(times)
    return {
        "context": search.length,
        "subspaces": search.subspaces,
        "group": "pooled" if search.pooled else "per_head",
        "keep": keep,
        "threads": search.threads,
        "huge_pages": huge_pages,
        "search_us": round(median, 1),
        "search_best_us": round(min(times), 1),
        "read_us": round(reading, 1),
        "of_read": round(reading / median, 3),
        "gb_per_s": round(search.bytes_read / median / 1e3, 1),
    }


def missed(row: dict[str, Any]) -> list[str]:
    """What the bars say about a result, as sentences."""
    if (row["context"], row["threads"], row["group"]) != (BAR_LENGTH, BAR_THREADS, "pooled"):
        return []
    found = []
    bar = BARS.get(row["subspaces"], float("inf"))
    if row["search_us"] > bar:
        found.append(f"m = {row['subspaces']}: {row['search_us']} us, the bar is {bar} us")
    if row["of_read"] < OF_READ_BAR:
        found.append(
            f"m = {row['subspaces']}: {row['of_read']:.0%} of read bandwidth, the bar is {OF_READ_BAR:.0%}"
        )
    return found


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of keys, such as 32k,128k.")] = "128k",
    subspaces: Annotated[str, typer.Option(help="Comma-separated.")] = "8,16",
    keep: Annotated[float, typer.Option(help="Share of the keys that lists keep.")] = 0.01,
    threads: Annotated[int, typer.Option(help="Threads, 0 for one per core.")] = 0,
    per_head: Annotated[
        bool, typer.Option(help="Also the search for each head, not only the pooled one.")
    ] = True,
    huge_pages: Annotated[bool, typer.Option(help="Large pages for tables, as loaded contexts have.")] = True,
    bars: Annotated[bool, typer.Option(help="Fail when a figure misses its bar.")] = False,
) -> None:
    """Times searches on the CPU."""
    with reporting("search_cpu", bars, gpu=False) as report:
        for length, number, pooled in product(
            [parse_length(text) for text in lengths.split(",")],
            [int(text) for text in subspaces.split(",")],
            (True, False) if per_head else (True,),
        ):
            used = threads or os.cpu_count() or 1
            search = Search(length, number, pooled=pooled, keep=keep, threads=used, huge_pages=huge_pages)
            try:
                row = measure(search, keep, huge_pages)
            finally:
                search.close()
            report.add(row, *missed(row))


if __name__ == "__main__":
    typer.run(main)
