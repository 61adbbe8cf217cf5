"""Prefill on a GPU: tokens per second against the bare forward pass, from host memory, and the building of indexes.

usage: python ops/bench/prefill/prefill_gpu.py [--figures forward,beyond,build] [--tokens 32768]

A model of Llama-3.1-8B's shape with random weights, bfloat16. First it is checked, on two layers, that keys and values
read chunk by chunk are those of one pass with torch's own attention, and that clusters built on the device are as
tight as faiss's, and that keys and values that stay in host memory are those that stay on the device, bit for bit.
Then the same tokens are read by the bare decoder in one pass and by the capture in chunks (forward), and with keys and
values in host memory, in several chunks and blocks (beyond). At last every index of one layer is built by itself
(build). One JSON line per figure.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.made_up.contexts import VOCABULARY, make_model
from harness.parsing import parse_counts
from harness.report import CheckFailedError, check_close, reporting
from harness.timing import seconds

from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.interface.layer_index import LayerSource
from index_store.methods.method import INDEX_SPECS, IndexSpec
from index_store.store.description.context_id import ModelIdentity
from prefill_worker.build.kv_placement import DeviceMeter
from prefill_worker.reading.capture import Capture, register_attention
from prefill_worker.reading.kept_layers import PAST_BLOCK
from prefill_worker.reading.prefill import run_context
from prefill_worker.reading.query_sample import plan_sample

DEVICE = torch.device("cuda")
CHECKED_TOKENS = 6000
CHECKED_LAYERS = 2
BEYOND_TOKENS = 90_000  # more than one of the largest blocks
SAMPLE = 8192


def random_model(layers: int, attention: str) -> Any:
    """On the GPU; the same weights each time. With attention of its own it is the model as it comes."""
    return make_model(layers, attention=attention, fused=attention != "sdpa")[0]


def make_capture(layers: int, tokens: int, block: int | None = None) -> Capture:
    """What `prefill-worker run` uses for such a model; with a block, keys and values are in host memory."""
    identity = ModelIdentity("random", "llama", "0", "0", layers, 32, 8, 128, VOCABULARY, 2**20)
    plan = plan_sample(tokens, [], SAMPLE // 4, 0)
    return Capture(identity, tokens, torch.bfloat16, plan, "cuda", block_tokens=block)


def tokens_of(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    ids: list[int] = torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()
    return ids


@torch.inference_mode()
def check_capture(chunk: int) -> dict[str, float]:
    """Relative errors of the last layer's keys and values against one pass with torch's attention."""
    ids = tokens_of(CHECKED_TOKENS)
    model = random_model(CHECKED_LAYERS, "sdpa")
    cache = model.model(torch.tensor([ids], device="cuda"), use_cache=True).past_key_values
    last = cache.layers[CHECKED_LAYERS - 1]
    expected = torch.stack([last.keys[0], last.values[0]], dim=2)
    capture = make_capture(CHECKED_LAYERS, len(ids))
    run_context(random_model(CHECKED_LAYERS, register_attention()), capture, ids, chunk)
    found = capture.kv(CHECKED_LAYERS - 1)
    error = check_close("keys and values read in chunks", found, expected, 0.02)
    beyond = make_capture(CHECKED_LAYERS, BEYOND_TOKENS, PAST_BLOCK)
    beside = make_capture(CHECKED_LAYERS, BEYOND_TOKENS)
    model = random_model(CHECKED_LAYERS, register_attention())
    for each in (beyond, beside):
        run_context(model, each, tokens_of(BEYOND_TOKENS), chunk)
    for layer in range(CHECKED_LAYERS):
        if not torch.equal(beyond.kv(layer), beside.kv(layer).cpu()):
            raise CheckFailedError(f"keys and values of layer {layer} differ between host and device memory")
    beyond.close()
    return {"kv_error": error, "spread_ratio": check_clusters(capture)}


def check_clusters(capture: Capture) -> float:
    """How much wider the clusters built on the device are than those of the host, over one head's keys."""
    spec = INDEX_SPECS["remainder_clusters"]
    spreads = []
    for device in ("cuda", "cpu"):
        kv = capture.kv(0)[:1].to(device)
        source = LayerSource(kv, capture.query_sample(0))
        arrays = INDEX_CLASSES[spec.kind].build(spec.parameters, source, 0).arrays()
        own = arrays["assignment"][0].long()
        keys = kv[0, :, 0].float()
        apart = keys - arrays["means"][0][own.clamp(min=0)]
        spreads.append(float(apart[own >= 0].double().square().sum()))
    if not spreads[0] < 1.02 * spreads[1]:
        raise CheckFailedError(f"clusters are {spreads[0] / spreads[1]:.3f} times as wide as the host's")
    return spreads[0] / spreads[1]


