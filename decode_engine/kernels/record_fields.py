"""Records as kernels read them: the fields of `records`, and functions that load what they say.

Addresses are in bytes and become pointers here, so that every kernel says the same about how they are aligned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels import records
from index_store.indexes.coarse_rows.parameters import BLOCK

KV, TAIL, KEYS, FIRST = map(tl.constexpr, (records.KV, records.TAIL, records.KEYS, records.FIRST))
END, TAIL_KEYS, KEEP, STEP = map(tl.constexpr, (records.END, records.TAIL_KEYS, records.KEEP, records.STEP))
TABLES, TABLE_ROW, CENTROIDS = map(tl.constexpr, (records.TABLES, records.TABLE_ROW, records.CENTROIDS))
SCALES, MEANS, VALUE_MEANS = map(tl.constexpr, (records.SCALES, records.MEANS, records.VALUE_MEANS))
SIZES, OFFSETS, MEMBERS = map(tl.constexpr, (records.SIZES, records.OFFSETS, records.MEMBERS))
ASSIGNMENT, VARIANCES, CLUSTERS = map(tl.constexpr, (records.ASSIGNMENT, records.VARIANCES, records.CLUSTERS))
UNCLUSTERED, SLOTS, TAGS = map(tl.constexpr, (records.UNCLUSTERED, records.SLOTS, records.TAGS))
STAMPS, TALLIES, SETS = map(tl.constexpr, (records.STAMPS, records.TALLIES, records.SETS))
MISSED, WINDOW, KEY_CODES = map(tl.constexpr, (records.MISSED, records.WINDOW, records.KEY_CODES))
VALUE_CODES, KEY_SCALES = map(tl.constexpr, (records.VALUE_CODES, records.KEY_SCALES))
KEY_OFFSETS, VALUE_SCALES = map(tl.constexpr, (records.KEY_OFFSETS, records.VALUE_SCALES))
VALUE_OFFSETS = tl.constexpr(records.VALUE_OFFSETS)
_FIELDS = tl.constexpr(records.RECORD_FIELDS)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def field(records_ptr: tl.tensor, b: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """One int64 of a sequence's record."""
    return tl.load(records_ptr + b * _FIELDS + index)


@triton.jit
def row_of(
    place: tl.tensor, HEADS: tl.constexpr, FIRST_HEAD: tl.constexpr, SOME_HEADS: tl.constexpr
) -> tl.tensor:
    """The place-th row (sequence x KV head) of those whose heads are FIRST_HEAD .. FIRST_HEAD + SOME_HEADS - 1."""
    return place // SOME_HEADS * HEADS + FIRST_HEAD + place % SOME_HEADS


@triton.jit
def searched_keys(records_ptr: tl.tensor, b: tl.tensor) -> tl.tensor:
    """First key that is searched, and the end of these; both int32."""
    return field(records_ptr, b, FIRST).to(tl.int32), field(records_ptr, b, END).to(tl.int32)


@triton.jit
def aligned_pointer(
    records_ptr: tl.tensor, b: tl.tensor, offset: tl.tensor, ADDRESS: tl.constexpr, ELEMENT: tl.constexpr
) -> tl.tensor:
    """Pointer to what lies `offset` elements behind an address of the record that is a multiple of 16."""
    # The hint belongs here: on what a function returns it is lost, and words would be loaded one by one.
    return tl.multiple_of(field(records_ptr, b, ADDRESS).to(tl.pointer_type(ELEMENT)), 16) + offset


@triton.jit
def head_rows(
    records_ptr: tl.tensor, b: tl.tensor, head: tl.tensor, ADDRESS: tl.constexpr, ELEMENT: tl.constexpr
) -> tl.tensor:
    """Pointer to a KV head's keys and values; the field of its stride follows that of the address."""
    address = field(records_ptr, b, ADDRESS) + head * field(records_ptr, b, ADDRESS + 1)
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def key_pointers(
    records_ptr: tl.tensor, b: tl.tensor, head: tl.tensor, DIM: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """Codes of a KV head's keys, and scales and offsets of their blocks."""
    keys = field(records_ptr, b, KEYS)
    blocks = tl.cdiv(keys, _BLOCK)
    return (
        aligned_pointer(records_ptr, b, head * keys * (DIM * BITS // 8), KEY_CODES, tl.uint8),
        aligned_pointer(records_ptr, b, head * blocks * DIM, KEY_SCALES, tl.float16),
        aligned_pointer(records_ptr, b, head * blocks * DIM, KEY_OFFSETS, tl.float16),
    )


@triton.jit
def value_pointers(
    records_ptr: tl.tensor,
    b: tl.tensor,
    head: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Codes, scales and offsets of a KV head's values."""
    before = head * field(records_ptr, b, KEYS)
    return (
        aligned_pointer(records_ptr, b, before * (DIM * BITS // 8), VALUE_CODES, tl.uint8),
        aligned_pointer(records_ptr, b, before * GROUPS, VALUE_SCALES, tl.float16),
        aligned_pointer(records_ptr, b, before * GROUPS, VALUE_OFFSETS, tl.float16),
    )
