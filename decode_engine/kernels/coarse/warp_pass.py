"""The launch that goes over coarse keys: it scores them, lists those that are kept, and leaves the others' weights.

The cut that `search.find_cuts` has found decides which keys are listed, to be attended exactly; all others of the
searched range are attended by their codes. So no logit is stored: for a group of four they would be 16 bytes a key,
written and read, where the codes that they are made of are 64 at 4 bits and d = 128. One launch scores keys and one
reads values (`warp_values`), of programs of one warp each. Each needs half of the registers that both would, so that a
processor has room for twice as many; and only weights of tiles that count, 8 bytes a key for a group of four, pass
between them. Each waits for nobody, and what it reads next is on its way while it works. A tile of next to no weight is
left out, so that its values are never read.

What scores keys needs queries and codes alone: a program's first block is scored while the launches before still look
for the cut. Where query heads fill no more than half of a product's columns, results of two tiles are one: each has
half of the columns. So nothing is computed, or kept, for columns that only pad.

A warp appends to a list without memory that lanes share. Weights are times their values' scales, as integers of 15
bits for tensor cores that take bytes: of each column T upper bytes, one for each key, and behind all columns as many
lower ones. What weights add up to, and times the values' offsets, needs no values: it is left for all tiles of a
program together.

Shape legend: as in `coarse.sizes` and `value_tiles`; P tiles of a result, C = X / P columns of each; GROUPS groups of
channels of a value, 1 or 2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from decode_engine.kernels.attention.online_softmax import LOG2E
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.border import NONE, draw, load_cut, passes
from decode_engine.kernels.coarse.key_tiles import (
    fold,
    key_layout,
    key_of,
    load_queries,
    load_steps,
    multiply_keys,
    of_part,
)
from decode_engine.kernels.coarse.registers import OF_ROWS, RESULT, bits_of, key_registers
from decode_engine.kernels.coarse.sizes import CoarseSizes, CoarseWork
from decode_engine.kernels.coarse.warp_reads import (
    copy_tile,
    end_of_copies,
    key_pointers,
    new_ring,
    prefetch_key_codes,
    prefetch_key_steps,
    prefetch_value_steps,
    value_steps,
    wait_for_copies,
)
from decode_engine.kernels.launches import chained, let_next_begin, wait_alone
from decode_engine.kernels.record_fields import END, FIRST, KEYS, field
from index_store.indexes.coarse_rows.parameters import BLOCK

_BLOCK = gl.constexpr(BLOCK)


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
def new_scores(K: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room for the results of a block, [results, T, X]."""
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [_BLOCK // (K.P * K.T), K.T, K.X], rows)


@gluon.jit
def tile_after(tile: gl.tensor, TILES: gl.constexpr, inner: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """First key of a program's tile that comes TILES tiles after that which begins with key `tile`, the key `inner` of
    its block."""
    blocks = (inner + TILES * K.T) // _BLOCK
    return tile + TILES * K.T - blocks * ((gl.num_programs(0) + 1) * _BLOCK)


@gluon.jit
def score_block(
    scores: gl.shared_memory_descriptor,
    ring: gl.shared_memory_descriptor,
    turn: gl.tensor,
    codes_ptr: gl.tensor,
    block: gl.tensor,
    bounds: gl.tensor,
    queries: gl.tensor,
    K: gl.constexpr,
) -> None:
    """Leaves a block's logits, in units of log2; has the program's next tiles copied.

    turn: how many tiles came before. bounds: a program's first key and the end of all, and where the last tile of a
    context begins. queries: as `fold` returns them, in units of log2.
    """
    start, beyond, last = bounds
    folded, units, added = queries
    shares: gl.tensor = ()
    for part in gl.static_range(K.P):
        shares += (of_part(folded, part, K),)
    for within in range(0, _BLOCK, K.P * K.T):
        tiles: gl.tensor = ()
        for part in gl.static_range(K.P):
            inner = within + part * K.T
            now = turn + inner // K.T
            wait_for_copies(K.AHEAD - 1)
            tiles += (ring.index(now % (K.AHEAD + 1)).load(key_layout(K.T, K.DIM, K.BITS)),)
            later = tile_after(block * _BLOCK + inner, K.AHEAD, inner, K)
            copy_tile(
                ring, now + K.AHEAD, codes_ptr, gl.minimum(later, last), (later >= start) & (later < beyond),
                K,
            )  # fmt: skip
            end_of_copies()
        products = multiply_keys(tiles, shares, K)
        logits = gl.fma(products, gl.expand_dims(units, 0), gl.expand_dims(added, 0))
        scores.index(within // (K.P * K.T)).store(logits)


@gluon.jit
def by_tiles(numbers: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """A result as [T, P, C]."""
    LAYOUT: gl.constexpr = scored_layout(K.T, K.X, K.P)
    return gl.convert_layout(gl.reshape(numbers, [K.T, K.P, K.X // K.P]), LAYOUT, assert_trivial=True)


LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
"""Of numbers that come a lane each."""
_NONE = gl.constexpr(NONE)
_MOST = gl.constexpr(32766.0)
"""That weights are, in units: integers of 15 bits, also where they are rounded up."""
_LEAST = gl.constexpr(1e-30)
"""Of units times 32768: where all scales are 0 nothing is divided by that."""
_WHOLE = gl.constexpr(2.0**15)
"""A float32 number, to which smaller ones are added so that their integers are in its second and third byte."""


@gluon.constexpr_function
def bytes_layout(T: int, X: int, P: int) -> gl.DistributedLinearLayout:
    """Of numbers of tiles' keys, [8, T / 8, P, C]: a lane's neighbouring keys are in neighbouring registers."""
    own = [[0, 1 << bit, 0, 0] for bit in range(bits_of(T) - 3)]
    more = [[0, 0, 0, 8]] if X > 8 else []
    columns = [[0, 0, 0, 2], [0, 0, 0, 4] if P == 1 else [0, 0, 1, 0]]
    lanes = [*columns, [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    return gl.DistributedLinearLayout([*own, [0, 0, 0, 1], *more], lanes, [], [], [8, T // 8, P, X // P])


@gluon.jit
def load_value_steps(steps_ptrs: gl.tensor, key: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Bits of the scales of keys' values, by groups of channels, and then of their offsets; each as many as keys.

    Halves of registers would be put together, and waited for.
    """
    loaded: gl.tensor = ()
    for part in gl.static_range(2):
        for group in gl.static_range(K.GROUPS):
            loaded += (
                gl.inline_asm_elementwise(
                    "ld.global.nc.u16 $0, [$1];", "=r,l", [(steps_ptrs[part] + (key * K.GROUPS + group)).to(gl.int64)],
                    dtype=gl.int32, is_pure=True, pack=1,
                ),
            )  # fmt: skip
    return loaded


@gluon.jit
def as_float(bits: gl.tensor) -> gl.tensor:
    """Of float16 numbers in lower halves."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l; .reg .b16 h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
        "=r,r", [bits], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def two_bytes(numbers: gl.tensor) -> gl.tensor:
    """The second and the third byte of int32 numbers, int8."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 x; .reg .b32 y; prmt.b32 x, $2, $3, 0x6251; prmt.b32 y, $4, $5, 0x6251; "
        "prmt.b32 $0, x, y, 0x5410; prmt.b32 $1, x, y, 0x7632; }",
        "=r,=r,r,r,r,r", [numbers], dtype=(gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def shape_by_registers(T: int, X: int, P: int) -> list[int]:
    """Of numbers [T, P, C] with axes for what a lane has."""
    return [T // 8, 8, P, max(X // 8 // P, 1), min(X // P, 8) // 2, 2]


@gluon.jit
def largest_of_lanes(numbers: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Bits of the largest numbers, which are not negative, of each of 32 lanes, [8, P, 4 / P] int32."""
    bits = gl.reshape(numbers.to(gl.int32, bitcast=True), shape_by_registers(K.T, K.X, K.P))
    return gl.max(gl.max(gl.max(bits, 5), 3), 0)


@gluon.jit
def largest_of_all(bits: gl.tensor, heavy: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """The largest float32 number of heavy tiles. bits: by lanes."""
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [],
        [[0, 0, 1], [0, 0, 2] if K.P == 1 else [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [],
        [],
        [8, K.P, 4 // K.P],
    )
    part = gl.arange(0, K.P, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    there = gl.expand_dims(gl.expand_dims(gl.where(part > 0, heavy[K.P - 1], heavy[0]) > 0, 0), 2)
    bits = gl.where(there, gl.convert_layout(bits, LAYOUT, assert_trivial=True), 0)
    return gl.max(gl.reshape(bits, [32]), 0).to(gl.float32, bitcast=True)


@gluon.jit
def unit_above(number: gl.tensor) -> gl.tensor:
    """A power of two, of which a number is at most _MOST."""
    bits = gl.maximum(number * 1.001, _LEAST).to(gl.int32, bitcast=True) & 0x7F800000
    return (bits - (14 << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def thresholds(K: gl.constexpr) -> gl.tensor:
    """From which part of one on weights of a tile's keys are rounded up, beside _WHOLE: 1 - this, evenly spread, [T].

    All weights far below a unit would be rounded down, and those of a flat context are many.
    """
    key = key_of(gl.arange(0, K.T, layout=gl.SliceLayout(1, scored_keys_layout(K.T, K.X, K.P))), K.T)
    turned = (key & 1) << 4 | (key & 2) << 2 | (key & 4) | (key & 8) >> 2 | (key & 16) >> 4
    return _WHOLE + (turned.to(gl.float32) + max(16 / K.T, 0.5)) * (1 / 32)


@gluon.jit
def store_weights(
    ptr: gl.tensor,
    tile: gl.tensor,
    weights: gl.tensor,
    heavy: gl.tensor,
    scales: gl.tensor,
    unit: gl.tensor,
    above: gl.tensor,
    K: gl.constexpr,
) -> gl.tensor:
    """Leaves those of P tiles that are heavy (int32, 0 or 1), as the tile-th and the next of all from ptr on.

    ptr: to int8. weights: [T, P, C] float32; scales: float32, of the tiles' values, [T, P] for each group of channels.
    unit: what 1 was among weights of the tiles before; what it is now. It changes where weights would have more than 15
    bits: before the first tile, and where scales are larger than they were. above: bits of a number that weights are
    below, mostly.
    """
    LAYOUT: gl.constexpr = bytes_layout(K.T, K.X, K.P)
    C: gl.constexpr = K.X // K.P
    EACH: gl.constexpr = 2 * C * K.T * len(scales)
    products: gl.tensor = ()
    for group in gl.static_range(len(scales)):
        products += (weights * gl.expand_dims(scales[group], 2),)
    lanes = largest_of_lanes(products[0], K)
    for group in gl.static_range(1, len(scales)):
        lanes = gl.maximum(lanes, largest_of_lanes(products[group], K))
    largest = largest_of_all(lanes, heavy, K)
    if largest > unit * _MOST:
        bound = gl.where((above > 0) & (above < _NONE), above, 0).to(gl.float32, bitcast=True)
        at_most = largest
        for group in gl.static_range(len(scales)):
            by_lanes = largest_of_lanes(gl.expand_dims(scales[group], 2) + weights * 0.0, K)
            at_most = gl.maximum(at_most, largest_of_all(by_lanes, heavy, K) * bound)
        unit = unit_above(at_most)
    inverse = (0x7F000000 - unit.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    r = gl.arange(0, 8, layout=_axis(0, LAYOUT))
    own = gl.arange(0, K.T // 8, layout=_axis(1, LAYOUT))
    part = gl.arange(0, K.P, layout=_axis(2, LAYOUT))
    column = gl.arange(0, C, layout=_axis(3, LAYOUT))
    key = _along(r * (K.T // 8), 0) + _along(own, 1)
    behind = gl.where(part > 0, heavy[0] * EACH, 0)
    there = gl.where(part > 0, heavy[K.P - 1], heavy[0]) > 0
    mask = _along(there, 2) & (key >= 0) & (_along(column, 3) >= 0)
    # Here, so that the store is known to be aligned.
    ptr = gl.multiple_of(ptr + tile * EACH, 16)
    rounding = gl.expand_dims(gl.expand_dims(thresholds(K), 1), 2)
    for group in gl.static_range(len(scales)):
        bits = (products[group] * inverse + rounding).to(gl.int32, bitcast=True)
        by_keys = gl.permute(gl.reshape(bits, [K.T // 8, 8, K.P, C]), [1, 0, 2, 3])
        lower, upper = two_bytes(gl.convert_layout(by_keys, LAYOUT))
        into = ptr + (_along(behind, 2) + (_along(column, 3) + 2 * group * C) * K.T + key)
        gl.store(into, upper, mask=mask)
        gl.store(into + C * K.T, lower, mask=mask)
    return unit


@gluon.constexpr_function
def _axis(axis: int, layout: gl.DistributedLinearLayout) -> gl.SliceLayout:
    """Of numbers along one of four axes."""
    sliced = layout
    for other in reversed([each for each in range(4) if each != axis]):
        sliced = gl.SliceLayout(other, sliced)
    return sliced


@gluon.jit
def _along(numbers: gl.tensor, AXIS: gl.constexpr) -> gl.tensor:
    """Numbers along one of four axes, [.., n, ..]."""
    for other in gl.static_range(4):
        if other != AXIS:
            numbers = gl.expand_dims(numbers, other)
    return numbers


@gluon.constexpr_function
def copied_layout(T: int, Y: int) -> gl.BlockedLayout:
    """Of words of four keys' weights while they are copied, [Y, T / 4]."""
    each = min(4, max(1, Y * T // 128))
    return gl.BlockedLayout([1, each], [128 * each // T, T // 4 // each], [1, 1], [1, 0])


@gluon.jit
def new_weights_ring(K: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room for the weights of a tile and of AHEAD that are on their way, in words of four keys."""
    COLUMNS: gl.constexpr = K.GROUPS * K.Y
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.int32, [K.AHEAD + 1, COLUMNS, K.T // 4], rows)


@gluon.jit
def copy_weights(
    ring: gl.shared_memory_descriptor,
    turn: gl.tensor,
    ptr: gl.tensor,
    tile: gl.tensor,
    there: gl.tensor,
    K: gl.constexpr,
) -> None:
    """Has the weights of the tile-th tile from ptr on, in words, copied as the turn-th, if there are any."""
    COLUMNS: gl.constexpr = K.GROUPS * K.Y
    LAYOUT: gl.constexpr = copied_layout(K.T, COLUMNS)
    row = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    word = gl.expand_dims(gl.arange(0, K.T // 4, layout=gl.SliceLayout(0, LAYOUT)), 0)
    ptr = gl.multiple_of(ptr + tile.to(gl.int64) * (COLUMNS * K.T // 4), 16)
    async_copy.async_copy_global_to_shared(
        ring.index(turn % (K.AHEAD + 1)), ptr + (row * (K.T // 4) + word), mask=there
    )


@gluon.jit
def by_registers(numbers: gl.tensor, T: gl.constexpr, K: gl.constexpr) -> gl.tensor:
    """Numbers of tiles' keys, [T, P], as [8, P] for each register of a lane."""
    if T == 8:
        return (gl.convert_layout(numbers, scored_keys_layout(8, K.X, K.P)),)
    else:  # noqa: RET505 - the other branch is not compiled
        low, high = gl.split(gl.permute(gl.reshape(numbers, [2, T // 2, K.P]), [1, 2, 0]))
        return by_registers(low, T // 2, K) + by_registers(high, T // 2, K)


@gluon.constexpr_function
def ballot(P: int) -> str:
    """PTX that asks all lanes, and leaves a bit for the first of those that have a key."""
    first = "0x11111111" if P == 1 else "0x55555555"
    return (
        "{ .reg .pred p; .reg .b32 t; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 t, p, 0xffffffff; "
        f"and.b32 $0, t, {first}; }}"
    )


@gluon.jit
def voted(kept: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Which lanes' keys are kept, [8, P] int32: bits for the lanes that have a key, 2 p + 4 k."""
    return gl.inline_asm_elementwise(ballot(K.P), "=r,r", [kept], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def counted(votes: gl.tensor) -> gl.tensor:
    """Set bits, [8, P] int32."""
    return gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [votes], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def nothing_listed(K: gl.constexpr) -> gl.tensor:
    """How many keys are listed, [8, P] int32 of one number."""
    return gl.full([8, K.P], 0, gl.int32, layout=scored_keys_layout(8, K.X, K.P))


@gluon.jit
def one_of(numbers: gl.tensor) -> gl.tensor:
    """The largest of [8, P]."""
    return gl.max(gl.max(numbers, 1), 0)


@gluon.jit
def list_keys(
    ids_ptr: gl.tensor, count: gl.tensor, kept: gl.tensor, key: gl.tensor, K: gl.constexpr
) -> gl.tensor:
    """Appends P tiles' keys that are kept (int32, 0 or 1) to a list, ascending; the new count, [8, P] of one."""
    LAYOUT: gl.constexpr = scored_keys_layout(8, K.X, K.P)
    marks, ids = by_registers(kept, K.T, K), by_registers(key, K.T, K)
    half = gl.expand_dims(gl.arange(0, K.P, layout=gl.SliceLayout(0, LAYOUT)), 0)
    lane = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT)), 1) * 4 + half * 2
    earlier = (gl.full([8, K.P], 1, gl.int32, layout=LAYOUT) << lane) - 1
    earlier = earlier & (gl.full([8, K.P], 0x11111111, gl.int32, layout=LAYOUT) << (lane & 2))
    place, total = count, count
    for part in gl.static_range(K.T // 8):  # a lane's keys follow one another
        votes = voted(marks[part], K)
        place += counted(votes & earlier)
        total += counted(votes)
        if K.P == 2:
            place += gl.where((lane & 2) > 0, counted(votes & 0x11111111), 0)
    for part in gl.static_range(K.T // 8):
        gl.store(ids_ptr + place, ids[part], mask=marks[part] > 0)
        place += marks[part]
    return total


NEGLIGIBLE = 0.005
"""Share of its even share of a row's weight, all heads together, below which a tile's values are not read: that holds
for less than this share of all of them, then."""
_NEGLIGIBLE = gl.constexpr(NEGLIGIBLE)


@gluon.jit
def share_of_blocks(first: gl.tensor, end: gl.tensor) -> gl.tensor:
    """A program's first block, its last one, and where all of a row's end; its own are num_programs blocks apart.

    What a query attends to lies together, at the end of a context above all. So neighbours are different programs', and
    each goes from its last block to its first: what is kept is known early.
    """
    base = first // _BLOCK
    stop = gl.where(end > first, (end + _BLOCK - 1) // _BLOCK, base)
    lowest = base + gl.program_id(0)
    others = gl.maximum(stop - 1 - lowest, 0) // gl.num_programs(0)
    return lowest, lowest + others * gl.num_programs(0), stop


@gluon.jit
def reference_weights(
    normalisers_ptr: gl.tensor, row: gl.tensor, searches: gl.tensor, K: gl.constexpr
) -> gl.tensor:
    """What weights are relative to, [X] in units of log2: no peak has to be found among coded keys.

    -inf where nothing is searched, and inf for rows that only pad the tile, which weigh nothing. P: that all rows
    stand beside each other.
    """
    n = gl.arange(0, K.X, layout=OF_ROWS) % (K.X // K.P)
    at = normalisers_ptr + row * K.GROUP + n
    # Past the first-level cache, as cuts are.
    normalisers = gl.load(at, mask=n < K.GROUP, other=float("inf"), cache_modifier=".cg")
    return gl.where(searches, normalisers, float("-inf"))


@gluon.jit
def over_eights(numbers: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Sums over a lane's keys, [8, P, C], of [T, P, C]."""
    summed = gl.sum(gl.reshape(numbers, [K.T // 8, 8, K.P, K.X // K.P]), 0)
    return gl.convert_layout(summed, scored_layout(8, K.X, K.P), assert_trivial=True)


@gluon.jit
def leave_weights(
    ptrs: gl.tensor,
    left: gl.tensor,
    weights: gl.tensor,
    of_tiles: gl.tensor,
    enough: gl.tensor,
    above: gl.tensor,
    begins: gl.tensor,
    steps: gl.tensor,
    K: gl.constexpr,
) -> gl.tensor:
    """Leaves weights [T, P, C] of those of P tiles whose values are read, in `ptrs`: to weights, and to tiles.

    left: how many tiles there were, what 1 was among their weights, and sums over what is read, [8, P, C]: of weights,
    and of these times the offsets of each group of channels; what these are now. of_tiles: the weight of each tile,
    [P], of which some is enough. above: bits of a number that weights are below, mostly. begins: first key of each
    tile. steps: scales and offsets of the values, as loaded.
    """
    weighed, unit, sums = left
    LAYOUT: gl.constexpr = scored_keys_layout(K.T, K.X, K.P)
    part_of = gl.arange(0, K.P, layout=gl.SliceLayout(0, LAYOUT))
    heavy: gl.tensor = ()
    for part in gl.static_range(K.P):
        own = gl.max(gl.where(part_of == part, of_tiles, 0.0), 0)
        heavy += ((own >= enough).to(gl.int32),)
    many = heavy[0] + (heavy[1] if K.P == 2 else 0)
    if many > 0:
        scales: gl.tensor = ()
        for group in gl.static_range(K.GROUPS):
            scales += (as_float(steps[group]),)
        unit = store_weights(ptrs[0], weighed, weights, heavy, scales, unit, above, K)
        into = ptrs[1] + 2 * weighed
        for part in gl.static_range(K.P):
            gl.store(into, begins[part], mask=heavy[part] > 0)
            gl.store(into + 1, unit.to(gl.int32, bitcast=True), mask=heavy[part] > 0)
            into += 2 * heavy[part]
        parts = gl.arange(0, K.P, layout=gl.SliceLayout(0, gl.SliceLayout(2, scored_layout(8, K.X, K.P))))
        counts = gl.expand_dims(gl.expand_dims(gl.where(parts > 0, heavy[K.P - 1], heavy[0]) > 0, 0), 2)
        new: gl.tensor = (sums[0] + gl.where(counts, over_eights(weights, K), 0.0),)
        for group in gl.static_range(K.GROUPS):
            offsets = as_float(steps[K.GROUPS + group])
            more = over_eights(weights * gl.expand_dims(offsets, 2), K)
            new += (sums[1 + group] + gl.where(counts, more, 0.0),)
        sums = new
        weighed += many
    return weighed, unit, sums


@gluon.jit
def no_sums_left(K: gl.constexpr, COUNT: gl.constexpr) -> gl.tensor:
    """COUNT sums [8, P, C]."""
    zero = gl.full([8, K.P, K.X // K.P], 0.0, gl.float32, layout=scored_layout(8, K.X, K.P))
    sums: gl.tensor = ()
    for _ in gl.static_range(COUNT):
        sums += (zero,)
    return sums


@gluon.jit
def store_left(ptr: gl.tensor, sums: gl.tensor, K: gl.constexpr) -> None:
    """Writes sums [8, P, C], over lanes' keys and tiles, of GROUP query heads each."""
    n = gl.arange(0, K.X // K.P, layout=gl.SliceLayout(0, gl.SliceLayout(0, scored_layout(8, K.X, K.P))))
    for kind in gl.static_range(len(sums)):
        own = gl.sum(gl.sum(sums[kind], 0), 0)
        gl.store(ptr + kind * K.GROUP + n, own, mask=n < K.GROUP)


@gluon.jit(do_not_specialize=["width"])
def pass_kernel(  # noqa: PLR0912, PLR0915 - what a program does stands in one place
    q_ptr: gl.tensor,
    records_ptr: gl.tensor,
    normalisers_ptr: gl.tensor,
    lists: gl.tensor,
    leaves: gl.tensor,
    cuts_ptr: gl.tensor,
    scale_log2: gl.tensor,
    width: gl.tensor,
    K: gl.constexpr,
    WEIGH: gl.constexpr,
    EARLY: gl.constexpr,
    CHAINED: gl.constexpr,
) -> None:
    """Program (split, row): a share of the row's blocks. Lists the keys that are kept.

    WEIGH: leaves the weights of the others, which tiles they are of, and what needs no values. AHEAD: tiles of
    keys that are on their way. A program scores its first block while the launches before still look for the cut, and
    EARLY more come into the second-level cache meanwhile. What these launches do not write, and what was there before
    they began, may be read.
    """
    TILES: gl.constexpr = _BLOCK // K.T
    OF_TILE: gl.constexpr = scored_keys_layout(K.T, K.X, K.P)
    ids_ptr, counts_ptr = lists
    weights_ptr, tiles_ptr, weighed_ptr, left_ptr = leaves
    row = gl.program_id(1)
    b, head = row // K.HEADS, row % K.HEADS
    first = field(records_ptr, b, FIRST).to(gl.int32)
    end = field(records_ptr, b, END).to(gl.int32)
    keys = field(records_ptr, b, KEYS)
    keys_ptrs = key_pointers(records_ptr, b, head, keys, K)
    lowest, top, stop = share_of_blocks(first, end)
    apart = gl.num_programs(0)
    start, beyond = lowest * _BLOCK, gl.minimum(stop * _BLOCK, keys.to(gl.int32))
    # A context's last keys are loaded with some before them, which do not count.
    last = beyond - K.T
    searches = stop > lowest
    steps_ptrs = value_steps(records_ptr, b, head, keys, K)
    ring, scores = new_ring(K), new_scores(K)
    if searches:
        for turn in gl.static_range(K.AHEAD):
            base = tile_after(top * _BLOCK, turn, 0, K)
            there = (base >= start) & (base < beyond)
            copy_tile(ring, turn, keys_ptrs[0], gl.minimum(base, last), there, K)
            end_of_copies()
    queries, units = load_queries(q_ptr, row, K)
    units = units * scale_log2
    place = row.to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    inner = key_of(gl.arange(0, K.T, layout=gl.SliceLayout(1, OF_TILE)), K.T)
    part_of_keys = gl.arange(0, K.P, layout=gl.SliceLayout(0, OF_TILE))
    ptrs = (
        weights_ptr.to(gl.pointer_type(gl.int8)) + place * width * (2 * K.X // K.P * K.GROUPS),
        tiles_ptr + place * (2 * (width // K.T)),
    )
    count = nothing_listed(K)
    turns = gl.where(searches, (top - lowest) // apart + 2, 0)
    left = (first * 0, scale_log2 * 0, no_sums_left(K, 1 + K.GROUPS if WEIGH else 0))
    least, above, draws = row * 0, row * 0, row * 0
    enough, peaks = scale_log2 * 0, gl.full([K.X], 0.0, gl.float32, layout=OF_ROWS)
    for turn in range(0, turns):
        block = top - turn * apart
        steps = load_steps(keys_ptrs, gl.maximum(block, lowest), K)
        if turn == 1:
            # The memory would be idle while this waits.
            for more in gl.static_range(EARLY):
                lower = (block - more * apart) * _BLOCK
                end_of_lower = gl.where(lower >= start, beyond, lower)
                prefetch_key_codes(keys_ptrs, lower, end_of_lower, K, CHAINED)
            wait_alone(CHAINED)
            let_next_begin(CHAINED)
            least, above, draws = load_cut(cuts_ptr + row * 3, ".cg")
            peaks = reference_weights(normalisers_ptr, row, searches, K)
            # Of the weight of a tile, all heads together: with less its values are not read.
            enough = _NEGLIGIBLE * K.GROUP * K.T / gl.maximum(end - first, 1).to(gl.float32)
        if turn > 0:  # the block that was scored last
            for result in range(0, TILES // K.P):
                tile = (block + apart) * _BLOCK + result * (K.P * K.T)
                begins: gl.tensor = ()
                for part in gl.static_range(K.P):
                    begins += (gl.minimum(tile + part * K.T, last),)
                begin = gl.where(part_of_keys > 0, begins[K.P - 1], begins[0])
                key = gl.expand_dims(begin, 0) + gl.expand_dims(inner, 1)
                own_steps: gl.tensor = ()
                if WEIGH:  # what belongs to values comes while weights are found
                    own_steps = load_value_steps(steps_ptrs, key, K)
                logits = scores.index(result).load(RESULT)
                weights = by_tiles(gl.exp2(logits - gl.expand_dims(peaks, 0)), K)
                summed = gl.sum(weights, 2)
                together, of_tiles = summed.to(gl.int32, bitcast=True), gl.sum(summed, 0)
                whole = (first < tile + 1) & (end >= tile + K.P * K.T) & (last >= tile + (K.P - 1) * K.T)
                # Most tiles are searched as a whole, and none of their keys is kept.
                if not whole or gl.max(gl.max(together, 1), 0) >= least:
                    from_on = gl.maximum(first, tile + part_of_keys * K.T)
                    searched = (key >= gl.expand_dims(from_on, 0)) & (key < end)
                    kept = passes(together, draw(key, head), (least, above, draws)) & searched
                    count = list_keys(ids_ptr + place * width, count, kept.to(gl.int32), key, K)
                    weights = gl.where(gl.expand_dims(searched & (kept == 0), 2), weights, 0.0)
                if WEIGH:
                    left = leave_weights(ptrs, left, weights, of_tiles, enough, above, begins, own_steps, K)
        if turn < turns - 1:
            lower = (block - apart) * _BLOCK
            prefetch_key_steps(keys_ptrs, lower, gl.where(lower >= start, beyond, lower), K, CHAINED)
            prefetch_value_steps(steps_ptrs, block * _BLOCK, beyond, K, WEIGH and CHAINED)
            folded, steps_units, added = fold(queries, steps, K)
            own = (folded, steps_units * units, added * units)
            score_block(scores, ring, turn * TILES, keys_ptrs[0], block, (start, beyond, last), own, K)
    if searches:
        wait_for_copies(0)
    else:
        wait_alone(CHAINED)
        let_next_begin(CHAINED)
    gl.store(counts_ptr + place, one_of(count))
    if WEIGH:
        gl.store(weighed_ptr + place, left[0])
        store_left(left_ptr + place * ((1 + K.GROUPS) * K.GROUP), left[2], K)


def weigh_keys(
    q_BHGD: Tensor,
    records_BF: Tensor,
    sizes: CoarseSizes,
    work: CoarseWork,
    lists: KeyLists,
    *,
    weigh: bool = True,
) -> None:
    """Fills `lists` with the keys that the cuts in `work` keep: sizes.splits(B * H) segments of sizes.width(B * H).

    Leaves in `work` what `attend_others` has to know of all other keys. Right behind `find_cuts` on its stream: queries
    are read before that has ended, but not what came before it.
    q_BHGD: [B, H, G, d] contiguous, unscaled, in the dtype of keys. weigh: False where nobody is going to ask. Does not
    wait for the device and may be captured in a CUDA graph, as all launches here.
    """
    rows, segments = q_BHGD.shape[0] * sizes.kv_heads, lists.counts_RP.shape[1]
    pass_kernel[(segments, rows)](
        *what_passes(q_BHGD, records_BF, work, lists),
        work.cuts_RX,
        sizes.head_dim**-0.5 * LOG2E,
        sizes.width(rows),
        K=sizes.passes(keys=True),
        WEIGH=weigh,
        EARLY=sizes.shape.early,
        **sizes.launch(keys=True),
        **chained(q_BHGD.device),
    )


def what_passes(q_BHGD: Tensor, records_BF: Tensor, work: CoarseWork, lists: KeyLists) -> tuple[Any, ...]:
    """What kernels over keys and over values are given: of `work` what one leaves for the other stands together."""
    leaves = (work.weights_RSX, work.tiles_RSX, work.weighed_RS, work.left_RSG)
    return q_BHGD, records_BF, work.normalisers_RG, (lists.ids_RPW, lists.counts_RP), leaves
