"""Tiles of coded values, and products of weights with them, as tensor cores take bytes.

Codes are multiplied where they lie, as those of keys are (`key_tiles`): the byte as it is, and below that with its
upper codes masked. What a byte's lower codes add to sums of its upper ones is taken off in the end (`values_of`).
Products add up over keys here, four to a register, so words of four neighbouring keys change bytes first.

Weights times scales are integers of 15 bits (`store_weights`). Their two bytes are columns of their own, so that sums
are exact. Where query heads fill half of eight columns both are in these, and sums of several tiles stay integers.

Shape legend: T keys of a tile, X query rows, a multiple of 8; W words of a row of codes; Y columns of bytes: C of upper
ones, and as many of lower ones. As in `key_tiles` a register of each lane is a tensor [8, 4], lane 4 r + q: columns of
weights, and eighths of a row's words, are r; q has keys 4 q .. 4 q + 3 of each sixteen.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.coarse.registers import (
    OF_KEYS,
    REGISTER,
    RESULT,
    as_rows,
    beside,
    bits_of,
    channels_of,
    code_count,
    factor_of,
    first_channel,
    group_of,
    held_words,
    level_codes,
    level_mask,
    plane_count,
    registers,
    step_of,
    value_places,
    whole_codes,
    words_of,
)


@gluon.constexpr_function
def key_bit(bit: int, T: int) -> list[int]:
    """Basis of the rows of a tile as it lies (`key_of`) that differ in a bit of their key's number."""
    inner = bits_of(T) - 3
    return [8 << bit if bit < inner else 1 << (bit - inner), 0]


