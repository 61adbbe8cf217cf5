"""Logits of a block of coded keys in shared memory, until it is decided which keys are kept.

What scores keys needs queries and codes alone. So a program's first block is scored while the launches before still
look for the cut.

Where query heads fill no more than half of a product's columns, results of two tiles are one: each has half of the
columns. So nothing is computed, or kept, for columns that only pad.

Shape legend: as in `value_tiles`; P tiles of a result, C = X / P columns of each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.coarse.warp.tiles.channel_places import key_registers
from decode_engine.kernels.coarse.warp.tiles.key_tiles import key_layout, multiply_keys, of_part
from decode_engine.kernels.coarse.warp.warp_rings import copy_tile, end_of_copies, wait_for_copies
from index_store.indexes.coarse_rows.parameters import BLOCK

_BLOCK = gl.constexpr(BLOCK)


@gluon.constexpr_function
def tiles_together(X: int, GROUP: int) -> int:
    """P."""
    return 2 if 2 * GROUP <= X else 1


@gluon.constexpr_function
def scored_layout(T: int, X: int, P: int) -> gl.DistributedLinearLayout:
    """Of a result's numbers by tiles, [T, P, C]; they stay where they are."""
    more = [[0, 0, 8]] if X > 8 else []
    columns = [[0, 0, 2], [0, 0, 4] if P == 1 else [0, 1, 0]]
    rows = [[row, 0, 0] for row, _ in key_registers(T)]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], *rows, *more], [*columns, [1, 0, 0], [2, 0, 0], [4, 0, 0]], [], [], [T, P, X // P]
    )


@gluon.constexpr_function
def scored_keys_layout(T: int, X: int, P: int) -> gl.SliceLayout:
    """Of numbers of all tiles' keys, [T, P]."""
    return gl.SliceLayout(2, scored_layout(T, X, P))


@gluon.jit
def new_scores(T: gl.constexpr, X: gl.constexpr, P: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room for the results of a block, [results, T, X]."""
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [_BLOCK // (P * T), T, X], rows)


@gluon.jit
def tile_after(tile: gl.tensor, TILES: gl.constexpr, inner: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """First key of a program's tile that comes TILES tiles after that which begins with key `tile`, the key `inner` of
    its block."""
    blocks = (inner + TILES * T) // _BLOCK
    return tile + TILES * T - blocks * ((gl.num_programs(0) + 1) * _BLOCK)


@gluon.jit
def score_block(
    scores: gl.shared_memory_descriptor,
    ring: gl.shared_memory_descriptor,
    turn: gl.tensor,
    codes_ptr: gl.tensor,
    block: gl.tensor,
    bounds: gl.tensor,
    folded: gl.tensor,
    units: gl.tensor,
    added: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    P: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> None:
    """Leaves a block's logits, in units of log2; has the program's next tiles copied.

    turn: how many tiles came before. bounds: a program's first key and the end of all, and where the last tile of a
    context begins. folded: queries times scales (`fold`). units, added: what one of these products is, and what offsets
    add, [X], in units of log2.
    """
    start, beyond, last = bounds
    shares: gl.tensor = ()
    for part in gl.static_range(P):
        shares += (of_part(folded, part, P),)
    for within in range(0, _BLOCK, P * T):
        tiles: gl.tensor = ()
        for part in gl.static_range(P):
            inner = within + part * T
            now = turn + inner // T
            wait_for_copies(AHEAD - 1)
            tiles += (ring.index(now % (AHEAD + 1)).load(key_layout(T, DIM, BITS)),)
            later = tile_after(block * _BLOCK + inner, AHEAD, inner, T)
            copy_tile(
                ring, now + AHEAD, codes_ptr, gl.minimum(later, last), (later >= start) & (later < beyond),
                T, DIM, BITS, AHEAD,
            )  # fmt: skip
            end_of_copies()
        products = multiply_keys(tiles, shares, T, X, DIM, BITS)
        logits = gl.fma(products, gl.expand_dims(units, 0), gl.expand_dims(added, 0))
        scores.index(within // (P * T)).store(logits)


@gluon.jit
def by_tiles(numbers: gl.tensor, T: gl.constexpr, X: gl.constexpr, P: gl.constexpr) -> gl.tensor:
    """A result as [T, P, C]."""
    LAYOUT: gl.constexpr = scored_layout(T, X, P)
    return gl.convert_layout(gl.reshape(numbers, [T, P, X // P]), LAYOUT, assert_trivial=True)
