"""Tiles of coded keys and values, and products with them: codes are unpacked once for all query rows of a tile.

A row of codes is read in words, and unpacked into planes of channels, a shift and a mask each: the code at bit i * b
of byte k of word j belongs to channel j * S + k + i * d * b / 8, with S bytes in a word, and to plane k * 8 / b + i.
Queries are loaded and sums are stored in the planes' order of channels, so that nothing else knows of it.

Scales and offsets never meet the codes: those of keys fold into the queries, and into one number for each query head
and block, those of values into the weights. Numbers that are rounded before they are multiplied with codes leave
something over; that counts as if all codes were the middle one, or errors that all keys share would add up. Products
are of numbers of the queries' type with 16 + code: a code is a bfloat16 number when its bits are shifted into place and
joined with those of 16. What the 16 adds is taken off in float32.

Of product codes (PRODUCT) `product_tiles` does all of this. What says how scalar ones are unpacked means nothing then.

Shape legend: X query rows, padded; T keys of a tile, of one block; W words of a row, channels of a plane; d head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.coarse import product_tiles
from decode_engine.kernels.record_fields import (
    KEY_CODES,
    KEY_SCALES,
    VALUE_CODES,
    VALUE_SCALES,
    key_pointers,
    product_pointers,
    value_pointers,
)

_LIFT = tl.constexpr(16.0)
_TINY = tl.constexpr(1e-30)
"""What sums of a tile's values begin with: from zero the compiler would go on from those of the tiles before, and
tensor cores drop what is below a sum's last bit. Over thousands of tiles that adds up."""


def _unpacking(bits: int, shift: int, word: int) -> str:
    """PTX that makes bfloat16 numbers 16 + code of the codes at a bit of words of so many bits, which fill 32.

    Codes are shifted to where a mantissa's bits stand for ones, masked, and joined with the bits of 16; where words are
    bytes with the lower half of these, and the upper half is put between.
    """
    moved = f"{'shl' if shift < 3 else 'shr'}.b32 t, $WORDS, {abs(shift - 3)};"
    mask, sixteen = ((1 << bits) - 1) << 3, 0x4180
    if word == 16:
        joined = f"lop3.b32 $0, t, 0x{mask * 0x00010001:08x}, 0x{sixteen * 0x00010001:08x}, 0xea;"
        return f"{{ .reg .b32 t; {moved} {joined} }}".replace("WORDS", "1")
    joined = f"lop3.b32 t, t, 0x{mask * 0x01010101:08x}, 0x80808080, 0xea;"
    spread = "prmt.b32 $0, t, 0x41414141, 0x4140; prmt.b32 $1, t, 0x41414141, 0x4342;"
    return f"{{ .reg .b32 t; {moved} {joined} {spread} }}".replace("WORDS", "2")


TO_BFLOAT16 = {
    (bits, shift, word): _unpacking(bits, shift, word)
    for word in (8, 16)
    for bits in (2, 4)
    for shift in range(0, word, bits)
}
_TO_BFLOAT16 = tl.constexpr(TO_BFLOAT16)


