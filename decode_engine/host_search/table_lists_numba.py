"""From a query to a list of the best keys by dense query tables, tile by tile, without sorting what is not kept.

Parts of a search that several threads share (`shared_search_numba`); one after another they give what the indexes'
`search_numba` and `top_k_numba` give (CSAttention section 3.3). What makes the list exact without another pass over all
scores: a tile's scores are folded into blocks, and only the blocks' maxima go into a histogram. If `keep` blocks have a
maximum of at least x, then so many keys have such a score, and the keys below x are not needed. About 1.2 times `keep`
keys are left of each list, and of these the best are found exactly; ties go to lower ids.

Shape legend: L searched queries of a KV head (1 when pooled, else one for each head of the group), m subspaces, C
centroids, W dimensions of a subspace, D head dim, S table rows, N keys of the context, P tiles of a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from index_store.compiled.launch import njit
from index_store.indexes.query_tables.search_numba import TILE, add_rows, combine_tile, exponentiate_tile
from index_store.selection.top_k_numba import keep_best, sortable

BINS = 1024
"""Of a histogram. Few enough to be cleared and merged for every tile, and a few per cent of the keys that are kept."""
_BLOCKS_PER_KEPT = 3
_MAX_FOLD = 64
_BINS_READ = 32
_LOG_SHIFT = np.uint32(18)
_LOG_FIRST = (127 - 29) << 5
"""Weights between 2^-29 and 2^3 fall into bins of a 32nd of an octave: the upper 14 bits of their float32."""
BITS = 64
"""Numbers that are compared at once, to bits of a word: what compilers do not make of a loop."""

_Generated = tuple[Any, Callable[..., Any]]


@njit(cache=True, fastmath={"reassoc", "contract"})
def pick_rows(
    q_GD: NDArray[np.float32],
    scale: np.float32,
    centroids_SW: NDArray[np.float32],
    scales_M: NDArray[np.float32],
    strided: bool,
    begin: int,
    end: int,
    rows_LM: NDArray[np.int32],
    weights_LM: NDArray[np.float32],
) -> None:
    """Sets the table rows that queries read of subspaces begin..end-1, and their weights in units of stored integers.

    q_GD: unscaled. centroids_SW: row b * C + c is centroid c of subspace b, of unit length.
    """
    group, dim = q_GD.shape
    queries, subspaces = rows_LM.shape
    width = centroids_SW.shape[1]
    centroids = centroids_SW.shape[0] // subspaces
    query = np.empty(dim, np.float32)
    slice_W = np.empty(width, np.float32)
    for number in range(queries):
        if queries == group:
            for i in range(dim):
                query[i] = q_GD[number, i] * scale
        else:
            for i in range(dim):
                total = q_GD[0, i] * scale
                for g in range(1, group):
                    total += q_GD[g, i] * scale
                query[i] = total / np.float32(group)
        for b in range(begin, end):
            for w in range(width):
                slice_W[w] = query[b + w * subspaces] if strided else query[b * width + w]
            best, highest = 0, np.float32(-np.inf)
            for c in range(centroids):
                product = np.float32(0)
                for w in range(width):
                    product += slice_W[w] * centroids_SW[b * centroids + c, w]
                if product > highest:
                    best, highest = c, product
            rows_LM[number, b] = b * centroids + best
            weights_LM[number, b] = max(highest, np.float32(0)) * scales_M[b]


@njit(cache=True)
def reach_of(weights_LM: NDArray[np.float32]) -> np.float32:
    """No score of a list is further from 0, for rows of such weights; 0 for sums of several queries' softmaxes."""
    if weights_LM.shape[0] > 1:
        return np.float32(0)
    total = np.float32(1e-30)  # a query of zeros reaches nothing
    for b in range(weights_LM.shape[1]):
        total += np.float32(127) * weights_LM[0, b]
    return total


@njit(cache=True)
def score_tile(
    table_SN: NDArray[np.int8],
    rows_LM: NDArray[np.int32],
    weights_LM: NDArray[np.float32],
    low: int,
    scores_LX: NDArray[np.float32],
) -> None:
    """scores_LX: set to the sums of every query's rows, for keys low, low + 1, ..."""
    for number in range(rows_LM.shape[0]):
        add_rows(table_SN, rows_LM[number], weights_LM[number], low, scores_LX[number])


