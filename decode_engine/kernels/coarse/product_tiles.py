"""Tiles of product-coded keys and values, and products with them: codewords are looked up once for all query rows.

A code names the codeword of a slice, one float16 number for each of its channels. A lookup takes all of them in one
piece, 8 bytes for 4 channels or 4 for 2, which is then taken apart: channel p of slice s is number s of plane p. So
there are as many planes as a slice has channels. Queries are loaded and sums are stored by planes, so that nothing else
knows of it (`coded_tiles` has planes of scalar codes).

Products are of float16 numbers, or of float32 ones where queries are. No codeword is rounded. Nor are queries in 16
bits: they are multiplied in units of each head's own, a power of two, and scaled after their products are summed.
(Those below 2^-14 of a head's largest lose digits; that is 2^-25 of the largest at most.) Weights are rounded to
float16, in units in which the cut is large: all that are multiplied are below it.

Shape legend: X query rows, padded; T keys of a tile; S slices of a row, w channels of a slice; d head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from index_store.indexes.coarse_rows import product_rows

_CODEWORDS = tl.constexpr(product_rows.CODEWORDS)
_TINY = tl.constexpr(1e-30)
"""As in `coded_tiles`."""
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def slice_channels(plane: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Channels of a plane, [S]."""
    return tl.arange(0, DIM // WIDTH) * WIDTH + plane


@triton.jit
def load_queries(
    q_ptr: tl.tensor,
    row: tl.tensor,
    scale_log2: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """A row's queries by planes, [S, X] float16 each, or float32 if they were; and what makes products logits in log2.

    That is [X] float32, the last of the tuple.
    """
    WIDTH: tl.constexpr = 8 // BITS
    NUMBER: tl.constexpr = tl.float32 if q_ptr.dtype.element_ty == tl.float32 else tl.float16
    heads = tl.arange(0, ROWS)
    loaded: tl.tensor = ()
    largest = tl.zeros([DIM // WIDTH, ROWS], tl.float32)
    for plane in tl.static_range(WIDTH):
        channels = slice_channels(plane, DIM, WIDTH)
        at = (row * GROUP + heads)[None, :] * DIM + channels[:, None]
        loaded += (tl.load(q_ptr + at, mask=heads[None, :] < GROUP, other=0.0).to(tl.float32),)
        largest = tl.maximum(largest, tl.abs(loaded[plane]))
    # A number's exponent alone is a power of two, and its difference from twice that of one is the inverse's.
    exponents = tl.max(largest, 0).to(tl.int32, bitcast=True) >> 23
    exponents = tl.minimum(tl.maximum(exponents, 1), 253)
    inverses = ((254 - exponents) << 23).to(tl.float32, bitcast=True)
    queries: tl.tensor = ()
    for plane in tl.static_range(WIDTH):
        queries += ((loaded[plane] * inverses[None, :]).to(NUMBER),)
    queries += ((exponents << 23).to(tl.float32, bitcast=True) * scale_log2,)
    return queries


@triton.jit
def load_codewords(
    codes_ptr: tl.tensor,
    books_ptr: tl.tensor,
    key: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Codewords of keys, [T, S] as they lie, in integers of 16 w bits; any for keys not there."""
    WIDTH: tl.constexpr = 8 // BITS
    WORD: tl.constexpr = tl.int64 if WIDTH == 4 else tl.int32
    part = tl.arange(0, DIM // WIDTH)
    row_ptrs = codes_ptr + key.to(tl.int64)[:, None] * (DIM // WIDTH)
    codes = tl.load(row_ptrs + part[None, :], mask=there[:, None], other=0)
    return tl.load(books_ptr.to(tl.pointer_type(WORD)) + (part[None, :] * _CODEWORDS + codes))


@triton.jit
def plane_numbers(words: tl.tensor, plane: tl.constexpr, NUMBER: tl.constexpr) -> tl.tensor:
    """Numbers of a plane, [T, S]."""
    return (words >> (16 * plane)).to(tl.int16).to(tl.float16, bitcast=True).to(NUMBER)


@triton.jit
def key_logits(
    queries: tl.tensor,
    codes_ptr: tl.tensor,
    books_ptr: tl.tensor,
    key: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Logits [T, X] of keys; anything for keys not there. queries: as `load_queries` has them."""
    words = load_codewords(codes_ptr, books_ptr, key, there, DIM, BITS)
    logits = tl.zeros([key.shape[0], ROWS], tl.float32)
    for plane in tl.static_range(8 // BITS):
        numbers = plane_numbers(words, plane, queries[plane].dtype)
        logits = tl.dot(numbers, queries[plane], logits, input_precision=PRECISION)
    return logits * queries[8 // BITS][None, :]


@triton.jit
def weight_units(above: tl.tensor) -> tl.tensor:
    """How many units of weights one is, a power of two, and its inverse.

    A cut whose upper bound (`border.load_cut`) this is comes to 2^14 units. One where a cut keeps all keys, or none.
    """
    exponent = tl.where((above > 0) & (above < _INFINITE), 141 - (above >> 23), 0)
    of_one, unit = (127 + exponent) << 23, (127 - exponent) << 23
    return of_one.to(tl.float32, bitcast=True), unit.to(tl.float32, bitcast=True)


@triton.jit
def no_values_yet(DIM: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """What `add_values` adds to, before the first tile."""
    sums: tl.tensor = ()
    for _ in tl.static_range(8 // BITS):
        sums += (tl.zeros([ROWS, DIM // (8 // BITS)], tl.float32),)
    return sums


@triton.jit
def add_values(
    sums: tl.tensor,
    weights: tl.tensor,
    above: tl.tensor,
    codes_ptr: tl.tensor,
    books_ptr: tl.tensor,
    key: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    ELEMENT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Adds values by weights [T, X], 0 for keys not there, to sums by planes, [X, S] each. above: of the cut's bits."""
    NUMBER: tl.constexpr = tl.float32 if tl.float32 == ELEMENT else tl.float16
    words = load_codewords(codes_ptr, books_ptr, key, there, DIM, BITS)
    of_one, _ = weight_units(above)
    rounded = tl.trans((weights * of_one).to(NUMBER))
    new_sums: tl.tensor = ()
    for plane in tl.static_range(8 // BITS):
        numbers = plane_numbers(words, plane, NUMBER)
        products = tl.dot(rounded, numbers, tl.full(sums[plane].shape, _TINY, tl.float32), PRECISION)
        new_sums += (sums[plane] + products,)
    return new_sums


@triton.jit
def store_values(
    sums_ptr: tl.tensor,
    sums: tl.tensor,
    above: tl.tensor,
    at: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Writes sums of values, [X, d] from places `at` [X] on, where they are there [X]."""
    _, unit = weight_units(above)
    for plane in tl.static_range(8 // BITS):
        into = sums_ptr + at[:, None] * DIM + slice_channels(plane, DIM, 8 // BITS)[None, :]
        tl.store(into, sums[plane] * unit, mask=there[:, None])