@triton.jit
def plane_channels(
    plane: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr
) -> tl.tensor:
    """Channels of a plane, [W]."""
    LOW: tl.constexpr = 4 if BITS == 4 else 2  # the third bits stand in words of their own
    ROW: tl.constexpr = DIM * LOW // 8
    PER_BYTE: tl.constexpr = 8 // LOW
    return tl.arange(0, ROW // BYTES) * BYTES + plane // PER_BYTE + plane % PER_BYTE * ROW


@triton.jit
def key_places(
    records_ptr: tl.tensor,
    b: tl.tensor,
    head: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> tl.tensor:
    """Where a KV head's coded keys are: their codes, then what these mean."""
    if PRODUCT:
        places = product_pointers(records_ptr, b, head, DIM, BITS, KEY_CODES, KEY_SCALES)
    else:
        places = key_pointers(records_ptr, b, head, DIM, BITS)
    return places


@triton.jit
def value_places(
    records_ptr: tl.tensor,
    b: tl.tensor,
    head: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> tl.tensor:
    """Where a KV head's coded values are, likewise."""
    if PRODUCT:
        places = product_pointers(records_ptr, b, head, DIM, BITS, VALUE_CODES, VALUE_SCALES)
    else:
        places = value_pointers(records_ptr, b, head, DIM, BITS, GROUPS)
    return places


@triton.jit
def load_queries(
    q_ptr: tl.tensor,
    row: tl.tensor,
    scale_log2: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """A row's queries by planes of keys' codes, such that products are logits in log2; of scalars [W, X] float32."""
    queries: tl.tensor = ()
    if PRODUCT:
        queries = product_tiles.load_queries(q_ptr, row, scale_log2, GROUP, DIM, BITS, ROWS)
    else:
        PLANES: tl.constexpr = BYTES * (2 if BITS == 4 else 4)
        heads = tl.arange(0, ROWS)
        for plane in tl.static_range(PLANES):
            channels = plane_channels(plane, DIM, BITS, BYTES)
            at = (row * GROUP + heads)[None, :] * DIM + channels[:, None]
            q = tl.load(q_ptr + at, mask=heads[None, :] < GROUP, other=0.0)
            queries += (q.to(tl.float32) * scale_log2,)
    return queries


@triton.jit
def load_codes(
    codes_ptr: tl.tensor,
    key: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
) -> tl.tensor:
    """Words of keys' rows, [T, W]: those with the low bits, and those with the third bit, where there is one."""
    W: tl.constexpr = DIM * (4 if BITS == 4 else 2) // 8 // BYTES
    WORD: tl.constexpr = tl.uint16 if BYTES == 2 else tl.uint8
    words_ptr = codes_ptr.to(tl.pointer_type(WORD))
    word = tl.arange(0, W)
    row_ptrs = words_ptr + key.to(tl.int64)[:, None] * (DIM * BITS // 8 // BYTES)
    low = tl.load(row_ptrs + word[None, :], mask=there[:, None], other=0)
    top = low
    if BITS == 3:
        top = tl.load(row_ptrs + W + (word % (W // 2))[None, :], mask=there[:, None], other=0)
    return low, top


@triton.jit
def plane_codes(
    low: tl.tensor,
    top: tl.tensor,
    plane: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
) -> tl.tensor:
    """Codes of a plane, [T, W] in the words' type."""
    LOW: tl.constexpr = 4 if BITS == 4 else 2
    SHIFT: tl.constexpr = plane * LOW
    codes = (low >> SHIFT) & ((1 << LOW) - 1)
    if BITS == 3:
        W: tl.constexpr = DIM * LOW // 8 // BYTES
        own = (SHIFT + tl.arange(0, W) // (W // 2)).to(top.dtype)
        codes = codes | (((top >> own[None, :]) & 1) << 2)
    return codes


@triton.jit
def lifted_codes(
    low: tl.tensor,
    top: tl.tensor,
    plane: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    PACKED: tl.constexpr,
) -> tl.tensor:
    """16 + code of a plane, [T, W] ELEMENT. PACKED: those of 32 bits at once, where ELEMENT is bfloat16."""
    if PACKED and BITS != 3:
        ASM: tl.constexpr = _TO_BFLOAT16[BITS, plane * BITS, BYTES * 8]
        REGISTERS: tl.constexpr = "=r,r" if BYTES == 2 else "=r,=r,r"
        numbers = tl.inline_asm_elementwise(
            ASM, REGISTERS, [low], dtype=tl.bfloat16, is_pure=True, pack=4 // BYTES
        )
    else:
        numbers = (plane_codes(low, top, plane, DIM, BITS, BYTES) + 16).to(ELEMENT)
    return numbers


@triton.jit
def load_channels(
    numbers_ptr: tl.tensor, DIM: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr
) -> tl.tensor:
    """Numbers of all channels, [d], by planes, [W] float32 each: loaded in vectors."""
    PER_BYTE: tl.constexpr = 2 if BITS == 4 else 4
    ROW: tl.constexpr = DIM // PER_BYTE
    by_byte: tl.tensor = ()
    for i in tl.static_range(PER_BYTE):
        part = tl.load(numbers_ptr + i * ROW + tl.arange(0, ROW)).to(tl.float32)
        if BYTES == 1:
            by_byte += (part,)
        else:
            by_byte += tl.split(tl.reshape(part, [ROW // 2, 2]))
    numbers: tl.tensor = ()
    for plane in tl.static_range(BYTES * PER_BYTE):
        numbers += (by_byte[plane % PER_BYTE * BYTES + plane // PER_BYTE],)
    return numbers


@triton.jit
def key_logits(
    queries: tl.tensor,
    places: tl.tensor,
    block: tl.tensor,
    key: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
) -> tl.tensor:
    """Logits [T, X] in log2 of keys of one block; anything for keys not there."""
    if PRODUCT:
        logits = product_tiles.key_logits(
            queries, places[0], places[1], key, there, DIM, BITS, ROWS, PRECISION
        )
    else:
        scales_ptr, offsets_ptr = places[1] + block * DIM, places[2] + block * DIM
        PLANES: tl.constexpr = BYTES * (2 if BITS == 4 else 4)
        MIDDLE: tl.constexpr = ((1 << BITS) - 1) * 0.5
        low, top = load_codes(places[0], key, there, DIM, BITS, BYTES)
        scales = load_channels(scales_ptr, DIM, BITS, BYTES)
        offsets = load_channels(offsets_ptr, DIM, BITS, BYTES)
        scaled: tl.tensor = ()
        base = tl.zeros([DIM // PLANES, ROWS], tl.float32)
        for plane in tl.static_range(PLANES):
            scaled += (queries[plane] * scales[plane][:, None],)
            base += queries[plane] * offsets[plane][:, None] + scaled[plane] * MIDDLE
        logits = tl.zeros([key.shape[0], ROWS], tl.float32)
        for plane in tl.static_range(PLANES):
            rounded = scaled[plane].to(ELEMENT)
            base -= rounded.to(tl.float32) * (MIDDLE + _LIFT)
            codes = lifted_codes(low, top, plane, DIM, BITS, BYTES, ELEMENT, PACKED)
            logits = tl.dot(codes, rounded, logits, input_precision=PRECISION)
        logits = logits + tl.sum(base, 0)[None, :]
    return logits


@triton.jit
def value_steps(
    places: tl.tensor, key: tl.tensor, there: tl.tensor, GROUPS: tl.constexpr, PRODUCT: tl.constexpr
) -> tl.tensor:
    """Scales and offsets of values, for each group of channels [T] float32; none of product codes."""
    scales: tl.tensor = ()
    offsets: tl.tensor = ()
    if not PRODUCT:
        for group in tl.static_range(GROUPS):
            at = key.to(tl.int64) * GROUPS + group
            scales += (tl.load(places[1] + at, mask=there, other=0.0).to(tl.float32),)
            offsets += (tl.load(places[2] + at, mask=there, other=0.0).to(tl.float32),)
    return scales, offsets


@triton.jit
def no_values_yet(
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """What `add_values` adds to, before the first tile: sums by planes, and what adds to all channels of a group."""
    sums: tl.tensor = ()
    evens: tl.tensor = ()
    if PRODUCT:
        sums = product_tiles.no_values_yet(DIM, BITS, ROWS)
    else:
        PLANES: tl.constexpr = BYTES * (2 if BITS == 4 else 4)
        for _ in tl.static_range(PLANES):
            sums += (tl.zeros([ROWS, DIM // PLANES], tl.float32),)
        for _ in tl.static_range(GROUPS):
            evens += (tl.zeros([TILE, ROWS], tl.float32),)
    return sums, evens


@triton.jit
def add_values(
    sums: tl.tensor,
    evens: tl.tensor,
    weights: tl.tensor,
    above: tl.tensor,
    places: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    key: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    PRODUCT: tl.constexpr,
    ELEMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
) -> tl.tensor:
    """Adds values by weights [T, X], 0 for keys not there. above: bits of what all weights are below (`load_cut`).

    sums: of codes by planes, [X, W] each. evens: what adds to all channels of a group, not yet added up over a tile's
    keys, [T, X] each; none of product codes. scales, offsets: of each group, [T] float32 (`value_steps`).
    """
    if PRODUCT:
        sums = product_tiles.add_values(
            sums, weights, above, places[0], places[1], key, there, DIM, BITS, ELEMENT, PRECISION
        )
    else:
        PER_BYTE: tl.constexpr = 2 if BITS == 4 else 4
        PER_GROUP: tl.constexpr = PER_BYTE // GROUPS  # planes of a byte that have channels of the same group
        MIDDLE: tl.constexpr = ((1 << BITS) - 1) * 0.5
        low, top = load_codes(places[0], key, there, DIM, BITS, BYTES)
        new_evens: tl.tensor = ()
        rounded: tl.tensor = ()
        for group in tl.static_range(GROUPS):
            scaled = weights * scales[group][:, None]
            even = evens[group] + weights * offsets[group][:, None] + scaled * MIDDLE
            rounded += (scaled.to(ELEMENT),)
            even -= rounded[group].to(tl.float32) * (MIDDLE + _LIFT)
            new_evens += (even,)
        new_sums: tl.tensor = ()
        for plane in tl.static_range(BYTES * PER_BYTE):
            of_group = tl.trans(rounded[plane % PER_BYTE // PER_GROUP])
            codes = lifted_codes(low, top, plane, DIM, BITS, BYTES, ELEMENT, PACKED)
            products = tl.dot(of_group, codes, tl.full(sums[plane].shape, _TINY, tl.float32), PRECISION)
            new_sums += (sums[plane] + products,)
        sums, evens = new_sums, new_evens
    return sums, evens


@triton.jit
def store_values(
    sums_ptr: tl.tensor,
    sums: tl.tensor,
    evens: tl.tensor,
    above: tl.tensor,
    at: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> None:
    """Writes sums of values, [X, d] from places `at` [X] on, where they are there [X]."""
    if PRODUCT:
        product_tiles.store_values(sums_ptr, sums, above, at, there, DIM, BITS)
    else:
        PER_BYTE: tl.constexpr = 2 if BITS == 4 else 4
        for plane in tl.static_range(BYTES * PER_BYTE):
            into = sums_ptr + at[:, None] * DIM + plane_channels(plane, DIM, BITS, BYTES)[None, :]
            even = tl.sum(evens[plane % PER_BYTE * GROUPS // PER_BYTE], 0)
            tl.store(into, sums[plane] + even[:, None], mask=there[:, None])
