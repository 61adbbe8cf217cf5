"""Layouts in which tensor cores of one warp take operands and leave results.

Shape legend: as in `value_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PRODUCT = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
RESULT = gl.constexpr(_PRODUCT)
LEFT = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, _PRODUCT, 2))
OF_KEYS = gl.constexpr(gl.SliceLayout(1, _PRODUCT))
"""Of numbers of a tile's keys, [T], beside a result [T, X]."""
OF_ROWS = gl.constexpr(gl.SliceLayout(0, _PRODUCT))
"""Of numbers of query rows, [X], beside a result [T, X] or [16, X]."""


@gluon.jit
def as_right(weights: gl.tensor, T: gl.constexpr, X: gl.constexpr) -> gl.tensor:
    """Weights [T, X] of 16 bits in a result's layout, as the right operand."""
    blocks = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        [weights],
        dtype=weights.dtype,
        is_pure=True,
        pack=2,
    )
    turned = gl.permute(gl.reshape(blocks, [T // 8, 8, X // 8, 8]), [0, 3, 2, 1])
    return gl.convert_layout(gl.reshape(turned, [T, X]), RIGHT, assert_trivial=True)
