"""MuSe on a GPU: its kernels against their eager references, and its time against torch's attention.

usage: python ops/bench/prefill/muse_gpu.py [--figures check,training,prefill,reader,kernels]

`check` compares kernels with references in float32 and bfloat16, and gradients at 4,096 tokens with those of autograd
through the eager reference; no time is reported when it fails. `training` takes forward and backward, acausal, of so
many tokens times heads in sequences of 1K to 64K, 64 dimensions, bfloat16, beside every backend of
scaled_dot_product_attention. `prefill` takes the causal forward of 32 query and 8 KV heads of 128 dimensions over 32K
to 256K tokens. `reader` is the whole prefill of 128K and 256K tokens by the reader. `kernels` are the mean times of the
kernels at 8K. One JSON line per figure.

Queries and keys lie around 100 centres per head, which is milder than real ones and no matter to the time.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.report import CheckFailedError, reporting
from harness.timing import BACKENDS, event_ms, kernel_us
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from decode_engine.evaluation.tasks.documents import source_text
from index_store.models.loading import LoadedModel, load_model, load_tokenizer, resolve_model
from prefill_worker.muse.attention import muse_attention
from prefill_worker.muse.backend import EAGER, Backend, kernels
from prefill_worker.muse.kernels.clusters import BoundedClusters
from prefill_worker.muse.kernels.reference import attend_reference
from prefill_worker.muse.ranges import RangeAttention
from prefill_worker.muse.settings import MuseSettings
from prefill_worker.reading.capture import Capture, register_attention
from prefill_worker.reading.prefill import run_context
from prefill_worker.reading.query_sample import plan_sample

CENTRES = 100
CHECKS = (
    (torch.float32, 64, 1e-3),
    (torch.bfloat16, 64, 0.03),
    (torch.float16, 128, 0.01),
    (torch.bfloat16, 128, 0.03),
)
"""Dtypes and widths that are checked, and the largest relative error of each."""

CHECK_NAMES = tuple(f"{str(dtype).removeprefix('torch.')} {dim}" for dtype, dim, _ in CHECKS)

LONGEST_SLOW_MS = 400.0
"""Beyond this, a backend is timed once and at longer lengths no more."""


def make_points(
    batch: int, heads: int, count: int, dim: int, dtype: torch.dtype, seed: int, spread: float = 0.7
) -> Tensor:
    """[B, H, N, D] around centres of their own per head."""
    generator = torch.Generator("cuda").manual_seed(seed)
    centres = torch.randn(1, heads, CENTRES, dim, generator=generator, device="cuda")
    own = torch.randint(0, CENTRES, (batch, heads, count, 1), generator=generator, device="cuda")
    points = torch.empty(batch, heads, count, dim, dtype=dtype, device="cuda")
    for row in range(batch):
        noise = torch.randn(heads, count, dim, generator=generator, device="cuda")
        points[row] = centres[0].gather(1, own[row].expand(-1, -1, dim)) + spread * noise
    return points


def make_inputs(
    batch: int, heads: int, kv_heads: int, count: int, dim: int, dtype: torch.dtype
) -> list[Tensor]:
    return [
        make_points(batch, number, count, dim, dtype, seed)
        for seed, number in enumerate((heads, kv_heads, kv_heads))
    ]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def gradients(
    inputs: list[Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor], grad: Tensor
) -> list[Tensor]:
    """Output, and gradients by query, key and value."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def eager_on(dtype: torch.dtype) -> Backend:
    """The eager references over the clusters that kernels find in points of a dtype."""

    def find_clusters(
        points: Tensor, clusters: int, cap: float, iterations: int, seed: int
    ) -> BoundedClusters:
        found = kernels().find_clusters(points.to(dtype), clusters, cap, iterations, seed)
        return found._replace(centroids=found.centroids.to(points.dtype))

    return replace(EAGER, find_clusters=find_clusters)


def by_autograd(
    inputs: list[Tensor], settings: MuseSettings, dtype: torch.dtype, grad: Tensor
) -> list[Tensor]:
    """Output and gradients, acausal, of the eager reference in float64 by autograd, over the kernels' clusters."""
    scale = inputs[0].shape[-1] ** -0.5
    # As `muse_attention` seeds them: keys first.
    of_keys, of_queries = (
        kernels().find_clusters(
            x.to(dtype).unsqueeze(2), settings.clusters, settings.cap, settings.iterations, seed
        )
        for seed, x in enumerate((inputs[1], inputs[0]))
    )
    return gradients(
        [x.double() for x in inputs],
        lambda q, k, v: attend_reference(
            q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2), of_queries, of_keys, scale
        )[0].squeeze(2),
        grad.double(),
    )