@njit(cache=True)
def exponentiate(
    scores_LX: NDArray[np.float32],
    peaks_L: NDArray[np.float32],
    totals_L: NDArray[np.float32],
    octaves_X: NDArray[np.int32],
    scratch_X: NDArray[np.float32],
) -> None:
    """Overwrites a tile's scores by exp(score - peak), with every query's own peak, and notes peaks and sums.

    octaves_X, scratch_X: scratch, [TILE].
    """
    for number in range(scores_LX.shape[0]):
        peaks_L[number], totals_L[number] = exponentiate_tile(scores_LX[number], octaves_X, scratch_X)


@njit(cache=True)
def combine(
    exponentials_LX: NDArray[np.float32],
    tile: int,
    peaks_PL: NDArray[np.float32],
    totals_PL: NDArray[np.float32],
    out_X: NDArray[np.float32],
) -> None:
    """out_X: set to the sum over queries of a tile's softmaxes, which all tiles' peaks and totals make."""
    tiles, queries = peaks_PL.shape
    shares_L = np.empty(queries, np.float32)
    for number in range(queries):
        highest = peaks_PL[0, number]
        for other in range(1, tiles):
            highest = max(highest, peaks_PL[other, number])
        mass = 0.0
        for other in range(tiles):
            mass += totals_PL[other, number] * np.exp(peaks_PL[other, number] - highest)
        shares_L[number] = np.exp(peaks_PL[tile, number] - highest) / mass
    combine_tile(exponentials_LX, shares_L, out_X)


