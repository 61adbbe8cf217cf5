"""What a pass of one warp over keys leaves behind: lists of those that are kept, and weights of the others.

A warp appends to a list without memory that lanes share. Weights are as tensor cores take them, so that nothing is
turned. A tile's are those of GROUP query heads, T of each, in the order in which a lane holds them; behind them lie the
scales and the offsets of its values, T of each for every group of channels. So all of them are copied ahead, past the
registers: a number that is loaded ahead into one is waited for where it is passed on to another.

Shape legend: as in `warp_scores`; GROUPS groups of channels of a value, 1 or 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from decode_engine.kernels.attention import announcements
from decode_engine.kernels.coarse.warp.tiles.channel_places import bits_of
from decode_engine.kernels.coarse.warp.tiles.value_tiles import RIGHT
from decode_engine.kernels.coarse.warp.warp_scores import scored_keys_layout

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
"""Of numbers that come a lane each."""
_ROW_SHIFT, _TURN_SHIFT, _TURNS = (
    gl.constexpr(each) for each in (announcements.ROW_SHIFT, announcements.TURN_SHIFT, announcements.TURNS)
)
_EIGHTS = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))


@gluon.constexpr_function
def lanes_layout(T: int, X: int) -> gl.DistributedLinearLayout:
    """Of a right operand [T, X] by lanes, [4 X, T / 4]: a lane's numbers lie side by side."""
    own = [[0, 1 << bit] for bit in range(bits_of(T) - 2)]
    more = [[32, 0]] if X > 8 else []
    return gl.DistributedLinearLayout(
        [*own, *more], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [], [], [4 * X, T // 4]
    )


@gluon.constexpr_function
def step_layout(T: int) -> gl.DistributedLinearLayout:
    """Of numbers of keys as they lie, [T], for lanes that have operands' keys: as `key_of` has them."""
    own, base = [], 1
    while base <= T // 8:
        own.append([base])
        base *= 2
    return gl.DistributedLinearLayout(own, [[T // 4], [T // 2], [0], [0], [0]], [], [], [T])


@gluon.jit
def _places(T: gl.constexpr, X: gl.constexpr, GROUP: gl.constexpr) -> gl.tensor:
    """Where a tile's weights lie, and which of them are a query head's, [4 X, T / 4]."""
    LAYOUT: gl.constexpr = lanes_layout(T, X)
    lane = gl.arange(0, 4 * X, layout=gl.SliceLayout(1, LAYOUT))
    own = gl.arange(0, T // 4, layout=gl.SliceLayout(0, LAYOUT))
    there = gl.expand_dims(lane < 4 * GROUP, 1) & gl.expand_dims(own >= 0, 0)
    return gl.expand_dims(lane * (T // 4), 1) + gl.expand_dims(own, 0), there


@gluon.jit
def load_bits(ptr: gl.tensor, T: gl.constexpr, APART: gl.constexpr) -> gl.tensor:
    """Bits of T float16 numbers, APART from each other, [T] int32, a lane each.

    Halves of registers would be put together, and waited for.
    """
    key = gl.arange(0, T, layout=LANES)
    return gl.inline_asm_elementwise(
        "ld.global.nc.u16 $0, [$1];", "=r,l", [(ptr + key * APART).to(gl.int64)], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def load_value_steps(
    steps_ptrs: gl.tensor, begin: gl.tensor, T: gl.constexpr, GROUPS: gl.constexpr
) -> gl.tensor:
    """Bits of the scales of a tile's values, by groups of channels, and then of their offsets."""
    loaded: gl.tensor = ()
    for part in gl.static_range(2):
        for group in gl.static_range(GROUPS):
            loaded += (load_bits(steps_ptrs[part] + (begin * GROUPS + group), T, GROUPS),)
    return loaded


@gluon.jit
def store_weights(
    ptr: gl.tensor,
    tile: gl.tensor,
    weights: gl.tensor,
    heavy: gl.tensor,
    steps: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    P: gl.constexpr,
) -> None:
    """Leaves those of P tiles that are heavy (int32, 0 or 1), as the tile-th and the next of all from ptr on.

    ptr: a multiple of 16 bytes. weights: a right operand [T, X] float16, each tile's in its share of the columns.
    steps: of the tiles' values, as loaded.
    """
    LAYOUT: gl.constexpr = lanes_layout(T, X)
    EACH: gl.constexpr = T * (GROUP + len(steps[0]))
    by_lanes = gl.permute(gl.reshape(weights, [T // 8, 4, 2, X]), [3, 1, 0, 2])
    own = gl.convert_layout(gl.reshape(by_lanes, [4 * X, T // 4]), LAYOUT, assert_trivial=True)
    lane = gl.arange(0, 4 * X, layout=gl.SliceLayout(1, LAYOUT))
    number = gl.arange(0, T // 4, layout=gl.SliceLayout(0, LAYOUT))
    within = lane % (4 * X // P)
    there, at = heavy[0] + within * 0, within * (T // 4)
    if P == 2:
        second = lane >= 2 * X
        there = gl.where(second, heavy[1], there)
        at += gl.where(second, heavy[0] * EACH, 0)
    mask = gl.expand_dims((within < 4 * GROUP) & (there > 0), 1) & gl.expand_dims(number >= 0, 0)
    # Here, so that the store is known to be aligned.
    ptr = gl.multiple_of(ptr + tile * EACH, 16)
    gl.store(ptr + gl.expand_dims(at, 1) + gl.expand_dims(number, 0), own, mask=mask)
    key = gl.arange(0, T, layout=LANES)
    for half in gl.static_range(P):
        for part in gl.static_range(len(steps[half])):
            own_step = steps[half][part].to(gl.int16).to(gl.float16, bitcast=True)
            gl.store(ptr + (GROUP + part) * T + key, own_step, mask=(key >= 0) & (heavy[half] > 0))
        ptr += heavy[half] * EACH


@gluon.jit
def new_weights_rings(
    T: gl.constexpr, X: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr
) -> gl.shared_memory_descriptor:
    """Room for the weights of a tile and of AHEAD that are on their way; and for their scales and offsets."""
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weights = gl.allocate_shared_memory(gl.float16, [AHEAD + 1, 4 * X, T // 4], rows)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return weights, gl.allocate_shared_memory(gl.float16, [2 * GROUPS * (AHEAD + 1), T], numbers)


@gluon.jit
def copy_weights(
    rings: gl.tensor,
    turn: gl.tensor,
    ptr: gl.tensor,
    tile: gl.tensor,
    there: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> None:
    """Has what belongs to the tile-th tile from ptr on copied as the turn-th, if there is any.

    Weights of rows that only pad the tile are no numbers: their sums are nobody's.
    """
    at, own = _places(T, X, GROUP)
    ptr = gl.multiple_of(ptr + tile.to(gl.int64) * (T * (GROUP + 2 * GROUPS)), 16)
    slot = turn % (AHEAD + 1)
    async_copy.async_copy_global_to_shared(rings[0].index(slot), ptr + at, mask=own & there)
    key = gl.arange(0, T, layout=_EIGHTS)
    for part in gl.static_range(2 * GROUPS):
        async_copy.async_copy_global_to_shared(
            rings[1].index(2 * GROUPS * slot + part), ptr + (GROUP + part) * T + key, mask=there
        )


@gluon.jit
def copied_weights(
    rings: gl.tensor,
    turn: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUPS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> gl.tensor:
    """As they were copied: weights by lanes, scales and offsets [T] by groups; their copy has been waited for."""
    slot = turn % (AHEAD + 1)
    scales: gl.tensor = ()
    offsets: gl.tensor = ()
    for group in gl.static_range(GROUPS):
        scales += (rings[1].index(2 * GROUPS * slot + group).load(step_layout(T)),)
        offsets += (rings[1].index(2 * GROUPS * slot + GROUPS + group).load(step_layout(T)),)
    return rings[0].index(slot).load(lanes_layout(T, X)), scales, offsets


@gluon.jit
def in_order_of_rows(numbers: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Numbers of keys [T] in the order of a tile's rows, for the lanes of operands."""
    return gl.reshape(gl.permute(gl.reshape(numbers, [8, T // 8]), [1, 0]), [T])


@gluon.jit
def as_operand(loaded: gl.tensor, T: gl.constexpr, X: gl.constexpr) -> gl.tensor:
    """Weights by lanes as a right operand [T, X]."""
    turned = gl.permute(gl.reshape(loaded, [X, 4, T // 8, 2]), [2, 1, 3, 0])
    return gl.convert_layout(gl.reshape(turned, [T, X]), RIGHT, assert_trivial=True)


@gluon.jit
def by_registers(numbers: gl.tensor, T: gl.constexpr, X: gl.constexpr, P: gl.constexpr) -> gl.tensor:
    """Numbers of tiles' keys, [T, P], as [8, P] for each register of a lane."""
    if T == 8:
        return (gl.convert_layout(numbers, scored_keys_layout(8, X, P)),)
    else:  # noqa: RET505 - the other branch is not compiled
        low, high = gl.split(gl.permute(gl.reshape(numbers, [2, T // 2, P]), [1, 2, 0]))
        return by_registers(low, T // 2, X, P) + by_registers(high, T // 2, X, P)


@gluon.constexpr_function
def ballot(P: int) -> str:
    """PTX that asks all lanes, and leaves a bit for the first of those that have a key."""
    first = "0x11111111" if P == 1 else "0x55555555"
    return (
        "{ .reg .pred p; .reg .b32 t; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 t, p, 0xffffffff; "
        f"and.b32 $0, t, {first}; }}"
    )


@gluon.jit
def voted(kept: gl.tensor, P: gl.constexpr) -> gl.tensor:
    """Which lanes' keys are kept, [8, P] int32: bits for the lanes that have a key, 2 p + 4 k."""
    return gl.inline_asm_elementwise(ballot(P), "=r,r", [kept], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def counted(votes: gl.tensor) -> gl.tensor:
    """Set bits, [8, P] int32."""
    return gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [votes], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def nothing_listed(X: gl.constexpr, P: gl.constexpr) -> gl.tensor:
    """How many keys are listed, [8, P] int32 of one number."""
    return gl.full([8, P], 0, gl.int32, layout=scored_keys_layout(8, X, P))


@gluon.jit
def one_of(numbers: gl.tensor) -> gl.tensor:
    """The largest of [8, P]."""
    return gl.max(gl.max(numbers, 1), 0)


@gluon.jit
def list_keys(
    ids_ptr: gl.tensor,
    count: gl.tensor,
    kept: gl.tensor,
    key: gl.tensor,
    tile: gl.tensor,
    row: gl.tensor,
    queues: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    P: gl.constexpr,
    HEADS: gl.constexpr,
    QUEUES: gl.constexpr,
    CELLS: gl.constexpr,
) -> gl.tensor:
    """Appends those of P tiles' keys that are kept (int32, 0 or 1) to a list, ascending; the new count, [8, P] of one.

    CELLS: of each of the QUEUES in which they are announced as well (`announcements`), 0 for none. queues: pointers to
    cells and counts. tile: the first one's first key.
    """
    LAYOUT: gl.constexpr = scored_keys_layout(8, X, P)
    marks, ids = by_registers(kept, T, X, P), by_registers(key, T, X, P)
    half = gl.expand_dims(gl.arange(0, P, layout=gl.SliceLayout(0, LAYOUT)), 0)
    lane = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT)), 1) * 4 + half * 2
    earlier = (gl.full([8, P], 1, gl.int32, layout=LAYOUT) << lane) - 1
    earlier = earlier & (gl.full([8, P], 0x11111111, gl.int32, layout=LAYOUT) << (lane & 2))
    place, total = count, count
    for part in gl.static_range(T // 8):  # a lane's keys follow one another
        votes = voted(marks[part], P)
        place += counted(votes & earlier)
        total += counted(votes)
        if P == 2:
            place += gl.where((lane & 2) > 0, counted(votes & 0x11111111), 0)
    if CELLS > 0:
        # What is listed lies together: neighbouring results announce to different queues.
        queue = (tile // (P * T) + row % HEADS * (QUEUES // HEADS)) % QUEUES
        ahead = gl.atomic_add(queues[1] + queue, one_of(total - count), sem="relaxed") - count
        cells_ptr = queues[0] + queue * CELLS
        turn = gl.load(queues[1] + (QUEUES + 1)) % _TURNS + 1
        upper = ((turn << (_TURN_SHIFT - _ROW_SHIFT)) + row).to(gl.int64) << _ROW_SHIFT
    for part in gl.static_range(T // 8):
        gl.store(ids_ptr + place, ids[part], mask=marks[part] > 0)
        if CELLS > 0:
            cell = cells_ptr + ((place + ahead) & (CELLS - 1))
            gl.store(cell, upper + (ids[part] + 1).to(gl.int64), mask=marks[part] > 0)
        place += marks[part]
    return total
