"""Tiles of the coarse copy as products of bytes take them: codes by fours, side by side.

A tile is read from memory once, unpacked into the first-level cache, and multiplied with any number of rows.

Shape legend: R rows of weights, K keys of a tile, d head dim, b bits of a code.
"""

from __future__ import annotations

import numpy as np

from index_store.attention.vectors.bytes_numba import (
    instruction_sets,
    make_block_product,
    make_interleaving,
    make_transposition,
    prefetch,
)
from index_store.attention.vectors.code import LANES
from index_store.compiled.launch import I1, I4, U1, U4, njit

ROWS = 4
"""Rows are multiplied in multiples of this many."""

_LINE = 64  # bytes
_CHUNK = 16  # bytes that a transposition takes of a row
_SETS = instruction_sets()
_block_4_4 = make_block_product(4, 4, _SETS)
_block_4_1 = make_block_product(4, 1, _SETS)
_transpose_2, _transpose_4, _transpose_8 = (make_transposition(bits) for bits in (2, 4, 8))
_interleave_2, _interleave_4, _interleave_8 = (make_interleaving(bits, _CHUNK) for bits in (2, 4, 8))
_interleave_4_64 = make_interleaving(4, 4 * _CHUNK)


@njit(_nrt=False)
def multiply(
    codes: U4, column: int, columns: int, weights: I1, row: int, rows: int, words: int, sums: I4
) -> None:
    """sums[r, n] = the sum over k < words of the four products in codes[k, column + n] and weights[row + r, 4k..4k+3].

    For r < rows and n < columns, rounded upwards to multiples of ROWS and LANES.
    """
    for r in range(0, rows, ROWS):
        n = 0
        while n + 4 * LANES <= columns:
            _block_4_4(codes, column + n, weights, row + r, words, sums, r, n)
            n += 4 * LANES
        while n < columns:
            _block_4_1(codes, column + n, weights, row + r, words, sums, r, n)
            n += LANES


@njit(_nrt=False)
def pack_keys(codes: U1, first: int, count: int, bits: int, raw: U4, packed: U4) -> None:
    """packed[k, n] = codes of channels 4k..4k+3 of key first + n, for n < count; columns beyond are undefined.

    Asks for as many rows behind them meanwhile.

    codes: [N, row bytes] as stored. packed: [d/4, K], K a multiple of LANES. raw: scratch, [row bytes / 4, K].
    """
    row_bytes, channels = codes.shape[1], 4 * packed.shape[0]
    whole = count - count % LANES
    if row_bytes < _CHUNK or row_bytes % 4 or not _fits_words(channels, bits):
        whole = 0
    else:
        for chunk in range(0, row_bytes, _CHUNK):
            byte = min(chunk, row_bytes - _CHUNK)  # the last chunk may reach back over the one before
            for n in range(0, whole, LANES):
                _ask_for(codes, first + count + n, chunk * LANES, _CHUNK * LANES)
                if bits == 4:
                    _transpose_4(codes, first + n, byte, packed, byte // 4, n, row_bytes // 4)
                elif bits == 2:
                    _transpose_2(codes, first + n, byte, packed, byte // 4, n, row_bytes // 4)
                else:
                    _transpose_8(codes, first + n, byte, raw, byte // 4, n, 0)
        if bits == 3:
            _join_planes(raw, packed, packed.size)
    for n in range(whole, count):
        for k in range(channels // 4):
            packed[k, n] = _word_of(codes[first + n], 4 * k, channels, bits)


@njit(_nrt=False)
def pack_values(codes: U1, first: int, count: int, bits: int, raw: U4, packed: U4) -> None:
    """packed[k, c] = codes of channel c of keys first + 4k .. first + 4k + 3, for the `count` keys.

    Asks for as many rows behind them meanwhile.

    Keys beyond those, and columns beyond d, are undefined; the caller's weights for such keys are 0. codes:
    [N, row bytes] as stored. packed: [count / 4 or more, d or more]. raw: scratch, [1, row bytes].
    """
    row_bytes = codes.shape[1]
    channels = row_bytes * 8 // bits
    whole = count - count % 4 if row_bytes >= _CHUNK else 0
    for n in range(0, whole, 4):
        _ask_for(codes, first + count + n, 0, 4 * row_bytes)
        chunk = 0
        while chunk < row_bytes:
            byte = min(chunk, row_bytes - _CHUNK)
            if bits == 4 and chunk + 4 * _CHUNK <= row_bytes:
                _interleave_4_64(codes, first + n, byte, packed, n // 4, byte, row_bytes)
                chunk += 3 * _CHUNK
            elif bits == 4:
                _interleave_4(codes, first + n, byte, packed, n // 4, byte, row_bytes)
            elif bits == 2:
                _interleave_2(codes, first + n, byte, packed, n // 4, byte, row_bytes)
            else:
                _interleave_8(codes, first + n, byte, raw, 0, byte, 0)
            chunk += _CHUNK
        if bits == 3:
            _join_planes(raw, packed[n // 4 : n // 4 + 1], channels)
    for n in range(whole, count):
        shift = np.uint32(8 * (n % 4))
        for c in range(channels):
            kept = packed[n // 4, c] & ((np.uint32(1) << shift) - np.uint32(1))
            packed[n // 4, c] = kept | (np.uint32(_code_of(codes[first + n], c, channels, bits)) << shift)


@njit(_nrt=False)
def _ask_for(codes: U1, first: int, byte: int, count: int) -> None:
    """Has bytes from a row on brought into the caches while other work is done: a few at a time, or they wait."""
    for at in range(byte, byte + count, _LINE):
        prefetch(codes, first, at)


@njit(_nrt=False)
def _fits_words(channels: int, bits: int) -> bool:
    """Whether every plane of a row begins at a word of its own."""
    if bits == 4:
        return channels % 8 == 0
    if bits == 2:
        return channels % 16 == 0
    return channels % 32 == 0


@njit(_nrt=False)
def _code_of(row: U1, channel: int, channels: int, bits: int) -> int:
    """One code of a stored row."""
    if bits == 4:
        half = channels // 2
        return (row[channel % half] >> (4 * (channel // half))) & 15  # type: ignore[no-any-return]
    fourth, eighth = channels // 4, channels // 8
    low = (row[channel % fourth] >> (2 * (channel // fourth))) & 3
    if bits == 2:
        return low  # type: ignore[no-any-return]
    return low | (((row[fourth + channel % eighth] >> (channel // eighth)) & 1) << 2)  # type: ignore[no-any-return]


@njit(_nrt=False)
def _word_of(row: U1, channel: int, channels: int, bits: int) -> int:
    """Four codes of a stored row."""
    word = 0
    for i in range(4):
        word |= _code_of(row, channel + i, channels, bits) << (8 * i)
    return word


@njit(_nrt=False)
def _join_planes(raw: U4, packed: U4, count: int) -> None:
    """The first `count` of `packed`, words of four codes of 3 bits, from two planes of 3/8 as many words."""
    source, target = raw.reshape(raw.size), packed.reshape(packed.size)
    fourth, eighth = count // 4, count // 8
    for plane in range(4):
        part, shift = target[plane * fourth : (plane + 1) * fourth], np.uint32(2 * plane)
        for i in range(fourth):
            part[i] = (source[i] >> shift) & np.uint32(0x03030303)
    for plane in range(8):
        part, shift = target[plane * eighth : (plane + 1) * eighth], np.uint32(plane)
        for i in range(eighth):
            part[i] |= ((source[fourth + i] >> shift) & np.uint32(0x01010101)) << np.uint32(2)
