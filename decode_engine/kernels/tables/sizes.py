"""Query tables as kernels find them, what these are compiled for, how their work is cut, and their buffers.

Shape legend: B sequences, H KV heads, G query heads per KV head, N keys of a context, m subspaces, C centroids, W = d/m
slice width, J picked table rows (m, or 4 where it is less), d head dim, L queries searched per KV head (1 where pooled,
else G), P tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.online_softmax import Partials
from decode_engine.kernels.families import LARGEST_GROUP, MAX_KEYS, QUERY_TABLES
from index_store.errors import InvalidArgumentError

MINI_KEYS = 256
"""Consecutive keys of a table row that one program reads before it skips to its next block; a row is padded to it."""

BINS = 512
"""Bins of the score histogram that the threshold is read from."""

BIN_SHIFT, LEAST_BIN = 19, (127 - 29) << 4
"""A summed weight's bin is the upper bits of the float32 number: 16 bins an octave, from 2^-29 to 2^3, which the sum of
eight softmaxes reaches."""

SAMPLE_KEYS = 1024
"""Keys that one sampling program scores."""

MAX_SAMPLERS = 32
"""Sampling programs of a KV head, so that counts of all of them fit into 16 bits."""

SAMPLE_RUN_KEYS = 32
"""Consecutive keys of a sample, whose bytes travel together. Keys near each other are alike: long runs say little."""

_SHORT = 2**17
"""The search per head samples MINI_KEYS of every tile; of shorter contexts as many keys as if they had so many, and of
very long ones as many as MAX_SAMPLERS programs do."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """How the work is cut; results do not depend on it, but for the sample that threshold and normalisers come from.

    tile_keys: keys scored by one program, a power of two and a multiple of MINI_KEYS. rows: keys attended at a time.
    exact_programs: programs per KV head that only attend to sinks, recent window and tail; of longer tails the other
    programs take their shares too. sample_programs: programs per KV head that score SAMPLE_KEYS keys each for the
    threshold of the pooled search, a power of two. warps, stages, registers: of the attention kernel; 0 registers leave
    the choice to the compiler. Of the pooled search, pick_apart: rows are picked by a kernel of their own;
    early_threshold: it is found once, not by every program that compares with it.
    """

    tile_keys: int = 2048
    rows: int = 32
    exact_programs: int = 1
    sample_programs: int = 8
    warps: int = 4
    stages: int = 3
    registers: int = 0
    pick_apart: bool = False
    early_threshold: bool = False

    def options(self) -> dict[str, int]:
        """Launch options of the attention kernel."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | ({"maxnreg": self.registers} if self.registers else {})


