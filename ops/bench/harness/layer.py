"""One layer of a decode step on a GPU, as benchmarks of kernels have it: Llama-3.1-8B's heads, bfloat16."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_attention import StepPlan
from harness.flashinfer_baseline import paged_us
from harness.report import CheckFailedError
from harness.timing import eager_us, fastest, graph_us, kernel_us
from index_store.methods.method import Method
from index_store.store.description.context_id import ModelIdentity

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
ON_GPU = torch.cuda.is_available()
"""Where there is none benchmarks refuse to time, but their checks run in Triton's interpreter, exact in float32."""
DEVICE, DTYPE = (torch.device("cuda", 0), torch.bfloat16) if ON_GPU else (torch.device("cpu"), torch.float32)
SINKS = 8
RECENT, TAIL, TAIL_ROOM = 64, 16, 64
"""Of searches alone with their attention; other benchmarks have their own."""
COLD_BYTES = 512 * 2**20
"""Of one turn over all layers, at least: many times the second-level cache."""
SCALE = HEAD_DIM**-0.5
VECTOR = HEAD_DIM * DTYPE.itemsize
ROW = 2 * VECTOR
"""Bytes of a key and its value."""


def step_plan(
    method: Method,
    layers: int,
    batch: int,
    length: int,
    kv_heads: int | None = None,
    head_dim: int = HEAD_DIM,
    group: int = GROUP,
) -> StepPlan:
    """Of steps over so many layers of such a model. kv_heads: KV_HEADS unless others are asked for."""
    heads = kv_heads or KV_HEADS
    model = ModelIdentity("bench", "none", "f", "t", layers, heads * group, heads, head_dim, 2, 2 * length)
    return StepPlan(model, method, batch, int(triton.next_power_of_2(length)), DTYPE, DEVICE)


class Memory:
    """Keys, values and queries of several layers of a batch; subclasses add an index, and say how many layers."""

    layers: int
    spread: ClassVar[float]
    """Of queries, which says how sharp the attention is."""

    def __init__(self, length: int, batch: int, head_dim: int = HEAD_DIM, group: int = GROUP) -> None:
        shape = (self.layers, batch, KV_HEADS, length, 2, head_dim)
        self.kv = torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_()
        q = self.spread * torch.randn(self.layers, batch, KV_HEADS, group, head_dim, device=DEVICE)
        self.q = q.to(DTYPE)
        self.tail = torch.empty(batch, KV_HEADS, TAIL_ROOM, 2, head_dim, dtype=DTYPE, device=DEVICE).normal_()


class Steps(ABC):
    """Decode steps over all layers of a memory: records, attention, and how it is checked."""

    attention: ListedSteps
    records: list[Tensor]

    def __init__(self, memory: Memory, share: float) -> None:
        self.memory = memory
        self.batch, self.length, self.head_dim = memory.kv.shape[1], memory.kv.shape[3], memory.kv.shape[5]
        self.group = memory.q.shape[3]
        self.keep, self.rows = round(share * self.length), self.batch * KV_HEADS

    @property
    @abstractmethod
    def shape(self) -> Any:
        """Of the launches."""

    @abstractmethod
    def check(self, layer: int = 0) -> None:
        """Compares selection and output with eager ones. Raises CheckFailedError."""

    @abstractmethod
    def index_bytes(self) -> int:
        """The least that one layer's search has to read."""

    def search_times(self, turns: int) -> dict[str, float]:
        """Of the search alone, where there is one."""
        return {}

    def attend(self, layer: int) -> Tensor:
        return self.attention.attend(layer, self.memory.q[layer], self.records[layer])

    def all_layers(self, step: Callable[[int], object]) -> list[Callable[[], object]]:
        return [partial(step, layer) for layer in range(self.memory.layers)]

    def measure(self) -> dict[str, Any]:
        """Checks and times. Raises CheckFailedError."""
        self.check()
        layers = self.all_layers(self.attend)
        turns = max(1, 8 // len(layers))
        result: dict[str, Any] = self.search_times(turns)
        result["graph_us"] = graph_us(layers, turns)
        # By a layer of the last steps on average, all sequences and KV heads together.
        kept = int(self.attention.kept_B().sum()) // self.memory.layers
        result["kept_of_wanted"] = kept / (self.keep * self.rows)
        result["bytes"] = self.bytes_floor(kept)
        result["launch"] = asdict(self.shape)
        return result | {"eager_us": eager_us(layers), "kernels_us": kernel_us(layers)}

    def bytes_floor(self, kept: int) -> int:
        """The least that one layer's step has to read."""
        row = 2 * self.head_dim * DTYPE.itemsize
        return self.index_bytes() + (kept + self.rows * (SINKS + RECENT + TAIL)) * row


@dataclass(frozen=True, slots=True)
class FlashInfer:
    """Microseconds of its full attention over pages in the dtype of keys and values, and in float8, by way.

    left_out: ways that it refuses on the device, or that are wrong, and why.
    """

    paged: dict[str, float]
    float8: dict[str, float]
    left_out: dict[str, str]

    @classmethod
    def of(cls, memory: Memory) -> FlashInfer:
        """Over contexts of a memory, a row of queries on each."""
        paged, wrong = paged_us(memory.q, memory.kv, memory.kv.dtype)
        float8, wrong8 = paged_us(memory.q, memory.kv)
        return cls(paged, float8, {**wrong, **{f"float8 {name}": why for name, why in wrong8.items()}})


def check_selection(kept: Tensor, expected: Tensor, limit: float) -> None:
    """Raises CheckFailedError when too large a share of the keys is another."""
    other = int((kept != expected).sum()) / max(1, int(expected.sum()))
    if not other <= limit:
        raise CheckFailedError(f"the selection differs from the reference's in {other:.1%} of its keys")


def figure_rows(
    figure: str,
    bars: Mapping[float, float],
    make: Callable[[float], Steps],
    full: dict[str, float],
    bandwidth: float,
    flashinfer: FlashInfer | None = None,
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """One row per kept share, and how it misses its bar, the least ratio to full attention; 0 where none is asked for.

    make: steps at a share. full: microseconds of torch's, by way. flashinfer: what others are compared with as well;
    ratios are to the fastest.
    """
    for share, bar in bars.items():
        result = make(share).measure()
        ways = (
            full | {f"flashinfer {name}": took for name, took in flashinfer.paged.items()}
            if flashinfer
            else full
        )
        best = fastest(ways)
        ratio = float(best["full_us"]) / result["graph_us"]
        row = {"figure": figure, "keep": share, "ratio": ratio, "bar": bar, **best, **result}
        row["fraction"] = result["bytes"] / (result["graph_us"] * 1e-6) / bandwidth
        if flashinfer:
            way, took = min(flashinfer.float8.items(), key=lambda each: each[1])
            row |= {"float8_us": took, "float8_way": way, "float8_ratio": took / result["graph_us"]}
            row |= {"float8_ways_us": flashinfer.float8, "flashinfer_left_out": flashinfer.left_out}
        row |= {"full_backends_us": ways, "copy_tb_per_s": bandwidth / 1e12}
        yield row, [f"{figure} at {share}: {ratio:.2f}x, bar {bar}x"] if ratio < bar else []