@gluon.constexpr_function
def value_layout(T: int, DIM: int, BITS: int) -> gl.DistributedLinearLayout:
    """Of words of values as they come."""
    words, thirds = words_of(DIM, BITS), [] if BITS != 3 else [[0, words_of(DIM, BITS)]]
    own = [[0, 1 << bit] for bit in range(bits_of(words) - 3)]
    keys = [key_bit(bit, T) for bit in range(bits_of(T))]
    lanes = [keys[2], keys[3], [0, words // 8], [0, words // 4], [0, words // 2]]
    held = held_words(DIM, BITS)
    return gl.DistributedLinearLayout([*own, *thirds, *keys[:2], *keys[4:]], lanes, [], [], [T, held])


@gluon.constexpr_function
def weight_layout(T: int, Y: int) -> gl.DistributedLinearLayout:
    """Of words of four keys' weights, by Y columns, [Y, T / 4]."""
    own = [[0, 4 << bit] for bit in range(bits_of(T) - 4)]
    own += [[8 << bit, 0] for bit in range(bits_of(Y) - 3)]
    return gl.DistributedLinearLayout(own, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [], [], [Y, T // 4])


@gluon.constexpr_function
def source_of(plane: int, upper: int, DIM: int, BITS: int) -> tuple[int, int, int, int]:
    """Where codes of a plane's first or last eight places are: in which of a lane's words, in which set of its codes,
    in which byte, and at which level of it."""
    places = value_places(DIM, BITS)
    channel = first_channel(plane, places) + upper * step_of(3, places)
    words = words_of(DIM, BITS)
    code, byte = divmod(channel, 4 * words)
    sets = len(level_codes(BITS)[0])
    return byte // 4 % (words // 8), code % sets, byte % 4, code // sets


@gluon.constexpr_function
def first_level(level: int, BITS: int, GROUPS: int) -> int:
    """The lowest level whose codes are of the same group of channels: of others weights differ."""
    each: int = len(level_codes(BITS)) // GROUPS
    return level // each * each


@gluon.constexpr_function
def value_mask(level: int, BITS: int, GROUPS: int) -> int:
    """Of a word's bytes, from that level up to one."""
    first = first_level(level, BITS, GROUPS)
    mask: int = level_mask(BITS, level) & ~(level_mask(BITS, first - 1) if first > 0 else 0)
    return mask


@gluon.jit
def turned(words: gl.tensor) -> gl.tensor:
    """Words of four keys as four words of the same bytes of each."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 x; .reg .b32 y; .reg .b32 u; .reg .b32 v; "
        "prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362; "
        "prmt.b32 u, $6, $7, 0x5140; prmt.b32 v, $6, $7, 0x7362; "
        "prmt.b32 $0, x, u, 0x5410; prmt.b32 $1, x, u, 0x7632; "
        "prmt.b32 $2, y, v, 0x5410; prmt.b32 $3, y, v, 0x7632; }",
        "=r,=r,=r,=r,r,r,r,r", [words[0], words[1], words[2], words[3]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def bytes_of(words: gl.tensor, first: gl.constexpr, K: gl.constexpr) -> gl.tensor:
    """Of four keys, by sets of codes: their words are those from `first` on, and behind them those with third bits."""
    if K.BITS == 3:
        r = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, REGISTER)), 1)
        even: gl.tensor = ()
        odd: gl.tensor = ()
        for key in gl.static_range(4):
            low = words[first + key]
            # The upper half of the words has its third bits one place above its codes'.
            third = words[first + 4 + key] >> (r // 4)
            both = whole_codes(low, third)
            even += (both[0],)
            odd += (both[1],)
        return turned(even), turned(odd)
    else:  # noqa: RET505 - the other branch is not compiled
        return (turned((words[first], words[first + 1], words[first + 2], words[first + 3])),)


@gluon.jit
def value_sources(words: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Words of values as registers of four keys each: by sixteens of keys, words of a lane, sets of codes and bytes."""
    OWN: gl.constexpr = words_of(K.DIM, K.BITS) // 8
    PARTS: gl.constexpr = 2 if K.BITS == 3 else 1
    COUNT: gl.constexpr = K.T // 4 * OWN * PARTS
    # By keys in their order: 4 q .. 4 q + 3 of each sixteen are lane q's.
    by_keys = gl.permute(gl.reshape(words, [K.T // 8, 8, 8 * OWN * PARTS]), [1, 0, 2])
    parts = gl.permute(gl.reshape(by_keys, [K.T // 16, 4, 4, PARTS, 8, OWN]), [4, 1, 0, 5, 3, 2])
    own = registers(gl.reshape(parts, [8, 4, COUNT]), COUNT)
    sources: gl.tensor = ()
    for sixteen in gl.static_range(K.T // 16):
        by_words: gl.tensor = ()
        for word in gl.static_range(OWN):
            by_words += (bytes_of(own, (sixteen * OWN + word) * PARTS * 4, K),)
        sources += (by_words,)
    return sources


@gluon.jit
def weight_words(words: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Words of weights as registers, by eights of columns and sixteens of keys."""
    COUNT: gl.constexpr = K.GROUPS * K.Y // 8 * (K.T // 16)
    parts = gl.permute(gl.reshape(words, [K.GROUPS * K.Y // 8, 8, K.T // 16, 4]), [1, 3, 0, 2])
    return registers(gl.reshape(parts, [8, 4, COUNT]), COUNT)


@gluon.jit
def source_masked(sources: gl.tensor, plane: gl.constexpr, upper: gl.constexpr, K: gl.constexpr) -> gl.tensor:
    """Bytes of a plane's first or last eight places, of sixteen keys."""
    SOURCE: gl.constexpr = source_of(plane, upper, K.DIM, K.BITS)
    return sources[SOURCE[0]][SOURCE[1]][SOURCE[2]] & value_mask(SOURCE[3], K.BITS, K.GROUPS)


@gluon.jit
def multiply_plane(
    sources: gl.tensor,
    weights: gl.tensor,
    first: gl.constexpr,
    sums: gl.tensor,
    plane: gl.constexpr,
    K: gl.constexpr,
) -> gl.tensor:
    """Adds products of a plane's bytes with eight columns of weights, from register `first` on."""
    if K.T == 16:
        sums = gl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.s32.u8.u8.s32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r",
            [
                source_masked(sources[0], plane, 0, K),
                source_masked(sources[0], plane, 1, K),
                weights[first], sums[0], sums[1], sums[2], sums[3],
            ],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        for step in gl.static_range(K.T // 32):
            low, high = sources[2 * step], sources[2 * step + 1]
            sums = gl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
                "{$10, $11, $12, $13};",
                "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                [
                    source_masked(low, plane, 0, K), source_masked(low, plane, 1, K),
                    source_masked(high, plane, 0, K), source_masked(high, plane, 1, K),
                    weights[first + 2 * step], weights[first + 2 * step + 1], sums[0], sums[1], sums[2], sums[3],
                ],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
    return sums


@gluon.jit
def add_plane(
    before: gl.tensor,
    sources: gl.tensor,
    weights: gl.tensor,
    unit: gl.tensor,
    plane: gl.constexpr,
    eight: gl.constexpr,
    K: gl.constexpr,
) -> gl.tensor:
    """Adds to four sums of a plane, of the eight-th eight columns of query rows; each byte has its own columns."""
    FIRST: gl.constexpr = (group_of(plane, K.DIM, K.BITS, K.GROUPS) * (K.Y // 8) + eight) * (K.T // 16)
    LOWER: gl.constexpr = FIRST + K.Y // 16 * (K.T // 16)
    zero = gl.full([8, 4], 0, gl.int32, layout=REGISTER)
    upper = multiply_plane(sources, weights, FIRST, (zero, zero, zero, zero), plane, K)
    shifted = (upper[0] << 8, upper[1] << 8, upper[2] << 8, upper[3] << 8)
    found = multiply_plane(sources, weights, LOWER, shifted, plane, K)
    more: gl.tensor = ()
    for part in gl.static_range(4):
        more += (before[part] + found[part].to(gl.float32) * unit,)
    return more


@gluon.jit
def add_bytes(
    pending: gl.tensor, sources: gl.tensor, weights: gl.tensor, plane: gl.constexpr, K: gl.constexpr
) -> gl.tensor:
    """Adds to four integers of a plane, where both bytes are in eight columns."""
    FIRST: gl.constexpr = group_of(plane, K.DIM, K.BITS, K.GROUPS) * (K.T // 16)
    return multiply_plane(sources, weights, FIRST, pending, plane, K)


@gluon.jit
def add_values(
    sums: gl.tensor,
    pending: gl.tensor,
    words: gl.tensor,
    weights: gl.tensor,
    unit: gl.tensor,
    K: gl.constexpr,
) -> gl.tensor:
    """Adds values, as words, by weights, words [GROUPS * Y, T / 4]; new sums, and what is pending.

    unit: what 1 is among weights. Integers are pending where there are registers for them: one more tile adds at most
    255 * 255 * T.
    """
    sources, own = value_sources(words, K), weight_words(weights, K)
    new: gl.tensor = ()
    for plane in gl.static_range(plane_count(K.DIM)):
        if K.Y == 8:
            new += (add_bytes(pending[plane], sources, own, plane, K),)
        else:
            for eight in gl.static_range(K.Y // 16):
                before = sums[plane * (K.Y // 16) + eight]
                new += (add_plane(before, sources, own, unit, plane, eight, K),)
    if K.Y == 8:
        return sums, new
    else:  # noqa: RET505 - the other branch is not compiled
        return new, pending


@gluon.jit
def no_values_yet(K: gl.constexpr) -> gl.tensor:
    """Sums of planes [16, X], before the first row."""
    zero = gl.full([16, K.X], 0.0, gl.float32, layout=RESULT)
    sums: gl.tensor = ()
    for _ in gl.static_range(plane_count(K.DIM)):
        sums += (zero,)
    return sums


@gluon.jit
def store_sums(
    sums_ptr: gl.tensor, sums: gl.tensor, at: gl.tensor, there: gl.tensor, K: gl.constexpr
) -> None:
    """Writes sums of values, by planes, [X, DIM] from places `at` [X] on, where they are there."""
    row = gl.arange(0, 16, layout=OF_KEYS)
    PLACES: gl.constexpr = value_places(K.DIM, K.BITS)
    for plane in gl.static_range(plane_count(K.DIM)):
        channel = channels_of(plane, row, PLACES)
        into = sums_ptr + (gl.expand_dims(at * K.DIM, 0) + gl.expand_dims(channel, 1))
        gl.store(into, sums[plane], mask=gl.expand_dims(there, 0) & gl.expand_dims(channel >= 0, 1))


_UPPER = gl.constexpr(256.0)
"""What an upper byte counts."""


@gluon.jit
def no_sums_yet(K: gl.constexpr) -> gl.tensor:
    """Sums of bytes, before the first tile: four registers for each plane and for each eight columns of query rows."""
    zero = gl.full([8, 4], 0.0, gl.float32, layout=REGISTER)
    EIGHTS: gl.constexpr = max(K.Y // 16, 1)
    sums: gl.tensor = ()
    for _ in gl.static_range(plane_count(K.DIM) * EIGHTS):
        sums += ((zero, zero, zero, zero),)
    return sums


@gluon.jit
def nothing_pending(K: gl.constexpr) -> gl.tensor:
    """Integers that are still to be added to sums, where both bytes are in eight columns: four registers a plane."""
    zero = gl.full([8, 4], 0, gl.int32, layout=REGISTER)
    pending: gl.tensor = ()
    for _ in gl.static_range(plane_count(K.DIM) if K.Y == 8 else 0):
        pending += ((zero, zero, zero, zero),)
    return pending


@gluon.jit
def add_pending(sums: gl.tensor, pending: gl.tensor, unit: gl.tensor) -> gl.tensor:
    """Adds integers in units of a number to the sums."""
    # Upper bytes are the first four of eight columns, two lanes'.
    lower = gl.arange(0, 4, layout=gl.SliceLayout(0, REGISTER)) // 2
    nothing = gl.full([8, 4], 0.0, gl.float32, layout=REGISTER)
    units = nothing + gl.expand_dims(gl.where(lower > 0, unit, unit * _UPPER), 0)
    if len(pending) == 0:
        return sums
    else:  # noqa: RET505 - the other branch is not compiled
        new: gl.tensor = ()
        for plane in gl.static_range(len(pending)):
            more: gl.tensor = ()
            for part in gl.static_range(4):
                more += (gl.fma(pending[plane][part].to(gl.float32), units, sums[plane][part]),)
            new += (more,)
        return new


@gluon.jit
def bytes_as_rows(sums: gl.tensor, plane: gl.constexpr, K: gl.constexpr) -> gl.tensor:
    """A plane's sums of bytes, [16, X]."""
    if K.Y == 8:
        apart = gl.reshape(as_rows(sums[plane]), [16, 2, 4])
        both = gl.expand_dims(gl.sum(apart, 1), 1)
        _, both = gl.broadcast(apart, both)
        return gl.convert_layout(gl.reshape(both, [16, 8]), RESULT)
    else:  # noqa: RET505 - the other branch is not compiled
        EIGHTS: gl.constexpr = K.X // 8
        parts: gl.tensor = ()
        for eight in gl.static_range(EIGHTS):
            parts += (as_rows(sums[plane * EIGHTS + eight]),)
        return beside(parts, 16, K.X)


@gluon.jit
def of_code_alone(found: gl.tensor, plane: gl.constexpr, K: gl.constexpr) -> gl.tensor:
    """A plane's sums without what codes below its own in a byte have added. found: those of all planes."""
    SETS: gl.constexpr = len(level_codes(K.BITS)[0])
    # The lowest bits of a plane's number say which code it is of.
    LEVEL: gl.constexpr = plane % code_count(K.BITS) // SETS
    own = found[plane]
    if first_level(LEVEL, K.BITS, K.GROUPS) < LEVEL:
        own -= found[plane - SETS]
    return own * (1.0 / factor_of(K.BITS) ** LEVEL)


@gluon.jit
def values_of(sums: gl.tensor, evens: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Sums of values, by planes [16, X], of those of bytes; evens: add to all channels of each group, [X]."""
    found: gl.tensor = ()
    for plane in gl.static_range(plane_count(K.DIM)):
        found += (bytes_as_rows(sums, plane, K),)
    plain: gl.tensor = ()
    for plane in gl.static_range(plane_count(K.DIM)):
        even = evens[group_of(plane, K.DIM, K.BITS, len(evens))]
        plain += (of_code_alone(found, plane, K) + gl.expand_dims(even, 0),)
    return plain