def table_shape(max_keys: int, rows: int) -> TableShape:
    """A launch shape for contexts of up to max_keys and `rows` sequences times KV heads; best of some on an H200.

    Few rows fill the device once, so what counts is the time from the first load to the last store; many rows fill it
    many times, so what counts is how few instructions and registers a tile takes.
    """
    samples = triton.next_power_of_2(max(8, min(16, max_keys // 2**14)))
    samples = min(samples, triton.next_power_of_2(-(-max_keys // SAMPLE_KEYS)))
    if rows > 32:
        return TableShape(
            tile_keys=4096,
            sample_programs=max(1, samples // 2),
            stages=2,
            registers=80,
            pick_apart=True,
            early_threshold=True,
        )
    if max_keys * rows <= 2**21:
        return TableShape(sample_programs=samples, registers=96)
    return TableShape(
        tile_keys=8192,
        rows=64,
        exact_programs=2,
        sample_programs=samples,
        stages=2,
        registers=96,
        early_threshold=True,
    )


@dataclass(frozen=True, slots=True)
class TableSizes:
    """One layer shape and search: everything that a kernel is compiled for.

    max_keys: the longest context of the batch. pooled: one search with the group's mean query, otherwise one per head,
    merged by the sum of their softmaxes. strided: dimensions of subspace b are those with i mod m = b, otherwise a
    slice. Raises InvalidArgumentError for sizes outside of what kernels can do.
    """

    kv_heads: int
    group: int
    head_dim: int
    subspaces: int
    centroids: int
    max_keys: int
    pooled: bool
    strided: bool = True
    shape: TableShape = TableShape()

    def __post_init__(self) -> None:
        QUERY_TABLES.check(self.group, self.head_dim, self.max_keys, (self.subspaces, self.centroids))
        for label, size, least, most in (
            ("tile_keys", self.shape.tile_keys, MINI_KEYS, MAX_KEYS),
            ("sample_programs", self.shape.sample_programs, 1, MAX_SAMPLERS),
        ):
            if not least <= size <= most or size & (size - 1):
                raise InvalidArgumentError(
                    f"{label} is {size}, expected a power of two from {least} to {most}"
                )

    @property
    def scale(self) -> float:
        """Of the logits."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def queries(self) -> int:
        """Queries searched per KV head."""
        return 1 if self.pooled else self.group

    @property
    def picks(self) -> int:
        """Table rows added up per query; they are added in fours."""
        return max(4, self.subspaces)

    @property
    def tiles(self) -> int:
        """Tiles of the longest context."""
        return -(-self.max_keys // self.shape.tile_keys)

    @property
    def samplers(self) -> int:
        """Programs per KV head that leave a histogram, a power of two: some may find nothing to count."""
        if self.pooled:
            return self.shape.sample_programs
        tile = self.shape.tile_keys
        sampled = min(max(self.tiles, _SHORT // tile) * MINI_KEYS, self.tiles * tile)
        return min(MAX_SAMPLERS, int(triton.next_power_of_2(-(-sampled // SAMPLE_KEYS))))

    @property
    def programs(self) -> int:
        """Programs of the attention kernel per KV head."""
        return self.tiles + self.shape.exact_programs


class TableConstants(NamedTuple):
    """What kernels of a step are compiled for: letters as in the legend, GP, CP, PP and LP the next powers of two.

    X: query rows of a product. BW: words of a tile. S: programs that sample. BN: rows attended at a time, by EXACT
    programs without a tile. PICK: programs that sample pick rows for themselves. EARLY: the limit is found once.
    ASSEMBLY: on a device. PRECISION: of products of rows.
    """

    HEADS: tl.constexpr
    L: tl.constexpr
    GROUP: tl.constexpr
    X: tl.constexpr
    GP: tl.constexpr
    DIM: tl.constexpr
    M: tl.constexpr
    C: tl.constexpr
    CP: tl.constexpr
    J: tl.constexpr
    S: tl.constexpr
    BW: tl.constexpr
    BN: tl.constexpr
    EXACT: tl.constexpr
    PP: tl.constexpr
    LP: tl.constexpr
    STRIDED: tl.constexpr
    POOLED: tl.constexpr
    PICK: tl.constexpr
    EARLY: tl.constexpr
    ASSEMBLY: tl.constexpr
    PRECISION: tl.constexpr

    @classmethod
    def of(cls, q_BHGD: Tensor, sizes: TableSizes) -> TableConstants:
        """For queries of a step."""
        shape, up = sizes.shape, triton.next_power_of_2
        numbers = (
            sizes.kv_heads, sizes.queries, sizes.group, LARGEST_GROUP, up(sizes.group), sizes.head_dim, sizes.subspaces,
            sizes.centroids, up(sizes.centroids), sizes.picks, sizes.samplers, shape.tile_keys // 4, shape.rows,
            shape.exact_programs, up(sizes.tiles), up(sizes.queries), sizes.strided, sizes.pooled,
            not shape.pick_apart, shape.early_threshold or not sizes.pooled, q_BHGD.is_cuda,
            "ieee" if q_BHGD.element_size() == 4 else "tf32",
        )  # fmt: skip
        return cls(*map(tl.constexpr, numbers))


@dataclass(frozen=True, slots=True)
class TableWork:
    """Buffers between the launches of a step, made once per batch size and used by every layer.

    rows [B, H, L, J] int32 and weights [B, H, L, J/4] int32: where the picked table rows begin, in blocks of MINI_KEYS
    bytes from the sequence's first, and their weights, one byte each. units [B, H, L, 2] float32: what one unit of a
    sum is worth as a logit, and the largest sum there can be. Per head, logits [B, H, L, P, tile/4] int32: four weights
    exp(logit) in a word, relative to the tile's largest, a byte each (5 exponent and 3 mantissa bits); peaks, masses
    [B, H, L, P] float32: log2 of the largest weight, and the sum of them; normalisers [B, H, L] float32: log2 of the
    sum of all weights. histograms [B, H, samplers, BINS] int16: sampled keys by score. cuts [B, H, 3]
    int32: which keys are kept (`border`), where that is found early; arrivals [B, H] int32: counters for
    that, zero between steps. ids [B, H, P, tile] int32: the kept keys of every tile, ascending inside it.
    """

    rows: Tensor
    weights: Tensor
    units: Tensor
    logits: Tensor
    peaks: Tensor
    masses: Tensor
    histograms: Tensor
    arrivals: Tensor
    normalisers: Tensor
    cuts: Tensor
    ids: Tensor
    partials: Partials

    @classmethod
    def make(cls, sizes: TableSizes, size: int, device: torch.device) -> TableWork:
        """Buffers for `size` sequences."""
        heads, queries, tiles, tile = sizes.kv_heads, sizes.queries, sizes.tiles, sizes.shape.tile_keys

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(size, heads, *shape, dtype=dtype, device=device)

        i32, f32 = torch.int32, torch.float32
        return cls(
            rows=empty(i32, queries, sizes.picks),
            weights=empty(i32, queries, sizes.picks // 4),
            units=empty(f32, queries, 2),
            logits=empty(i32, queries, 0 if sizes.pooled else tiles, tile // 4),
            peaks=empty(f32, queries, tiles),
            masses=empty(f32, queries, tiles),
            histograms=empty(torch.int16, sizes.samplers, BINS),
            arrivals=torch.zeros(size, heads, dtype=i32, device=device),
            normalisers=empty(f32, queries),
            cuts=empty(i32, 3),
            ids=empty(i32, tiles, tile),
            partials=Partials.allocate(size * heads, sizes.programs, sizes.group, sizes.head_dim, device),
        )

    def counts(self) -> Tensor:
        """A buffer [B, H, P] int32 for the numbers of kept keys."""
        return torch.zeros(self.ids.shape[:3], dtype=torch.int32, device=self.ids.device)


_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class TableContext:
    """One layer of a context in device memory.

    kv_HN2D: [H, N, 2, d] in a float dtype. tables_HMCN: [H, m, C, N] int8 whose rows are a multiple of MINI_KEYS bytes
    apart (`padded_rows`); what lies between them may be anything. centroids_HMCW: [H, m, C, W] float32. scales_HM:
    [H, m] float32. Raises InvalidArgumentError where shapes, types or strides are others.
    """

    kv_HN2D: Tensor
    tables_HMCN: Tensor
    centroids_HMCW: Tensor
    scales_HM: Tensor

    def __post_init__(self) -> None:
        heads, count, two, head_dim = self.kv_HN2D.shape
        _, subspaces, centroids, width = self.centroids_HMCW.shape
        expected = {
            "centroids": (self.centroids_HMCW, (heads, subspaces, centroids, width), torch.float32),
            "scales": (self.scales_HM, (heads, subspaces), torch.float32),
            "tables": (self.tables_HMCN, (heads, subspaces, centroids, count), torch.int8),
            "kv": (self.kv_HN2D, (heads, count, 2, subspaces * width), self.kv_HN2D.dtype),
        }
        for name, (tensor, shape, dtype) in expected.items():
            contiguous = name == "tables" or tensor.is_contiguous()
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not contiguous:
                raise InvalidArgumentError(
                    f"{name} of a table context are {tuple(tensor.shape)} {tensor.dtype}"
                    f"{'' if contiguous else ' not contiguous'}, expected {shape} {dtype} contiguous"
                )
        if two != 2 or head_dim not in QUERY_TABLES.head_dims or not has_padded_rows(self.tables_HMCN):
            raise InvalidArgumentError(
                f"a table context has keys of dimension {head_dim} and table strides {self.tables_HMCN.stride()}; "
                f"expected one of {QUERY_TABLES.head_dims}, and rows a multiple of {MINI_KEYS} bytes apart"
            )

    @property
    def keys(self) -> int:
        return self.kv_HN2D.shape[1]

    def fields(self) -> dict[int, int]:
        """Of a record: where the tables are."""
        return {
            records.TABLES: self.tables_HMCN.data_ptr(),
            records.TABLE_ROW: self.tables_HMCN.stride(2),
            records.CENTROIDS: self.centroids_HMCW.data_ptr(),
            records.SCALES: self.scales_HM.data_ptr(),
        }


def has_padded_rows(tables_HMCN: Tensor) -> bool:
    """Whether kernels can read the rows as they lie: whole blocks of MINI_KEYS bytes, in memory that is theirs."""
    heads, subspaces, centroids, keys = tables_HMCN.shape
    row = tables_HMCN.stride(2)
    if row % MINI_KEYS or row < keys or tables_HMCN.data_ptr() % _ALIGNED:
        return False
    if tables_HMCN.stride() != (subspaces * centroids * row, centroids * row, row, 1):
        return False
    blocks_end = (heads * subspaces * centroids - 1) * row + -(-keys // MINI_KEYS) * MINI_KEYS
    return tables_HMCN.storage_offset() + blocks_end <= tables_HMCN.untyped_storage().nbytes()


def padded_rows(tables_HMCN: Tensor) -> Tensor:
    """A copy [H, m, C, N] whose rows are padded with zeros to a multiple of MINI_KEYS bytes."""
    keys = tables_HMCN.shape[3]
    return torch.nn.functional.pad(tables_HMCN, (0, -keys % MINI_KEYS))[..., :keys]
