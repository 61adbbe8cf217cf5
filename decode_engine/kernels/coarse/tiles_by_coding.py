"""Tiles of a coarse copy as kernels of several warps take them, by its coding: `coded_tiles`, or `product_tiles`.

PRODUCT says which. Of product codes constants that say how scalar ones are unpacked mean nothing.

Shape legend: as in `coded_tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.coarse import coded_tiles, product_tiles
from decode_engine.kernels.record_fields import (
    KEY_CODES,
    KEY_SCALES,
    VALUE_CODES,
    VALUE_SCALES,
    key_pointers,
    product_pointers,
    value_pointers,
)


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
    """A row's queries by planes, as `key_logits` needs them."""
    if PRODUCT:
        queries = product_tiles.load_queries(q_ptr, row, scale_log2, GROUP, DIM, BITS, ROWS)
    else:
        queries = coded_tiles.load_queries(q_ptr, row, scale_log2, GROUP, DIM, BITS, BYTES, ROWS)
    return queries


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
    INT8: tl.constexpr,
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
        logits = coded_tiles.key_logits(
            queries, places[0], places[1] + block * DIM, places[2] + block * DIM, key, there,
            DIM, BITS, BYTES, INT8, ROWS, ELEMENT, PRECISION, PACKED,
        )  # fmt: skip
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
    if PRODUCT:
        sums = product_tiles.no_values_yet(DIM, BITS, ROWS)
        evens: tl.tensor = ()
    else:
        sums, evens = coded_tiles.no_values_yet(TILE, DIM, BITS, BYTES, GROUPS, ROWS)
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
    INT8: tl.constexpr,
    PRODUCT: tl.constexpr,
    ELEMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
) -> tl.tensor:
    """Adds values by weights [T, X], 0 for keys not there. above: bits of what all weights are below (`load_cut`)."""
    if PRODUCT:
        sums = product_tiles.add_values(
            sums, weights, above, places[0], places[1], key, there, DIM, BITS, ELEMENT, PRECISION
        )
    else:
        sums, evens = coded_tiles.add_values(
            sums, evens, weights, places[0], scales, offsets, key, there,
            DIM, BITS, BYTES, GROUPS, INT8, ELEMENT, PRECISION, PACKED,
        )  # fmt: skip
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
        coded_tiles.store_values(sums_ptr, sums, evens, at, there, DIM, BITS, BYTES, GROUPS)
