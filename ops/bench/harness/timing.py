"""How benchmarks take their times on a GPU, and what they compare with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from index_store.memory.devices import finish

TURNS = 15
WARM_UP = 3
WARM_UP_MS = 100.0
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def graph_us(steps: Sequence[Callable[[], object]], turns: int = 1) -> float:
    """Median microseconds of a step; all of them, in turn, make one CUDA graph."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for step in steps:
                step()
    replays = max(1, round(WARM_UP_MS / max(event_ms(graph.replay), 0.01)))
    # All replays are queued before the first wait, so that none starts on an idle device, and clocks have settled.
    for _ in range(replays):
        graph.replay()
    marks = [_mark()]
    for _ in range(TURNS):
        graph.replay()
        marks.append(_mark())
    torch.cuda.synchronize()
    times = [float(begin.elapsed_time(end)) for begin, end in pairwise(marks)]
    return statistics.median(times) * 1e3 / turns / len(steps)


def event_ms(work: Callable[[], object]) -> float:
    """Milliseconds on the device from before to after some work."""
    begin = _mark()
    work()
    end = _mark()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """From before to after some work, by the clock on the wall."""
    finish(device)
    begin = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - begin


def eager_us(steps: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of a step launched from Python, one after the other without waiting in between."""
    times = []
    for _ in range(TURNS + WARM_UP):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for step in steps:
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6 / len(steps))
    return statistics.median(times[WARM_UP:])


def kernel_us(steps: Sequence[Callable[[], object]]) -> dict[str, float]:
    """Mean microseconds of every kernel of the steps, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(TURNS):
            for step in steps:
                step()
        torch.cuda.synchronize()
    averages = [event for event in profile.key_averages() if event.device_time_total > 0]
    return {event.key: round(event.device_time_total / event.count, 2) for event in averages}


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a plain copy of 4 GiB: the faster of a copy and a kernel that copies."""
    source = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.mul(source, 2.0, out=target))
    seconds = [statistics.median(event_ms(way) for _ in range(TURNS)) * 1e-3 for way in ways]
    return 2 * source.nbytes / min(seconds)


def full_attention_us(q_LBHD: Tensor, kv_LBHN2D: Tensor) -> dict[str, float]:
    """Microseconds per layer of torch's full attention: every backend, over keys and values as stored and copied apart.

    q_LBHD: [layers, batch, query heads, d]. kv_LBHN2D: [layers, batch, KV heads, N, 2, d].
    """
    return packed_attention_us(q_LBHD.unsqueeze(3), kv_LBHN2D)


def packed_attention_us(q_LBHTD: Tensor, kv_LBHN2D: Tensor) -> dict[str, float]:
    """The same of several queries, which all see all keys: [layers, batch, query heads, T, d]."""
    found: dict[str, float] = {}
    grouped = q_LBHTD.shape[2] != kv_LBHN2D.shape[2]
    for layout in ("stored", "separate"):
        keys, values = kv_LBHN2D[..., 0, :], kv_LBHN2D[..., 1, :]
        if layout == "separate":
            keys, values = keys.contiguous(), values.contiguous()
        for backend in BACKENDS:

            def step(layer: int, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                return scaled_dot_product_attention(
                    q_LBHTD[layer], keys[layer], values[layer], enable_gqa=grouped
                )

            try:
                with sdpa_kernel(backend):
                    found[f"{backend.name.lower()}, {layout}"] = graph_us(
                        [lambda layer=layer: step(layer) for layer in range(len(q_LBHTD))]  # type: ignore[misc]
                    )
            except RuntimeError:  # this backend cannot do it
                torch.cuda.synchronize()
    return found


def fastest(full: Mapping[str, float]) -> dict[str, float | str]:
    """What lines say of full attention: the backend and layout that took least, and its microseconds."""
    backend = min(full, key=lambda name: full[name])
    return {"full_us": full[backend], "full_backend": backend}