@njit(cache=True)
def fold_of(keys: int, keep: int) -> int:
    """Keys of a block, a power of two, so that there are a few blocks for every key that is kept."""
    fold = 1
    while 2 * fold <= min(_MAX_FOLD, keys // (_BLOCKS_PER_KEPT * keep)):
        fold *= 2
    return fold


@njit(cache=True)
def _fold(scores_X: NDArray[np.float32], fold: int, scratch_X: NDArray[np.float32]) -> NDArray[np.float32]:
    """The maxima of blocks of `fold` scores or fewer.

    Which scores make a block does not matter, so each pass lays parts of what is left onto each other: four, or two
    where the number does not go. scratch_X: as long, for what passes leave. Each writes elsewhere than it reads, or the
    loops are not vectorised.
    """
    source, used = scores_X, 0
    while fold > 1:
        keys = source.shape[0]
        if fold >= 4 and keys % 4 == 0:
            part = keys // 4
            out = scratch_X[used : used + part]
            for j in range(part):
                one = source[j] if source[j] > source[part + j] else source[part + j]
                other = (
                    source[2 * part + j]
                    if source[2 * part + j] > source[3 * part + j]
                    else source[3 * part + j]
                )
                out[j] = one if one > other else other
            fold //= 4
        else:
            part = (keys + 1) // 2
            out = scratch_X[used : used + part]
            for j in range(keys - part):
                out[j] = source[j] if source[j] > source[part + j] else source[part + j]
            if 2 * part > keys:
                out[part - 1] = source[part - 1]
            fold //= 2
        source, used = out, used + part
    return source


@njit(cache=True)
def count_blocks(
    scores_X: NDArray[np.float32],
    fold: int,
    reach: np.float32,
    bins_X: NDArray[np.int32],
    histogram: NDArray[np.int32],
) -> None:
    """Counts the maxima of a tile's blocks, each of `fold` keys or fewer, by bin.

    fold: a power of two. reach: no score is further from 0; 0 for weights, which are counted by their logarithms.
    bins_X: scratch, [2 * TILE].
    """
    maxima = _fold(scores_X, fold, bins_X[TILE:].view(np.float32))
    blocks = maxima.shape[0]
    if reach > 0:
        factor = np.float32(BINS) / (np.float32(2) * reach)
        for j in range(blocks):
            bins_X[j] = np.int32((maxima[j] + reach) * factor)
    else:
        bits = maxima.view(np.int32)
        for j in range(blocks):
            bins_X[j] = (bits[j] >> np.int32(_LOG_SHIFT)) - np.int32(_LOG_FIRST)
    for j in range(blocks):
        bins_X[j] = min(max(bins_X[j], np.int32(0)), np.int32(BINS - 1))
    histogram[:] = 0
    for j in range(blocks):
        histogram[bins_X[j]] += 1


@njit(cache=True)
def lower_bound(histograms_PB: NDArray[np.int32], keep: int, reach: np.float32) -> np.float32:
    """A score that at least `keep` keys reach; -inf where the histograms name none.

    Histograms lie in other cores' caches, so only the upper bins are read, as far down as it takes.
    """
    counts = np.empty(_BINS_READ, np.int32)
    above, border = 0, BINS
    while border > 0 and above < keep:
        border -= _BINS_READ
        total = 0
        for i in range(_BINS_READ):
            counts[i] = 0
            for other in range(histograms_PB.shape[0]):
                counts[i] += histograms_PB[other, border + i]
            total += counts[i]
        if above + total < keep:
            above += total
            continue
        place = _BINS_READ
        while above < keep:
            place -= 1
            above += counts[place]
        border += place
    if border == 0:
        return np.float32(-np.inf)
    if reach > 0:
        # A hundredth of a bin lower, since numbers were rounded on their way into bins.
        return np.float32((border - 0.01) * (2.0 * reach / BINS) - reach)
    bits = np.empty(1, np.uint32)
    bits[0] = np.uint32(border + _LOG_FIRST) << _LOG_SHIFT
    return bits.view(np.float32)[0]  # type: ignore[no-any-return]


@intrinsic
def reaching_bits(typing: Any, address: Any, bound: Any) -> _Generated:
    """reaching_bits(address, bound) -> uint64: bit i says whether the i-th of 64 float32 is at least the bound."""

    number, floats = ir.IntType(32), ir.VectorType(ir.FloatType(), BITS)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = builder.load(builder.inttoptr(values[0], floats.as_pointer()), align=4)
        nothing = ir.Constant(floats, ir.Undefined)
        first = builder.insert_element(nothing, values[1], ir.Constant(number, 0))
        everywhere = ir.Constant(ir.VectorType(number, BITS), [0] * BITS)
        bounds = builder.shuffle_vector(first, nothing, everywhere)
        return builder.bitcast(builder.fcmp_ordered(">=", numbers, bounds), ir.IntType(BITS))

    return types.uint64(types.int64, types.float32), generate


@intrinsic
def lowest_bit(typing: Any, word: Any) -> _Generated:
    """lowest_bit(word) -> uint64: the place of the lowest bit that is set; 64 when none is."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@njit(cache=True)
def list_reaching(
    scores_X: NDArray[np.float32],
    bound: np.float32,
    first_id: int,
    words_X: NDArray[np.uint64],
    ids_X: NDArray[np.int32],
    listed_X: NDArray[np.float32],
) -> int:
    """Lists the keys of a tile whose scores reach the bound, ascending, with their scores; how many they are.

    words_X: scratch, [TILE / 32 + 2]. ids_X, listed_X: of the tile's size.
    """
    keys = scores_X.shape[0]
    whole = keys // BITS
    bits_X, begins_X = words_X[: whole + 1], words_X[whole + 1 : 2 * whole + 2]
    # Both loops write first and advance on a hit: a mispredicted branch costs more.
    hit_words = 0
    for word in range(whole):
        bits = reaching_bits(scores_X.ctypes.data + 4 * BITS * word, bound)
        bits_X[hit_words] = bits
        begins_X[hit_words] = np.uint64(BITS * word)
        hit_words += int(bits != np.uint64(0))
    bits_X[hit_words] = np.uint64(0)
    found = word = 0
    bits = bits_X[0]
    while word < hit_words:
        hit = np.int64(begins_X[word] + lowest_bit(bits))
        ids_X[found] = first_id + hit
        listed_X[found] = scores_X[hit]
        found += 1
        bits &= bits - np.uint64(1)
        word += int(bits == np.uint64(0))
        bits = bits_X[word] if bits == np.uint64(0) else bits
    for key in range(BITS * whole, keys):
        ids_X[found] = first_id + key
        listed_X[found] = scores_X[key]
        found += int(scores_X[key] >= bound)
    return found


@njit(cache=True)
def best_listed(
    ids_X: NDArray[np.int32],
    scores_X: NDArray[np.float32],
    counts_P: NDArray[np.int64],
    keep: int,
    out: NDArray[np.int32],
) -> int:
    """The ids with the `keep` highest scores, in their order; how many they are.

    Tile p lists counts_P[p] ids and scores from its first key on, p * TILE.
    """
    total = 0
    for tile in range(counts_P.shape[0]):
        total += counts_P[tile]
    listed = np.empty(total, np.int32)
    keys = np.empty(total, np.uint32)
    place = 0
    for tile in range(counts_P.shape[0]):
        first, count = tile * TILE, counts_P[tile]
        bits = scores_X[first : first + count].view(np.uint32)
        for j in range(count):
            listed[place + j] = ids_X[first + j]
            keys[place + j] = sortable(bits[j])
        place += count
    keep = min(keep, out.shape[0])
    kept = keep_best(listed, keys, keep) if keep > 0 else 0
    for j in range(kept):
        out[j] = listed[j]
    return kept
