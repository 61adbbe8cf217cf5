"""What the query-table kernels work on: sequences of a batch, launch shapes, and buffers.

A batch holds one decode step's sequences, on different contexts of different lengths. Kernels find everything of a
sequence through one row of `TableBatch.records_BF`: addresses, strides and counts, all in device memory. So a captured
graph serves whichever sequences were written into the rows last, and nothing waits for the host.

Shape legend: B sequences, H KV heads, G query heads per KV head, N keys of a context, A keys that a table row has room
for, S table rows of a head (m subspaces x C centroids), M subspaces, C centroids, W = d/M slice width, d head dim,
t tail tokens, F fields of a record, L queries searched per KV head (1 where pooled, else G), P tiles, X partial
results per KV head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError

MINI_KEYS = 256
"""Consecutive keys of a table row that one program reads before it skips to its next block."""

BINS = 256
"""Bins of the score histogram that the threshold is read from."""

COMBINE_TILES = 4
"""Tiles that one program samples for the threshold of the search per head."""

RECORD_FIELDS = 16
KV, KV_HEAD, TABLES, TABLE_ROW, CENTROIDS, SCALES, TAIL, TAIL_HEAD, KEYS, FIRST, END, TAIL_KEYS, KEEP = range(
    13
)


@dataclass(frozen=True, slots=True)
class TableContext:
    """One layer of a context in device memory.

    kv_HN2D: [H, N, 2, d] fp16 or bf16. tables_HSA: [H, S, A] int8, A a multiple of MINI_KEYS and at least N; columns
    from N on may hold anything. centroids_HMCW: [H, M, C, W] float32. scales_HM: [H, M] float32.
    Raises InvalidArgumentError where the shapes, types or strides are others.
    """

    kv_HN2D: Tensor
    tables_HSA: Tensor
    centroids_HMCW: Tensor
    scales_HM: Tensor

    def __post_init__(self) -> None:
        heads, count, two, head_dim = self.kv_HN2D.shape
        _, subspaces, centroids, width = self.centroids_HMCW.shape
        columns = self.tables_HSA.shape[2]
        expected = {
            "centroids": (self.centroids_HMCW, (heads, subspaces, centroids, width), torch.float32),
            "scales": (self.scales_HM, (heads, subspaces), torch.float32),
            "tables": (self.tables_HSA, (heads, subspaces * centroids, columns), torch.int8),
            "kv": (self.kv_HN2D, (heads, count, 2, subspaces * width), self.kv_HN2D.dtype),
        }
        for name, (tensor, shape, dtype) in expected.items():
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise InvalidArgumentError(
                    f"{name} of a table context are {tuple(tensor.shape)} {tensor.dtype}"
                    f"{'' if tensor.is_contiguous() else ' not contiguous'}, expected {shape} {dtype} contiguous"
                )
        if two != 2 or columns % MINI_KEYS or columns < count or head_dim not in (64, 128):
            raise InvalidArgumentError(
                f"a table context has {count} keys of dimension {head_dim} and table rows of {columns}; expected a "
                f"dimension of 64 or 128 and rows of a multiple of {MINI_KEYS} that hold every key"
            )

    @property
    def keys(self) -> int:
        return self.kv_HN2D.shape[1]


def padded_tables(scores_HMCN: Tensor) -> Tensor:
    """Stored scores [H, M, C, N] int8 as rows [H, S, A] that the kernels can read, the added columns 0."""
    rows = scores_HMCN.flatten(1, 2)
    return torch.nn.functional.pad(rows, (0, -rows.shape[2] % MINI_KEYS)).contiguous()


@dataclass(frozen=True, slots=True)
class TableSequence:
    """Where one sequence stands.

    Keys [0, first) of the context, [end, N) of the context and tail tokens [0, tail_keys) are attended exactly; keys
    [first, end) are searched and about `keep` of them attended. tail_HT2D: [H, capacity, 2, d] in the context's dtype.
    """

    context: TableContext
    tail_HT2D: Tensor
    first: int
    end: int
    tail_keys: int
    keep: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.end <= self.context.keys:
            raise InvalidArgumentError(
                f"searched keys [{self.first}, {self.end}) of a context of {self.context.keys} keys; expected "
                "0 <= first <= end <= keys"
            )
        if not 0 <= self.tail_keys <= self.tail_HT2D.shape[1] or self.keep < 0:
            raise InvalidArgumentError(
                f"{self.tail_keys} tail tokens of {self.tail_HT2D.shape[1]} and {self.keep} keys to keep; expected "
                "counts from 0 that the tail's memory holds"
            )
        heads, _, _, head_dim = self.context.kv_HN2D.shape
        tail = self.tail_HT2D
        if tail.dtype != self.context.kv_HN2D.dtype or not tail.is_contiguous():
            raise InvalidArgumentError(f"the tail is {tail.dtype}, expected the context's dtype, contiguous")
        if (tail.shape[0], tail.shape[2], tail.shape[3]) != (heads, 2, head_dim):
            raise InvalidArgumentError(
                f"the tail is {tuple(tail.shape)}, expected [{heads}, any, 2, {head_dim}]"
            )

    def record(self) -> list[int]:
        """The row that kernels read."""
        context, tail = self.context, self.tail_HT2D
        fields = {
            KV: context.kv_HN2D.data_ptr(),
            KV_HEAD: context.kv_HN2D.stride(0),
            TABLES: context.tables_HSA.data_ptr(),
            TABLE_ROW: context.tables_HSA.stride(1),
            CENTROIDS: context.centroids_HMCW.data_ptr(),
            SCALES: context.scales_HM.data_ptr(),
            TAIL: tail.data_ptr(),
            TAIL_HEAD: tail.stride(0),
            KEYS: context.keys,
            FIRST: self.first,
            END: self.end,
            TAIL_KEYS: self.tail_keys,
            KEEP: self.keep,
        }
        return [fields.get(field, 0) for field in range(RECORD_FIELDS)]


@dataclass(frozen=True, slots=True)
class TableBatch:
    """The sequences of one launch. records_BF: [B, RECORD_FIELDS] int64 on the device, one record per sequence.

    Whoever changes a sequence in place (a captured graph needs the same tensor) copies a new record into its row; the
    tensors that records point to are kept alive by `sequences`.
    """

    sequences: tuple[TableSequence, ...]
    records_BF: Tensor

    @classmethod
    def of(cls, sequences: Sequence[TableSequence]) -> TableBatch:
        """A batch on the device of its first context."""
        records = torch.tensor([sequence.record() for sequence in sequences], dtype=torch.int64)
        return cls(tuple(sequences), records.to(sequences[0].context.kv_HN2D.device))


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How the work is cut; results do not depend on it, but for the sample that the threshold is taken from.

    tile_keys: keys scored by one program, a power of two and a multiple of MINI_KEYS. rows: keys attended at a time.
    exact_programs: programs per KV head that attend to sinks, recent window and tail. sample_programs: programs per KV
    head that score 1024 keys each for the threshold of the pooled search. warps, stages: of the attention kernel.
    dependent_launch: kernels start while their predecessor ends (Hopper and later).
    """

    tile_keys: int = 2048
    rows: int = 64
    exact_programs: int = 2
    sample_programs: int = 8
    warps: int = 4
    stages: int = 2
    registers: int = 0
    pick_apart: bool = False
    early_threshold: bool = False
    dependent_launch: bool = False

    def options(self) -> dict[str, int | bool]:
        """Launch options of the attention kernel that are not always given."""
        options: dict[str, int | bool] = {"maxnreg": self.registers} if self.registers else {}
        return options | ({"launch_pdl": True} if self.dependent_launch else {})


