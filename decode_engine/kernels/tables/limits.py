"""From scores to bins, from a sample's histogram to the limit that about `keep` keys pass, and back to scores.

What is counted and what is kept agree to the last bit: keys of one score, which may be all, are in one bin for both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.border import draws_below
from decode_engine.kernels.tables import sizes as table_sizes
from decode_engine.kernels.tables.device_functions import searched

BINS = tl.constexpr(table_sizes.BINS)
_PART = tl.constexpr(table_sizes.BINS // 4)  # the numbers of keys of four parts fit into 64 bits
_PART_BITS = tl.constexpr((table_sizes.BINS // 4).bit_length() - 1)
PAIRS = tl.constexpr(table_sizes.BINS // 2)
LIMIT_WORDS = tl.constexpr(table_sizes.LIMIT_WORDS)
_BIN_SHIFT = tl.constexpr(table_sizes.BIN_SHIFT)
_LEAST_BIN = tl.constexpr(table_sizes.LEAST_BIN)
_ALL_SUMS = tl.constexpr(-(2**30))
_NO_SUM = tl.constexpr(2**30)


@triton.jit
def octave_bin(weight: tl.tensor) -> tl.tensor:
    """The bin of a summed weight: the upper bits of the number, 16 bins an octave; below 0 what is too small."""
    return (weight.to(tl.int32, bitcast=True) >> _BIN_SHIFT) - _LEAST_BIN


@triton.jit
def octave_cut(bin: tl.tensor) -> tl.tensor:
    """The least weight of a bin; bin 0 holds all small ones, and the last all large ones."""
    least = ((bin + _LEAST_BIN) << _BIN_SHIFT).to(tl.float32, bitcast=True)
    return tl.where(bin >= BINS, float("inf"), tl.where(bin > 0, least, -1.0))


@triton.jit
def linear_bin(sums: tl.tensor, reach: tl.tensor) -> tl.tensor:
    """The bin of a sum; bins cover everything from -reach to reach, which are below 2^24."""
    return ((sums.to(tl.float32) + reach) * (BINS / (2.0 * reach))).to(tl.int32)


@triton.jit
def linear_cut(bin: tl.tensor, reach: tl.tensor) -> tl.tensor:
    """The least sum of a bin: also where rounding moves it by one, since many keys may have just that sum.

    Both corrections are computed side by side, since all keys of a tile wait for them: never do both apply.
    """
    least = tl.ceil(bin.to(tl.float32) * (reach * (2.0 / BINS)) - reach).to(tl.int32)
    too_high = linear_bin(least - 1, reach) >= bin
    too_low = linear_bin(least, reach) < bin
    least += too_low.to(tl.int32) - too_high.to(tl.int32)
    return tl.where(bin >= BINS, _NO_SUM, tl.where(bin > 0, least, _ALL_SUMS))


@triton.jit
def bins_of_keys(
    sequence: tl.tensor,
    word: tl.tensor,
    mask: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    b2: tl.tensor,
    b3: tl.tensor,
    WORDS: tl.constexpr,
) -> tl.tensor:
    """The bins of all keys of WORDS words, by the bins of every word's four; -1 for those that are not searched."""
    b0 = bin_or_none(b0, searched(word, 0, sequence) & mask)
    b1 = bin_or_none(b1, searched(word, 1, sequence) & mask)
    b2 = bin_or_none(b2, searched(word, 2, sequence) & mask)
    b3 = bin_or_none(b3, searched(word, 3, sequence) & mask)
    return tl.reshape(tl.join(tl.join(b0, b1), tl.join(b2, b3)), [4 * WORDS])


