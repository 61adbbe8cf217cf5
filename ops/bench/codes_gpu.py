"""Decode attention over product codes on a GPU, against torch's best full attention on the same tensors in one run.

Regime: one layer of a decode step, 32 query heads, 8 KV heads, head dimension 128, bfloat16; keys, values and codes (8
subspaces of 256 codewords) in the GPU's memory. Several layers' worth of everything take turns, so that no step finds
its data in the second-level cache. Keys, codes and codewords are random: time depends on how many keys are kept, which
is counted and reported, not on what they mean.

`select_us` is the search alone, which leaves lists of keys; `graph_us` is search, attention to the listed keys, to
sinks, recent window and tail, and the merge, the rest being dropped: one layer inside a CUDA graph of all of them;
`eager_us` the same launched from Python; medians after a warm-up. `full_us` is the fastest of torch's cuDNN, flash and
memory-efficient attention (grouped heads), over keys and values as they are stored and over separate copies. `bytes` is
the least that a step has to read: codes, codebooks, and the keys and values attended to; `fraction` is how much of a
plain copy's bandwidth that makes. `lookups` counts table entries looked up per nanosecond of the search and
multiprocessor. Before a time is reported, the keys that were kept are compared with those of the eager reference, and
the output with exact attention over them.

Figure `quality`: keys around centres, their codes by the product's own k-means. How many of the keys that the search
keeps are among as many best ones of the general path's ranking by the same codes (`overlap`), and how much attention
they hold, `mass`, against those, `mass_general`, and against the truly best ones, `mass_best`.

One JSON line per figure; the exit code is 1 when a check fails.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import torch
import triton
import typer
from gpu_timing import copy_bandwidth, eager_us, full_attention_us, graph_us, kernel_us
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.codes.batch import CodeShape, CodeWork
from decode_engine.kernels.codes.reference import CodeSequence, kept_keys
from decode_engine.steps.attention.code_selection import CodeSelection
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_attention import KeySelection, StepPlan
from index_store.indexes.interface.layer_index import LayerSource, QuerySample
from index_store.indexes.product_codes.index import ProductCodes
from index_store.methods.method import METHODS, Method
from index_store.selection.budgets import Ratio
from index_store.selection.ranking import Items, Ranking
from index_store.store.manifest import ModelIdentity

KV_HEADS, GROUP, HEAD_DIM, DTYPE = 8, 4, 128, torch.bfloat16
SUBSPACES, CODEWORDS = 8, 256
SINKS, RECENT, TAIL = 8, 64, 16
COLD_BYTES = 256 * 2**20  # of one turn over all layers, at least: several times the second-level cache
SHARES = (0.05, 0.01)
CENTRES, QUALITY_HEADS = 1024, 2


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured."""

    name: str
    length: int
    batch: int


FIGURES = (Figure("128k-b1", 131072, 1), Figure("512k-b1", 524288, 1), Figure("128k-b16", 131072, 16))


class CheckFailedError(Exception):
    """A result is wrong, so its time means nothing."""


class CodeSteps(ListedSteps):
    """Attends to what product codes select."""

    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = {ProductCodes.kind: CodeSelection}