def check_figure(clusters: int, dtypes: list[str]) -> dict[str, Any]:
    """Relative errors of output and gradients at 4,096 tokens with grouped heads, and how many points cluster alike."""
    row: dict[str, Any] = {"figure": "check"}
    settings = MuseSettings(clusters=clusters, block=512)
    for dtype, dim, most in CHECKS:
        name = f"{str(dtype).removeprefix('torch.')} {dim}"
        if name not in dtypes:
            continue
        inputs = make_inputs(1, 4, 2, 4096, dim, dtype)
        for causal in (False, True):
            errors = check_gradients(inputs, causal, settings)
            row[f"{name} {'causal' if causal else 'acausal'}"] = [round(error, 6) for error in errors]
            if not max(errors) < most:
                raise CheckFailedError(f"{name}, causal {causal}: output and gradients are off by {errors}")
        same = clustered_alike(inputs[0].unsqueeze(2), clusters)
        row[f"{name} clustered alike"] = round(same, 5)
        if not same > 0.98:  # points between two clusters fall to either
            raise CheckFailedError(f"{name}: only {same:.3f} of the points are clustered as by the reference")
    return row


def check_gradients(inputs: list[Tensor], causal: bool, settings: MuseSettings) -> list[float]:
    """Errors against the eager references in float32 if causal, otherwise against autograd through them in float64."""
    dtype = inputs[0].dtype
    grad = torch.randn_like(inputs[0])

    def attend(backend: Backend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: muse_attention(
            q, k, v, causal, enable_gqa=True, settings=settings, backend=backend
        )

    found = gradients(inputs, attend(kernels()), grad)
    if causal:
        expected = gradients([x.float() for x in inputs], attend(eager_on(dtype)), grad.float())
    else:
        expected = by_autograd(inputs, settings, dtype, grad)
    return [relative(one, other) for one, other in zip(found, expected, strict=True)]


def clustered_alike(points: Tensor, clusters: int) -> float:
    found, expected = (b.find_clusters(points, clusters, 1.5, 1, 0) for b in (kernels(), EAGER))
    rows = [
        torch.zeros(points.shape[:4], dtype=torch.int64, device="cuda")
        .flatten(0, 2)
        .scatter_(
            1,
            torch.where(own.filled, own.members, 0).long().flatten(1),
            torch.arange(clusters, device="cuda")
            .repeat_interleave(own.members.shape[2])
            .expand(len(own.counts), -1),
        )
        for own in (found, expected)
    ]
    return float((rows[0] == rows[1]).float().mean())


def steps_ms(step: Callable[[], object], turns: int = 10) -> float:
    """Median milliseconds of a step on the device, once kernels are compiled and clocks have settled."""
    step()
    first = event_ms(step)
    if first > LONGEST_SLOW_MS:
        return first
    for _ in range(3):
        step()
    return statistics.median(event_ms(step) for _ in range(turns))


def training_step(
    inputs: list[Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor], grad: Tensor
) -> Callable[[], None]:
    leaves = [x.detach().requires_grad_() for x in inputs]

    def step() -> None:
        torch.autograd.grad(attend(*leaves), leaves, grad)

    return step


def sdpa_times(run: Callable[[], Callable[[], object]], too_slow: set[SDPBackend]) -> dict[str, float]:
    """Milliseconds of every backend that takes the inputs and was not too slow before."""
    found = {}
    for backend in BACKENDS:
        if backend in too_slow:
            continue
        try:
            with sdpa_kernel(backend):
                found[backend.name.lower().removesuffix("_attention")] = steps_ms(run())
        except RuntimeError:  # this backend cannot do it
            torch.cuda.synchronize()
            continue
        if found[backend.name.lower().removesuffix("_attention")] > LONGEST_SLOW_MS / 2:
            too_slow.add(backend)
    return found


def training_figure(
    length: int, tokens: int, settings: MuseSettings, too_slow: set[SDPBackend]
) -> dict[str, Any]:
    heads = 8
    inputs = make_inputs(max(1, tokens // length // heads), heads, heads, length, 64, torch.bfloat16)
    grad = torch.randn_like(inputs[0])

    def muse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return muse_attention(q, k, v, settings=settings)

    torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"figure": "training", "length": length}
    row["muse"] = steps_ms(training_step(inputs, muse, grad))
    row["muse_forward"] = steps_ms(lambda: muse(*inputs))
    row["muse_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    times = sdpa_times(lambda: training_step(inputs, scaled_dot_product_attention, grad), too_slow)
    return {**row, **times, "speedup": min(times.values()) / row["muse"]}


@torch.inference_mode()
def prefill_figure(length: int, settings: MuseSettings) -> dict[str, Any]:
    query, key, value = make_inputs(1, 32, 8, length, 128, torch.bfloat16)

    def muse() -> Tensor:
        return muse_attention(query, key, value, is_causal=True, enable_gqa=True, settings=settings)

    def exact() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    row: dict[str, Any] = {"figure": "prefill", "length": length}
    row["block"] = settings.block
    row["muse"] = steps_ms(muse, 5)
    times = sdpa_times(lambda: exact, {SDPBackend.EFFICIENT_ATTENTION})
    return {**row, **times, "speedup": min(times.values()) / row["muse"]}


def reader_model(positions: int) -> LoadedModel:
    """The packaged reader with as many positions as are asked for, which only its configuration limits."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "reader"
        shutil.copytree(resolve_model("reader").path, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
        return load_model(resolve_model(str(folder)), register_attention(), device="cuda")


def reader_figure(
    loaded: LoadedModel, length: int, settings: MuseSettings | None, chunk: int
) -> dict[str, Any]:
    """Seconds that the reader takes over so many tokens of the packaged novels, repeated."""
    tokenizer = load_tokenizer(resolve_model("reader"))
    ids = tokenizer.encode(source_text(())[: 5 * length])
    ids = (ids * (length // len(ids) + 1))[:length]

    def read(count: int) -> Capture:
        approximation = None if settings is None else RangeAttention(settings, loaded.identity.layers)
        plan = plan_sample(count, [], 4096, 0)
        capture = Capture(loaded.identity, count, torch.bfloat16, plan, "cuda", approximation=approximation)
        run_context(loaded.model, capture, ids[:count], chunk if settings is None else settings.block)
        return capture

    # Of a length with all kinds of ranges, so that every kernel is there.
    warm_up = 4 * settings.block if settings is not None else 16 * chunk
    read(min(length, warm_up))
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        capture = read(length)
        times.append(time.perf_counter() - begin)
    last = capture.kv(loaded.identity.layers - 1).float()
    row: dict[str, Any] = {"figure": "reader", "length": length, "chunk": chunk}
    row["attention"] = "exact" if settings is None else f"muse, block {settings.block}"
    return {**row, "seconds": min(times), "checksum": float(last.abs().mean())}


def kernel_figure(tokens: int, settings: MuseSettings, length: int = 8192) -> dict[str, Any]:
    inputs = make_inputs(tokens // length // 8, 8, 8, length, 64, torch.bfloat16)
    step = training_step(
        inputs, lambda q, k, v: muse_attention(q, k, v, settings=settings), torch.randn_like(inputs[0])
    )
    for _ in range(3):
        step()
    times = {name[:60]: us for name, us in kernel_us([step]).items() if us > 5}
    ordered = dict(sorted(times.items(), key=lambda item: -item[1]))
    return {"figure": "kernels", "length": length, "us": ordered}


def figure_rows(
    wanted: Sequence[str], checks: str, tokens: int, lengths: str, settings: MuseSettings
) -> Iterator[dict[str, Any]]:
    """All that are wanted."""
    if "check" in wanted:
        yield check_figure(settings.clusters, checks.split(","))
    if "kernels" in wanted:
        yield kernel_figure(tokens, settings)
    if "training" in wanted:
        too_slow: set[SDPBackend] = set()
        for power in range(10, 17):
            yield training_figure(2**power, tokens, settings, too_slow)
    if "reader" in wanted:
        loaded = reader_model(2**19)
        for length in (2**17, 2**18):
            for chunk in (2048, settings.block):
                yield reader_figure(loaded, length, None, chunk)
            for own in (settings.block // 4, settings.block):
                yield reader_figure(loaded, length, replace(settings, block=own), own)
    if "prefill" in wanted:
        for part in lengths.split(","):
            yield prefill_figure(int(part), settings)


def main(
    figures: Annotated[str, typer.Option(help="Comma-separated.")] = "check,training,prefill,reader,kernels",
    checks: Annotated[str, typer.Option(help="Dtypes and widths to check.")] = ",".join(CHECK_NAMES),
    tokens: Annotated[int, typer.Option(help="Times heads, of the training figures.")] = 2**20,
    clusters: Annotated[int, typer.Option(help="Of queries and of keys.")] = 64,
    iterations: Annotated[int, typer.Option(help="Of k-means.")] = 1,
    cap: Annotated[float, typer.Option(help="Largest cluster, in multiples of the mean one.")] = 1.5,
    block: Annotated[int, typer.Option(help="Of the causal figures.")] = 8192,
    lengths: Annotated[str, typer.Option(help="Of the prefill figures.")] = "32768,65536,131072,262144",
) -> None:
    """Checks and times MuSe; one JSON line per figure."""
    settings = MuseSettings(clusters=clusters, iterations=iterations, cap=cap, block=block)
    with reporting("muse_gpu") as report:
        for row in figure_rows(figures.split(","), checks, tokens, lengths, settings):
            report.add(row)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