@triton.jit
def store_counts(sequence: tl.tensor, histogram_ptr: tl.tensor, bins: tl.tensor, MOST: tl.constexpr) -> None:
    """Writes how many of a program's keys are in each bin, down to where the border cannot be any more.

    MOST: keys that all programs of the head sample together, at most. The border is above a part of the bins if in the
    parts over it this program alone finds as many keys as are wanted of all of them: then those of the part are counted
    as one number, in its first bin. A histogram takes time for its bins, and for their square where warps add theirs
    up. With a quarter of the bins at a time, of which most often two are counted, that is an eighth of the square.
    """
    _, _, span, keep, _ = sequence
    wanted = keep.to(tl.float32) * MOST / tl.maximum(span, 1).to(tl.float32) + 1.0
    part_of = bins >> _PART_BITS
    one = (bins >= 0).to(tl.int64)
    tally = tl.sum(one << (tl.maximum(part_of, 0) * 16), 0)
    n = tl.arange(0, _PART)
    above = 0
    for turn in range(BINS // _PART):
        part = BINS // _PART - 1 - turn
        count = (tally >> (16 * part)).to(tl.int32) & 0xFFFF
        part_ptr = histogram_ptr + part * _PART + n
        if (count > 0) & (above < wanted):
            tl.store(part_ptr, tl.histogram(bins & (_PART - 1), _PART, mask=part_of == part))
        else:
            tl.store(part_ptr, tl.where(n == 0, count, 0))
        above += count


@triton.jit
def bin_or_none(bin: tl.tensor, there: tl.tensor) -> tl.tensor:
    """The bin where a key is counted; -1 for a key that is not there."""
    return tl.where(there, tl.minimum(tl.maximum(bin, 0), BINS - 1), -1)


@triton.jit
def load_histograms(histograms_ptr: tl.tensor, bh: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """The histograms of a head's S sampling programs, S times [BINS / 2], past the first-level cache: two bins in a
    word.

    One by one, so that a thread holds the same bins of all, and adds them up without other warps.
    """
    places = histograms_ptr.to(tl.pointer_type(tl.int32)) + bh * S * PAIRS + tl.arange(0, PAIRS)
    loaded = ()
    for s in tl.static_range(S):
        loaded += (tl.load(places + s * PAIRS, cache_modifier=".cg"),)  # type: ignore[assignment]
    return loaded


@triton.jit
def sum_histograms(loaded: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """The sum of what `load_histograms` returns, two bins in a word.

    It has room in 16 bits, too: a sample has less than 2^16 keys (MAX_SAMPLERS).
    """
    total = loaded[0]
    for s in tl.static_range(1, S):
        total += loaded[s]
    return total


@triton.jit
def threshold(sequence: tl.tensor, counts: tl.tensor) -> tl.tensor:
    """A limit that about `keep` keys pass: the border bin, above which all are kept, and below which number a key of
    that bin has to draw to be kept (`border`); int32.

    It is read from the histogram of a sample of the keys, two bins in a word. What is needed of the pair of bins with
    the border comes in one sum over all pairs: every other sum would be a wait of all warps more.
    """
    _, _, span, keep, _ = sequence
    pairs = tl.arange(0, PAIRS)
    of_pair = (counts & 0xFFFF) + ((counts >> 16) & 0xFFFF)
    total = tl.sum(of_pair, 0)
    at_least = total - tl.cumsum(of_pair, 0) + of_pair
    wanted = keep * total.to(tl.float32) / tl.maximum(span, 1).to(tl.float32)
    over = (at_least - of_pair).to(tl.float32)
    here = (at_least.to(tl.float32) >= wanted) & ((over < wanted) | (pairs == PAIRS - 1))
    place = ((pairs << 16) + at_least).to(tl.int64) << 32
    found = tl.sum(tl.where(here, place | (counts.to(tl.int64) & 0xFFFFFFFF), 0), 0)
    lower, upper = found.to(tl.int32) & 0xFFFF, (found >> 16).to(tl.int32) & 0xFFFF
    reaching, pair = (found >> 32).to(tl.int32) & 0xFFFF, (found >> 48).to(tl.int32)
    in_upper = (reaching - lower).to(tl.float32) >= wanted
    inside = tl.where(in_upper, upper, lower)
    above = reaching - lower - tl.where(in_upper, upper, 0)
    draws = draws_below((wanted - above.to(tl.float32)) / tl.maximum(inside, 1).to(tl.float32))
    return tl.where(keep >= span, -1, 2 * pair + in_upper.to(tl.int32)), draws


@triton.jit
def store_limit(limit_ptr: tl.tensor, least: tl.tensor, above: tl.tensor, draws: tl.tensor) -> None:
    """Leaves a limit for those that compare with it: the scores from which keys are kept if they draw less than
    `draws`, and from which all are."""
    tl.store(limit_ptr, least.to(tl.int32, bitcast=True))
    tl.store(limit_ptr + 1, above.to(tl.int32, bitcast=True))
    tl.store(limit_ptr + 2, draws)


@triton.jit
def load_limit(limit_ptr: tl.tensor) -> tl.tensor:
    """What `store_limit` left, scores as the bits of their type."""
    return tl.load(limit_ptr), tl.load(limit_ptr + 1), tl.load(limit_ptr + 2)