def launch_shape(max_keys: int, rows: int, pooled: bool) -> LaunchShape:
    """A launch shape for contexts of up to max_keys and `rows` sequences times KV heads; best of some on an H200.

    Few rows fill the device once, so what counts is the time from the first load to the last store; many rows fill it
    many times, so what counts is how few instructions and registers a tile takes.
    """
    samples = max(8, min(16, max_keys // 2**14))
    if rows > 32:
        return LaunchShape(
            tile_keys=4096,
            rows=32,
            exact_programs=1,
            sample_programs=samples // 2,
            registers=80,
            pick_apart=True,
            early_threshold=True,
            dependent_launch=True,
        )
    if max_keys * rows <= 2**21:
        return LaunchShape(
            rows=32,
            exact_programs=1,
            sample_programs=samples,
            stages=3,
            registers=128,
            early_threshold=not pooled,
            dependent_launch=True,
        )
    return LaunchShape(
        tile_keys=8192,
        sample_programs=samples,
        registers=96,
        early_threshold=True,
        dependent_launch=True,
    )


@dataclass(frozen=True, slots=True)
class TablePlan:
    """One layer shape and search: everything that a kernel is compiled for.

    max_keys: the longest context of the batch. pooled: one search with the group's mean query, otherwise one per head,
    merged by the sum of their softmaxes. strided: dimensions of subspace b are those with i mod m = b, otherwise a
    slice. scale: of the logits, 1/sqrt(d). Raises InvalidArgumentError for sizes outside of what kernels can do.
    """

    kv_heads: int
    group: int
    head_dim: int
    subspaces: int
    centroids: int
    max_keys: int
    pooled: bool
    strided: bool = True
    shape: LaunchShape = LaunchShape()

    def __post_init__(self) -> None:
        if not 1 <= self.group <= 8 or self.head_dim not in (64, 128) or not 1 <= self.max_keys <= 2**21:
            raise InvalidArgumentError(
                f"group {self.group}, head dimension {self.head_dim}, {self.max_keys} keys; the kernels take groups "
                "of 1 to 8, dimensions 64 and 128 and up to 2^21 keys"
            )
        if self.subspaces < 4 or self.head_dim % self.subspaces or self.centroids < 1:
            raise InvalidArgumentError(
                f"{self.subspaces} subspaces of {self.centroids} centroids for head dimension {self.head_dim}; the "
                "kernels take from 4 subspaces on"
            )
        tile = self.shape.tile_keys
        if tile % MINI_KEYS or tile & (tile - 1):
            raise InvalidArgumentError(
                f"tile of {tile} keys, expected a power of two from {MINI_KEYS} keys on"
            )

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def queries(self) -> int:
        """Queries searched per KV head."""
        return 1 if self.pooled else self.group

    @property
    def tiles(self) -> int:
        """Tiles of the longest context."""
        return -(-self.max_keys // self.shape.tile_keys)

    @property
    def samplers(self) -> int:
        """Programs per KV head that leave a histogram."""
        return self.shape.sample_programs if self.pooled else -(-self.tiles // COMBINE_TILES)

    @property
    def partials(self) -> int:
        return self.tiles + self.shape.exact_programs

    def check(self, batch: TableBatch) -> None:
        """Raises InvalidArgumentError where a sequence is not of this plan's sizes. Reads no device memory."""
        width = self.head_dim // self.subspaces
        sizes = (self.kv_heads, self.subspaces, self.centroids, width)
        for sequence in batch.sequences:
            context = sequence.context
            if tuple(context.centroids_HMCW.shape) != sizes or context.keys > self.max_keys:
                raise InvalidArgumentError(
                    f"centroids are {tuple(context.centroids_HMCW.shape)} over {context.keys} keys; the plan is for "
                    f"{sizes} and up to {self.max_keys} keys"
                )


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers of one launch, made once per batch size; a captured graph keeps using them.

    rows [B, H, L, M] int32, addresses [B, H, L, M] int64 and weights [B, H, L, M/4] int32: the picked table rows, where
    they begin, and their weights, one byte each;
    units [B, H, L, 2] float32: what one unit of a sum is worth as a logit, and the largest sum there can be.
    logits [B, H, L, P, tile/4] int32: four weights exp(logit) in a word, relative to the tile's largest, a byte each (5
    exponent and 3 mantissa bits); peaks, masses [B, H, L, P] float32: log2 of the largest weight, and the sum of them;
    normalisers [B, H, L] float32: log2 of the sum of all weights. histograms [B, H, samplers,
    BINS] int32: sampled keys by score. limits [B, H] float32: the bin, with a fraction, from which on keys are kept,
    where it is found early; arrivals [B, H] int32: counters for that, zero between steps.
    ids [B, H, P, tile] int32 and counts [B, H, P] int32: the kept keys of every tile, ascending inside a tile.
    outs [B, H, X, G, d] and lses [B, H, X, G] float32: partial attention states.
    out [B, H, G, d] in the queries' dtype and lse [B, H, G] float32: the result.
    """

    rows: Tensor
    addresses: Tensor
    weights: Tensor
    units: Tensor
    logits: Tensor
    peaks: Tensor
    masses: Tensor
    normalisers: Tensor
    histograms: Tensor
    arrivals: Tensor
    limits: Tensor
    ids: Tensor
    counts: Tensor
    outs: Tensor
    lses: Tensor
    out: Tensor
    lse: Tensor

    @classmethod
    def make(cls, plan: TablePlan, size: int, dtype: torch.dtype, device: torch.device | str) -> Workspace:
        """Buffers for `size` sequences."""
        heads, group, head_dim, tile = plan.kv_heads, plan.group, plan.head_dim, plan.shape.tile_keys
        queries, picks, tiles, partials = plan.queries, plan.subspaces, plan.tiles, plan.partials

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(size, heads, *shape, dtype=dtype, device=device)

        i32, f32 = torch.int32, torch.float32
        return cls(
            rows=empty(i32, queries, picks),
            addresses=empty(torch.int64, queries, picks),
            weights=empty(i32, queries, picks // 4),
            units=empty(f32, queries, 2),
            logits=empty(i32, queries, 0 if plan.pooled else tiles, tile // 4),
            peaks=empty(f32, queries, tiles),
            masses=empty(f32, queries, tiles),
            normalisers=empty(f32, queries),
            histograms=empty(i32, plan.samplers, BINS),
            arrivals=torch.zeros(size, heads, dtype=i32, device=device),
            limits=empty(f32),
            ids=empty(i32, tiles, tile),
            counts=empty(i32, tiles),
            outs=empty(f32, partials, group, head_dim),
            lses=empty(f32, partials, group),
            out=empty(dtype, group, head_dim),
            lse=empty(f32, group),
        )

    def kept(self, capacity: int) -> tuple[Tensor, Tensor]:
        """What the last step selected, as a `Selection` holds it: ids [B, H, capacity] int32 and counts [B, H] int32.

        Ids are ascending; those after a row's count are 0, and the largest are left out where there is no room. Sorts
        every id buffer: for comparisons, not for a decode step. Does not wait for the device.
        """
        columns = torch.arange(self.ids.shape[3], device=self.ids.device)
        none = torch.iinfo(torch.int32).max
        there = columns < self.counts[..., None]
        ids = self.ids.masked_fill(~there, none).flatten(2).sort(-1).values[..., :capacity]
        counts = self.counts.sum(-1, dtype=torch.int32).clamp(max=capacity)
        return ids.masked_fill(ids == none, 0), counts
