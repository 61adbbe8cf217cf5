"""All that a layer does between one attention and the next, for decode steps on a CPU: one loop that Python calls.

A row's bits depend neither on the rows beside it nor on its place, as those of `row_products_numba`.

Shape legend: B rows, one of each session; E hidden size, A attended, M of the gate, O outputs of what follows, d head
dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from decode_engine.model.row_products_numba import OUTPUTS_PER_TASK, Numbers, multiply_some
from index_store.attention.vectors.counters_numba import LINE, phase_of
from index_store.compiled.launch import F4, I8, njit, spread


@njit(_nrt=False)
def _normalise(x: F4, norm: F4, eps: np.float32, out: F4) -> None:
    """Rows by their root mean square, times the weights of a norm."""
    for b in range(x.shape[0]):
        total = np.float64(0.0)
        for i in range(x.shape[1]):
            total += np.float64(x[b, i]) * np.float64(x[b, i])
        scale = np.float32(1.0 / np.sqrt(total / x.shape[1] + np.float64(eps)))
        for i in range(x.shape[1]):
            out[b, i] = norm[i] * (x[b, i] * scale)


@njit(_nrt=False)
def _add(x: F4, more: F4) -> None:
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[b, i] += more[b, i]


@njit(_nrt=False)
def _gate_some(task: int, rows: F4, weights: Numbers, scales: F4, both: F4, gated: F4) -> None:
    """gated = silu(gate) * up of a task's outputs. weights: the gate's rows, and those of `up` below them."""
    half = gated.shape[1]
    multiply_some(task, rows, weights[:half], scales[: half * (scales.shape[0] > 0)], both[:, :half])
    multiply_some(task, rows, weights[half:], scales[half * (scales.shape[0] > 0) :], both[:, half:])
    for b in range(rows.shape[0]):
        for i in range(task * OUTPUTS_PER_TASK, min((task + 1) * OUTPUTS_PER_TASK, half)):
            gate = both[b, i]
            gated[b, i] = gate / (np.float32(1.0) + np.exp(-gate)) * both[b, half + i]


@njit(_nrt=False)
def _rotate(out: F4, bias: F4, cos: F4, sin: F4, heads: int) -> None:
    """Adds the bias, and turns the first heads by their rows' positions."""
    half = cos.shape[1] // 2
    for b in range(out.shape[0]):
        for i in range(bias.shape[0]):
            out[b, i] += bias[i]
        for first in range(0, heads * 2 * half, 2 * half):
            for i in range(half):
                low, high = out[b, first + i], out[b, first + half + i]
                out[b, first + i] = low * cos[b, i] - high * sin[b, i]
                out[b, first + half + i] = high * cos[b, half + i] + low * sin[b, half + i]


@njit(_nrt=False)
def _normalise_some(task: int, more: F4, x: F4, norm: F4, eps: np.float32, out: F4) -> None:
    """Adds `more` to a row of x, unless it is empty, and normalises it."""
    own = x[task : task + 1]
    if more.shape[0] > 0:
        _add(own, more[task : task + 1])
    _normalise(own, norm, eps, out[task : task + 1])


@njit(_nrt=False)
def _tasks(out: F4) -> int:
    return (out.shape[1] + OUTPUTS_PER_TASK - 1) // OUTPUTS_PER_TASK  # type: ignore[no-any-return]


_multiply_all = phase_of(multiply_some, _nrt=False)
_gate_all = phase_of(_gate_some, _nrt=False)
_normalise_all = phase_of(_normalise_some, _nrt=False)


@njit(_nrt=False)
def _take_part(
    thread: int, counters: I8, attended: F4, x: F4, normed: F4, added: F4, both: F4, gated: F4, out: F4,
    cos: F4, sin: F4, heads: int, eps: F4, output: Numbers, output_scales: F4, middle_norm: F4,
    gate: Numbers, gate_scales: F4, down: Numbers, down_scales: F4, norm: F4, following: Numbers,
    following_scales: F4, bias: F4,
) -> None:  # fmt: skip # pragma: no cover - compiled
    rows, more = x.shape[0], added[: min(attended.shape[0], added.shape[0])]
    if attended.shape[0] > 0:
        _multiply_all(counters, 0, _tasks(added), (attended, output, output_scales, added))
        _normalise_all(counters, 2, rows, (more, x, middle_norm, eps[0], normed))
        _gate_all(counters, 4, _tasks(gated), (normed, gate, gate_scales, both, gated))
        _multiply_all(counters, 6, _tasks(added), (gated, down, down_scales, added))
    _normalise_all(counters, 8, rows, (more, x, norm, eps[1], normed))
    _multiply_all(counters, 10, _tasks(out), (normed, following, following_scales, out))


def _loop_for(kind: str, numbers: str) -> Any:
    """The loop for weights of one kind, which Python and the cache know as `go_on_KIND` of this module."""

    def go_on(
        threads: int, attended: F4, x: F4, normed: F4, added: F4, both: F4, gated: F4, out: F4, cos: F4,
        sin: F4, heads: int, eps: F4, output: Numbers, output_scales: F4, middle_norm: F4, gate: Numbers,
        gate_scales: F4, down: Numbers, down_scales: F4, norm: F4, following: Numbers, following_scales: F4,
        bias: F4,
    ) -> None:  # fmt: skip # pragma: no cover - compiled
        """From what layers attended to, [B, A], to `out` [B, O], products of the matrix that follows the next norm.

        x: [B, E], the rows' residuals, which are changed. normed, added [B, E], both [B, 2 M], gated [B, M]: scratch.
        cos, sin: [B, d]. heads: at the beginning of out, that are rotated. eps: of both norms. Without attended rows
        only the last norm and matrix count. Threads are woken once, and meet behind every phase.
        """
        counters = np.zeros((12, LINE), np.int64)
        spread(
            _take_part, threads,
            (counters, attended, x, normed, added, both, gated, out, cos, sin, heads, eps, output, output_scales,
             middle_norm, gate, gate_scales, down, down_scales, norm, following, following_scales, bias),
        )  # fmt: skip
        _rotate(out, bias, cos, sin, heads)

    go_on.__name__ = go_on.__qualname__ = f"go_on_{kind}"
    matrix = f"{numbers}x2 f4x2"
    rows = " ".join(["f4x2"] * 9)
    return njit(f"i8 {rows} i8 f4x1 {matrix} f4x1 {matrix} {matrix} f4x1 {matrix} f4x1")(go_on)


go_on_float32 = _loop_for("float32", "f4")
go_on_bfloat16 = _loop_for("bfloat16", "i2")
go_on_float16 = _loop_for("float16", "u2")
go_on_int8 = _loop_for("int8", "i1")
LOOPS = {"f": go_on_float32, "h": go_on_bfloat16, "H": go_on_float16, "b": go_on_int8}
"""By what numpy calls the numbers."""
