"""A model's products in decode steps on a CPU: a row's bits do not depend on the rows beside it, nor on its place.

Libraries choose how they add up by the number of rows, so that a session's logits, and sometimes its token, would
change with the sessions beside it. Here every number is one sum over the inputs, in one order.

Shape legend: B rows, one of each session; I inputs, O outputs.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from index_store.compiled.launch import launch, njit, spread

_TILE = 4  # rows, and outputs, of one loop over the inputs
_OUTPUTS_PER_TASK = 64


class RowLinear(nn.Linear):
    """A linear layer with the weights of another one, which multiplies the rows of decode steps each by itself."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__(other.in_features, other.out_features, other.bias is not None, device="meta")
        self.weight, self.bias = other.weight, other.bias

    def forward(self, rows: Tensor) -> Tensor:
        if rows.dim() == 3 and rows.shape[1] == 1 and rows.shape[0] > 0 and not torch.compiler.is_compiling():
            product = multiply_rows(rows[:, 0], self.weight)[:, None]
            return product if self.bias is None else product + self.bias
        return super().forward(rows)


def keep_rows_apart(model: nn.Module) -> None:
    """Has the linear layers of a model in float32 on a CPU multiply the rows of decode steps each by itself."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = child.weight if type(child) is nn.Linear else None
            if isinstance(child, nn.Linear) and weight is not None and _takes(weight):
                setattr(parent, name, RowLinear(child))


def _takes(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    return on_cpu and weight.shape[0] >= _TILE


def multiply_rows(rows_BI: Tensor, weight_OI: Tensor) -> Tensor:
    """rows @ weight.T, [B, O] float32; both are float32 on the host, and O is at least 4."""
    count = rows_BI.shape[0]
    padded = pad(rows_BI, (0, 0, 0, -count % _TILE)) if count % _TILE else rows_BI.contiguous()
    out = rows_BI.new_empty(len(padded), len(weight_OI))
    work = weight_OI.numel() * (0.1 + 0.04 * len(padded))
    launch(_multiply_rows, padded.numpy(), weight_OI.detach().numpy(), out.numpy(), work=work)
    return out[:count]


def multiply_rows_reference(rows_BI: Tensor, weight_OI: Tensor) -> Tensor:
    """The same by torch, whose bits depend on the number of rows."""
    return rows_BI @ weight_OI.T


@njit()
def _multiply_some(
    task: int,
    rows: NDArray[np.float32],
    weights: NDArray[np.float32],
    out: NDArray[np.float32],
    outputs: int,
) -> None:  # pragma: no cover - compiled
    for first in range(task * _OUTPUTS_PER_TASK, min((task + 1) * _OUTPUTS_PER_TASK, outputs), _TILE):
        for r in range(0, rows.shape[0], _TILE):
            _multiply_tile(rows, r, weights, min(first, outputs - _TILE), out)


@njit("f4x2 f4x2 f4x2")
def _multiply_rows(
    rows: NDArray[np.float32], weights: NDArray[np.float32], out: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    outputs = weights.shape[0]
    spread(
        _multiply_some, (outputs + _OUTPUTS_PER_TASK - 1) // _OUTPUTS_PER_TASK, (rows, weights, out, outputs)
    )


@njit(_nrt=False, fastmath={"reassoc", "contract"})
def _multiply_tile(
    rows: NDArray[np.float32], r: int, weights: NDArray[np.float32], o: int, out: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    """Four rows with four outputs, in one pass over both."""
    a, b, c, d = rows[r], rows[r + 1], rows[r + 2], rows[r + 3]
    w, x, y, z = weights[o], weights[o + 1], weights[o + 2], weights[o + 3]
    aw = ax = ay = az = bw = bx = by = bz = np.float32(0)
    cw = cx = cy = cz = dw = dx = dy = dz = np.float32(0)
    for i in range(a.shape[0]):
        aw += a[i] * w[i]
        ax += a[i] * x[i]
        ay += a[i] * y[i]
        az += a[i] * z[i]
        bw += b[i] * w[i]
        bx += b[i] * x[i]
        by += b[i] * y[i]
        bz += b[i] * z[i]
        cw += c[i] * w[i]
        cx += c[i] * x[i]
        cy += c[i] * y[i]
        cz += c[i] * z[i]
        dw += d[i] * w[i]
        dx += d[i] * x[i]
        dy += d[i] * y[i]
        dz += d[i] * z[i]
    out[r, o], out[r, o + 1], out[r, o + 2], out[r, o + 3] = aw, ax, ay, az
    out[r + 1, o], out[r + 1, o + 1], out[r + 1, o + 2], out[r + 1, o + 3] = bw, bx, by, bz
    out[r + 2, o], out[r + 2, o + 1], out[r + 2, o + 2], out[r + 2, o + 3] = cw, cx, cy, cz
    out[r + 3, o], out[r + 3, o + 1], out[r + 3, o + 2], out[r + 3, o + 3] = dw, dx, dy, dz