@torch.inference_mode()
def forward_figure(tokens: int, layers: int, chunk: int) -> dict[str, Any]:
    """Tokens per second of the bare decoder in one pass, and of the capture in chunks."""
    ids = tokens_of(tokens)
    row: dict[str, Any] = {
        "figure": "forward",
        "tokens": tokens,
        "layers": layers,
        "chunk": chunk,
    }
    model = random_model(layers, "sdpa")
    batch = torch.tensor([ids], device="cuda")
    model.model(batch[:, : min(tokens, 8192)], use_cache=False)
    torch.cuda.reset_peak_memory_stats()
    row["bare_s"] = seconds(lambda: model.model(batch, use_cache=False), DEVICE)
    row["bare_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    del model
    torch.cuda.empty_cache()
    model = random_model(layers, register_attention())
    few = ids[: 18 * chunk]  # long enough for all kernels to be there
    run_context(model, make_capture(layers, len(few)), few, chunk)
    torch.cuda.reset_peak_memory_stats()
    capture = make_capture(layers, tokens)
    row["capture_s"] = seconds(lambda: run_context(model, capture, ids, chunk), DEVICE)
    row["capture_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    row["kv_gb"] = sum(capture.kv(layer).nbytes for layer in range(layers)) / 1e9
    row["bare_tokens_per_s"] = tokens / row["bare_s"]
    row["capture_tokens_per_s"] = tokens / row["capture_s"]
    row["of_bare"] = row["bare_s"] / row["capture_s"]
    return row


@torch.inference_mode()
def beyond_figure(model: Any, tokens: int, chunk: int, block: int | None) -> dict[str, Any]:
    """Tokens per second with keys and values in host memory, and what the device held beside the weights."""
    layers, ids = len(model.model.layers), tokens_of(tokens)
    meter = DeviceMeter(torch.device("cuda"))
    begin = time.perf_counter()
    capture = make_capture(layers, tokens, block)
    run_context(model, capture, ids, chunk)
    taken = time.perf_counter() - begin
    nbytes = sum(capture.kv(layer).nbytes for layer in range(layers))
    passes = range(0, tokens, chunk)
    capture.close()
    return {
        "figure": "beyond",
        "tokens": tokens,
        "layers": layers,
        "chunk": chunk,
        "block": block,
        "beyond_s": taken,
        "tokens_per_s": tokens / taken,
        "kv_gb": nbytes / 1e9,
        "device_peak_gb": (meter.peak() or 0) / 1e9,
        "read_gb": sum(passes) / tokens * nbytes / 1e9,
        "read_gb_per_s": sum(passes) / tokens * nbytes / 1e9 / taken,
    }


def build_figures(tokens: int) -> Iterator[dict[str, Any]]:
    """Milliseconds to build each index of one layer from keys, values and queries on the device, checks included."""
    capture = make_capture(1, tokens)
    capture.begin_context_chunk(0, tokens)
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(heads, tokens, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (32, 8, 8)
    )
    capture.attend(0, query, key, value)
    source = LayerSource(
        capture.kv(0), capture.query_sample(0), 500_000.0 ** -(torch.arange(0, 128, 2) / 128)
    )
    for name, spec in INDEX_SPECS.items():
        if not spec.stored:
            continue

        def build(spec: IndexSpec = spec) -> object:
            return INDEX_CLASSES[spec.kind].build(spec.parameters, source, 0)

        build()
        times = [1e3 * seconds(build, DEVICE) for _ in range(5)]
        yield {
            "figure": "build",
            "tokens": tokens,
            "index": name,
            "ms": statistics.median(times),
        }


def parse_pass(text: str) -> tuple[int, int | None]:
    """CHUNK[:BLOCK]; without a block keys and values are on the device."""
    chunk, _, block = text.partition(":")
    return int(chunk), int(block) if block else None


def beyond_figures(layers: int, lengths: list[int], passes: str) -> Iterator[dict[str, Any]]:
    """The same contexts with keys and values on the device and in host memory."""
    model = random_model(layers, register_attention())
    beyond_figure(model, 18 * 2048, 2048, 16_384)  # long enough for all kernels to be there
    for length in lengths:
        for each in passes.split(","):
            yield beyond_figure(model, length, *parse_pass(each))


def main(
    figures: Annotated[str, typer.Option(help="Which, comma-separated.")] = "forward,beyond,build",
    tokens: Annotated[str, typer.Option(help="Contexts, comma-separated.")] = "32768,131072",
    layers: Annotated[int, typer.Option(help="Of the model whose forward pass is timed.")] = 32,
    chunk: Annotated[int, typer.Option(help="Tokens per pass.")] = 2048,
    passes: Annotated[
        str, typer.Option(help="CHUNK, or CHUNK:BLOCK with keys and values in host memory.")
    ] = "2048,2048:65536,8192,8192:65536",
) -> None:
    """Checks and times prefill; one JSON line per figure."""
    wanted, lengths = figures.split(","), parse_counts(tokens)
    with reporting("prefill_gpu") as report:
        report.add({"figure": "check", **check_capture(chunk)})
        for row in chain(
            (forward_figure(length, layers, chunk) for length in lengths if "forward" in wanted),
            beyond_figures(layers, lengths, passes) if "beyond" in wanted else (),
            build_figures(lengths[-1]) if "build" in wanted else (),
        ):
            report.add(row)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