class Memory:
    """Keys, values, codes and queries of several layers of a batch."""

    def __init__(self, length: int, batch: int) -> None:
        searched = batch * KV_HEADS * length * (SUBSPACES + round(0.01 * 4 * HEAD_DIM))
        self.layers = max(2, min(16, -(-COLD_BYTES // searched)))
        shape = (self.layers, batch, KV_HEADS, length, 2, HEAD_DIM)
        self.kv = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
        q = 2.0 * torch.randn(self.layers, batch, KV_HEADS, GROUP, HEAD_DIM, device="cuda")
        self.q = q.to(DTYPE)
        rows = (self.layers, batch, KV_HEADS, length, SUBSPACES)
        self.codes = torch.empty(rows, dtype=torch.uint8, device="cuda").random_(0, CODEWORDS)
        books = (self.layers, batch, KV_HEADS, SUBSPACES, CODEWORDS, HEAD_DIM // SUBSPACES)
        self.codebooks = torch.randn(books, device="cuda")
        self.tail = torch.empty(batch, KV_HEADS, 64, 2, HEAD_DIM, dtype=DTYPE, device="cuda").normal_()

    def sequence(self, layer: int, b: int, keep: int) -> CodeSequence:
        end = self.kv.shape[3] - RECENT
        return CodeSequence(self.codes[layer, b], self.codebooks[layer, b], SINKS, end, keep)

    def records(self, layer: int, keep: int) -> Tensor:
        """[B, RECORD_FIELDS] on the device."""
        batch = self.kv.shape[1]
        rows = torch.zeros(batch, records.RECORD_FIELDS, dtype=torch.int64)
        for b in range(batch):
            fields = self.sequence(layer, b, keep).fields() | {
                records.KV: self.kv[layer, b].data_ptr(),
                records.KV_HEAD: self.kv.stride(2) * self.kv.element_size(),
                records.TAIL: self.tail[b].data_ptr(),
                records.TAIL_HEAD: self.tail.stride(1) * self.tail.element_size(),
                records.TAIL_KEYS: TAIL,
            }
            for field, value in fields.items():
                rows[b, field] = value
        return rows.cuda()


def method_of(share: float) -> Method:
    return replace(METHODS["pq"].without_remainder(), budget=Ratio(share))


class Steps:
    """The decode steps of a figure: every layer's records, and the attention."""

    def __init__(self, memory: Memory, figure: Figure, share: float, shape: CodeShape | None) -> None:
        self.keep = round(share * figure.length)
        heads = KV_HEADS * GROUP
        identity = ModelIdentity(
            "bench", "none", "f", "t", memory.layers, heads, KV_HEADS, HEAD_DIM, 2, 2**21
        )
        device = torch.device("cuda", 0)
        plan = StepPlan(identity, method_of(share), figure.batch, figure.length, DTYPE, device)
        self.attention = CodeSteps(plan)
        self.selection = CodeSelection(plan)
        if shape is not None:
            self.selection.code_plan = replace(self.selection.code_plan, shape=shape)
            self.selection.work = CodeWork.make(self.selection.code_plan, plan.size, device)
        self.attention.selection = self.selection
        self.memory = memory
        self.records = [memory.records(layer, self.keep) for layer in range(memory.layers)]

    def select(self, layer: int) -> KeyLists:
        return self.selection.select(layer, self.memory.q[layer], self.records[layer])

    def attend(self, layer: int) -> Tensor:
        return self.attention.attend(layer, self.memory.q[layer], self.records[layer])

    def all_layers(self, step: Callable[[int], object]) -> list[Callable[[], object]]:
        return [partial(step, layer) for layer in range(self.memory.layers)]

    def kept(self) -> int:
        """Keys kept on average by a layer of the last steps, all sequences and KV heads together."""
        return int(self.attention.kept_B().sum()) // self.memory.layers


def check(steps: Steps, layer: int = 0) -> None:
    """Compares selection and output of the first and the last sequence with eager ones. Raises CheckFailedError."""
    memory, q = steps.memory, steps.memory.q[layer]
    lists = steps.select(layer)
    lists.counts_RP.fill_(-1)
    out = steps.attend(layer)
    if not bool((lists.counts_RP >= 0).all()):
        raise CheckFailedError("a count was not written")
    for b in {0, len(q) - 1}:
        sequence = memory.sequence(layer, b, steps.keep)
        for h in range(KV_HEADS):
            kept = torch.zeros(memory.kv.shape[3], dtype=torch.bool, device="cuda")
            kept[lists.of_row(b * KV_HEADS + h)] = True
            expected = kept_keys(q[b, h], sequence, h, steps.selection.code_plan)
            other = int((kept != expected).sum()) / max(1, int(expected.sum()))
            if not other <= 0.03:
                raise CheckFailedError(
                    f"the selection differs from the reference's in {other:.1%} of its keys"
                )
            kept[: sequence.first] = True
            kept[sequence.end :] = True
            rows = torch.cat([memory.kv[layer, b, h][kept], memory.tail[b, h, :TAIL]]).double()
            weights = (q[b, h].double() @ rows[:, 0].t() * HEAD_DIM**-0.5).softmax(-1)
            exact = weights @ rows[:, 1]
            error = float((out[b, h].double() - exact).norm() / exact.norm())
            if not error <= 1e-2:
                raise CheckFailedError(f"relative error {error:.1e}")


def measure(
    memory: Memory, figure: Figure, share: float, shape: CodeShape | None, parts: bool
) -> dict[str, Any]:
    """Checks and times one launch shape. Raises CheckFailedError."""
    steps = Steps(memory, figure, share, shape)
    check(steps)
    select, attend = steps.all_layers(steps.select), steps.all_layers(steps.attend)
    turns = max(1, 8 // memory.layers)
    result: dict[str, Any] = {"select_us": graph_us(select, turns=turns)}
    result["graph_us"] = graph_us(attend, turns=turns)
    kept, rows = steps.kept(), figure.batch * KV_HEADS
    result["kept_of_wanted"] = round(kept / (steps.keep * rows), 3)
    codes = rows * (SUBSPACES * figure.length + 4 * CODEWORDS * HEAD_DIM)
    result["bytes"] = codes + (kept + rows * (SINKS + RECENT + TAIL)) * 2 * HEAD_DIM * DTYPE.itemsize
    lookups = rows * figure.length * SUBSPACES / (result["select_us"] * 1e3)
    result["lookups"] = lookups / torch.cuda.get_device_properties(0).multi_processor_count
    result["launch"] = asdict(steps.selection.code_plan.shape)
    if parts:
        result["eager_us"] = eager_us(attend)
        result["kernels_us"] = kernel_us(attend)
    return result


def shapes_to_try(shape: CodeShape) -> list[CodeShape]:
    """Neighbours of a launch shape, for --sweep."""
    tile = shape.tile_keys
    tries = [
        *(replace(shape, tile_keys=keys, warps=8) for keys in (tile, tile * 2)),
        replace(shape, sample_keys=shape.sample_keys // 2),
        replace(shape, sample_warps=4),
    ]
    return [other for other in dict.fromkeys(tries) if other != shape]


def run_figure(
    memory: Memory, figure: Figure, full: dict[str, float], bandwidth: float, sweeping: bool
) -> list[dict[str, Any]]:
    """One row per kept share."""
    rows = []
    best_full = min(full, key=lambda name: full[name])
    for share in SHARES:
        result = measure(memory, figure, share, None, parts=True)
        chosen = CodeShape(**result["launch"])
        for other in shapes_to_try(chosen) if sweeping and share == min(SHARES) else []:
            changed = {k: v for k, v in asdict(other).items() if v != asdict(chosen)[k]}
            tried = measure(memory, figure, share, other, parts=False)
            times = f"select {tried['select_us']:.2f}, step {tried['graph_us']:.2f} us"
            sys.stderr.write(f"{figure.name} {share} {changed}: {times}\n")
        rows.append(
            {
                "figure": figure.name,
                "keep": share,
                "ratio": full[best_full] / result["graph_us"],
                "full_us": full[best_full],
                "full_backend": best_full,
                **result,
                "fraction": result["bytes"] / (result["graph_us"] * 1e-6) / bandwidth,
            }
        )
    return rows


def quality(length: int, sharpness: float) -> list[dict[str, Any]]:
    """What the search keeps against the general path's ranking by the same codes, and against the best keys."""
    heads = QUALITY_HEADS
    centres = torch.randn(heads, CENTRES, HEAD_DIM, device="cuda")
    own = torch.randint(0, CENTRES, (heads, length, 1), device="cuda").expand(-1, -1, HEAD_DIM)
    kv = torch.randn(heads, length, 2, HEAD_DIM, device="cuda").to(DTYPE)
    kv[:, :, 0] = 0.8 * centres.gather(1, own) + 0.6 * kv[:, :, 0]
    sample = QuerySample(torch.zeros(heads, 1, GROUP, HEAD_DIM, device="cuda"), torch.zeros(1).long())
    spec = METHODS["pq"].index
    if spec is None:
        raise CheckFailedError("method pq searches nothing")
    index = ProductCodes.build(spec.parameters, LayerSource(kv, sample, torch.ones(HEAD_DIM // 2)), 0)
    q_HGD = (sharpness * torch.randn(heads, GROUP, HEAD_DIM, device="cuda")).to(DTYPE)
    first, end = SINKS, length - RECENT
    scaled = q_HGD.float()[:, None] * HEAD_DIM**-0.5
    general = index.rank(scaled, first, end, None, {}).scores("average")[:, 0]
    logits = torch.einsum("htgd,hnd->htgn", scaled, kv[:, first:end, 0].float())
    shares = Ranking(logits, Items(first, end)).weights("average")[:, 0]
    rows = []
    for share in SHARES:
        identity = ModelIdentity("bench", "none", "f", "t", 1, heads * GROUP, heads, HEAD_DIM, 2, 2**21)
        plan = StepPlan(identity, method_of(share), 1, length, DTYPE, q_HGD.device)
        arrays = index.arrays()
        sequence = CodeSequence(arrays["codes"], arrays["codebooks"], first, end, round(share * length))
        record = torch.zeros(1, records.RECORD_FIELDS, dtype=torch.int64)
        for field, value in sequence.fields().items():
            record[0, field] = value
        lists = CodeSelection(plan).select(0, q_HGD[None], record.cuda())
        figures = torch.zeros(5)
        for h in range(heads):
            kept = lists.of_row(h).to(q_HGD.device) - first
            likely, best = (scores[h].topk(len(kept)).indices for scores in (general, shares))
            masses = [float(shares[h, keys].sum()) for keys in (kept, likely, best)]
            overlap = float(torch.isin(kept, likely).float().mean())
            figures += torch.tensor([len(kept) / sequence.keep, overlap, *masses]) / heads
        names = ("kept_of_wanted", "overlap", "mass", "mass_general", "mass_best")
        values = dict(zip(names, figures.tolist(), strict=True))
        rows.append({"figure": "quality", "keep": share, "sharpness": sharpness, **values})
    return rows


def describe() -> dict[str, str]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def write(row: Mapping[str, Any], **more: object) -> None:
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
    sys.stdout.write(json.dumps({"bench": "codes_gpu", **rounded, **more, "machine": describe()}) + "\n")
    sys.stdout.flush()


def main(
    figures: Annotated[str, typer.Option(help="Names or prefixes, comma-separated; empty: all.")] = "",
    sweep: Annotated[bool, typer.Option("--sweep", help="Also time other launch shapes, to stderr.")] = False,
) -> None:
    """Times one layer's decode attention over product codes on a GPU; one JSON line per figure."""
    if not torch.cuda.is_available():
        typer.echo("error: this benchmark needs a CUDA device", err=True)
        raise typer.Exit(1)
    prefixes = tuple(figures.split(",")) if figures else ("",)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    memory = None
    try:
        for figure in FIGURES:
            if not figure.name.startswith(prefixes):
                continue
            memory = None
            torch.cuda.empty_cache()
            memory = Memory(figure.length, figure.batch)
            full = full_attention_us(memory.q.flatten(2, 3), memory.kv)
            for row in run_figure(memory, figure, full, bandwidth, sweep):
                write(row, full_backends_us=full, copy_tb_per_s=round(bandwidth / 1e12, 3))
        for sharpness in (1.0, 3.0) if "quality".startswith(prefixes) else ():
            for row in quality(131072, sharpness):
                write(row)
    except CheckFailedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
