"""Host kernels of the dense query-table search, each beside its eager reference.

Both read a shared table of the context's keys and a session-private one of appended keys; key ids count through them.

Shape legend: H KV heads, T query positions, G group heads, J table rows read per query, S stored table rows
(subspaces x centroids), N keys of the context, A columns of the appended table, M ranked keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.compiled.launch import launch, njit, on_host, spread

# Keys per tile: runs of table rows long enough to be prefetched, sums that stay in the second-level cache.
TILE = 16_384
_PIECE = 4096
_TILES_PER_TASK = 1
_WAVE_BYTES = 4 * 2**20  # exponentials held at a time: more would travel to memory and back
_LOG2E = np.float32(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class TableReads:
    """What a search reads: for every query J weighted rows of the tables, columns first..end-1.

    tables_HSN, appended_HSA: int8 with unit stride along keys; column a of the second is key N + a.
    rows_HTGJ: int32 rows. weights_HTGJ: float32.
    """

    tables_HSN: Tensor
    appended_HSA: Tensor
    rows_HTGJ: Tensor
    weights_HTGJ: Tensor
    first: int
    end: int

    def arrays(self) -> tuple[NDArray[np.int8], NDArray[np.int8], NDArray[np.int32], NDArray[np.float32]]:
        """The tensors as the compiled kernels take them."""
        return (
            self.tables_HSN.numpy(),
            self.appended_HSA.numpy(),
            self.rows_HTGJ.numpy(),
            self.weights_HTGJ.numpy(),
        )


def sum_rows(reads: TableReads) -> Tensor:
    """[H, T, G, M] float32: sum over j of weights[..., j] * row rows[..., j], for keys first..end-1."""
    if not on_host(reads.tables_HSN):
        return sum_rows_reference(reads)
    out = torch.empty(*reads.rows_HTGJ.shape[:3], reads.end - reads.first, device="cpu")
    if out.numel() > 0:
        launch(_sum_rows, *reads.arrays(), reads.first, out.numpy())
    return out


def sum_rows_reference(reads: TableReads) -> Tensor:
    """The same by adding up gathered rows, one of every query at a time, on any device."""
    count = reads.tables_HSN.shape[2]
    shape = (*reads.rows_HTGJ.shape[:3], reads.end - reads.first)
    out = torch.zeros(shape, device=reads.tables_HSN.device)
    heads = torch.arange(shape[0], device=out.device)[:, None, None]
    border = min(max(count - reads.first, 0), shape[3])
    shared = reads.tables_HSN[..., reads.first : reads.first + border]
    begin = max(reads.first - count, 0)
    own = reads.appended_HSA[..., begin : begin + shape[3] - border]
    for rows_HTG, weights_HTG in zip(
        reads.rows_HTGJ.long().unbind(3), reads.weights_HTGJ.unbind(3), strict=True
    ):
        for table, part in ((shared, out[..., :border]), (own, out[..., border:])):
            part.addcmul_(table[heads, rows_HTG].float(), weights_HTG[..., None])
    return out


def softmax_sum_rows(reads: TableReads) -> Tensor:
    """[H, T, M] float32: `sum_rows`, softmaxed over keys and summed over the group.

    exp is a cubic polynomial per octave (relative error below 2e-4), enough for a ranking. Sums are exponentiated while
    in cache, relative to their tile's maximum, and rescaled in a second pass, a few query positions at a time.
    """
    if not on_host(reads.tables_HSN):
        return softmax_sum_rows_reference(reads)
    heads, positions, group, _ = reads.rows_HTGJ.shape
    columns = reads.end - reads.first
    out = torch.empty(heads, positions, columns, device="cpu")
    if out.numel() > 0:
        wave = min(heads * positions, max(1, _WAVE_BYTES // (group * columns * 4)))
        tiles = -(-columns // TILE)
        launch(
            _softmax_sum_rows,
            *reads.arrays(),
            reads.first,
            out.new_empty(wave, group, columns).numpy(),
            out.new_empty(wave, group, tiles).numpy(),
            out.new_empty(wave, group, tiles).numpy(),
            out.numpy(),
            work=0.1 * reads.rows_HTGJ.numel() * columns,
        )
    return out


def softmax_sum_rows_reference(reads: TableReads) -> Tensor:
    """The same by torch's softmax, on any device."""
    return sum_rows_reference(reads).softmax(-1).sum(2)


@njit(fastmath={"reassoc", "contract"})
def _add_eight(
    table: NDArray[np.int8],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    afresh: bool,
    acc: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Adds eight weighted rows of a table as wide as acc, in one pass; afresh: to nothing, whatever acc holds."""
    row0, row1, row2, row3 = table[rows[0]], table[rows[1]], table[rows[2]], table[rows[3]]
    row4, row5, row6, row7 = table[rows[4]], table[rows[5]], table[rows[6]], table[rows[7]]
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    w4, w5, w6, w7 = weights[4], weights[5], weights[6], weights[7]
    if afresh:
        for i in range(acc.shape[0]):
            acc[i] = (
                w0 * np.float32(row0[i])
                + w1 * np.float32(row1[i])
                + w2 * np.float32(row2[i])
                + w3 * np.float32(row3[i])
            ) + (
                w4 * np.float32(row4[i])
                + w5 * np.float32(row5[i])
                + w6 * np.float32(row6[i])
                + w7 * np.float32(row7[i])
            )
        return
    for i in range(acc.shape[0]):
        acc[i] += (
            w0 * np.float32(row0[i])
            + w1 * np.float32(row1[i])
            + w2 * np.float32(row2[i])
            + w3 * np.float32(row3[i])
        ) + (
            w4 * np.float32(row4[i])
            + w5 * np.float32(row5[i])
            + w6 * np.float32(row6[i])
            + w7 * np.float32(row7[i])
        )


@njit()
def add_rows(
    table: NDArray[np.int8],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    low: int,
    acc: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """acc[i] = sum over j of weights[j] * table[rows[j], low + i]."""
    # Piece by piece, so that sums stay in the first-level cache from one pass to the next.
    for begin in range(0, acc.shape[0], _PIECE):
        _add_piece(table, rows, weights, low + begin, acc[begin : begin + _PIECE])


@njit(fastmath={"reassoc", "contract"})
def _add_piece(
    table: NDArray[np.int8],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    low: int,
    acc: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """`add_rows` for a few keys."""
    count = acc.shape[0]
    picks = rows.shape[0]
    pick = 0
    if picks < 8:
        acc[:] = np.float32(0)
    while pick + 8 <= picks:
        part = table[:, low : low + count]
        _add_eight(part, rows[pick : pick + 8], weights[pick : pick + 8], pick == 0, acc)
        pick += 8
    while pick + 4 <= picks:
        row0 = table[rows[pick], low : low + count]
        row1 = table[rows[pick + 1], low : low + count]
        row2 = table[rows[pick + 2], low : low + count]
        row3 = table[rows[pick + 3], low : low + count]
        w0, w1, w2, w3 = weights[pick], weights[pick + 1], weights[pick + 2], weights[pick + 3]
        for i in range(count):
            acc[i] += (
                w0 * np.float32(row0[i])
                + w1 * np.float32(row1[i])
                + w2 * np.float32(row2[i])
                + w3 * np.float32(row3[i])
            )
        pick += 4
    while pick < picks:
        row = table[rows[pick], low : low + count]
        w = weights[pick]
        for i in range(count):
            acc[i] += w * np.float32(row[i])
        pick += 1


@njit()
def _add_tile(
    table: NDArray[np.int8],
    appended: NDArray[np.int8],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    low: int,
    acc: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """`add_rows` over a tile that may lie in the context's table, in the appended one, or across their border."""
    keys = table.shape[1]
    inside = min(max(keys - low, 0), acc.shape[0])
    if inside > 0:
        add_rows(table, rows, weights, low, acc[:inside])
    if inside < acc.shape[0]:
        add_rows(appended, rows, weights, low + inside - keys, acc[inside:])


@njit()
def _sum_span(
    task: int,
    tables: NDArray[np.int8],
    appended: NDArray[np.int8],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    first: int,
    out: NDArray[np.float32],
    spans: int,
    positions: int,
    group: int,
    span: int,
    columns: int,
) -> None:  # pragma: no cover - compiled
    query, part = task // spans, task % spans
    h, t, g = query // (positions * group), (query // group) % positions, query % group
    for low in range(part * span, min((part + 1) * span, columns), TILE):
        acc = out[h, t, g, low : min(low + TILE, columns)]
        _add_tile(tables[h], appended[h], rows[h, t, g], weights[h, t, g], first + low, acc)


@njit("i1x3 i1x3 i4x4 f4x4 i8 f4x4")
def _sum_rows(
    tables: NDArray[np.int8],
    appended: NDArray[np.int8],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    first: int,
    out: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    heads, positions, group, columns = out.shape
    span = TILE * _TILES_PER_TASK
    spans = (columns + span - 1) // span
    spread(
        _sum_span,
        heads * positions * group * spans,
        (tables, appended, rows, weights, first, out, spans, positions, group, span, columns),
    )


@njit(fastmath={"reassoc", "contract"})
def _exp_tile(
    x: NDArray[np.float32], peak: np.float32, octave: NDArray[np.int32], factor: NDArray[np.float32]
) -> float:  # pragma: no cover - compiled
    """Overwrites x by exp(x - peak), x <= peak, and returns its sum. `factor` is a float view of `octave`."""
    for i in range(x.shape[0]):
        y = (x[i] - peak) * _LOG2E
        y = y if y > np.float32(-126.0) else np.float32(-126.0)
        whole = np.floor(y)
        rest = y - whole
        octave[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        # 2**rest on [0, 1): minimax cubic
        x[i] = np.float32(0.99992522) + rest * (
            np.float32(0.69583354) + rest * (np.float32(0.22606716) + rest * np.float32(0.078024523))
        )
    total = np.float32(0)
    for i in range(x.shape[0]):
        x[i] *= factor[i]
        total += x[i]
    return float(total)


@njit()
def _peak(x: NDArray[np.float32], scratch: NDArray[np.float32]) -> float:  # pragma: no cover - compiled
    """Maximum of a tile, by folding halves onto each other: unlike a running maximum, a fold is vectorised."""
    count = x.shape[0]
    source = x
    while count >= 32:
        half = count // 2
        for i in range(half):
            scratch[i] = source[i] if source[i] > source[half + i] else source[half + i]
        if count % 2:
            scratch[0] = max(scratch[0], source[count - 1])
        source = scratch
        count = half
    peak = source[0]
    for i in range(count):
        peak = max(peak, source[i])
    return float(peak)


@njit()
def exponentiate_tile(
    x: NDArray[np.float32], octave: NDArray[np.int32], scratch: NDArray[np.float32]
) -> tuple[np.float32, np.float32]:  # pragma: no cover - compiled
    """Overwrites x by exp(x - its maximum); the maximum, and the sum. octave: [TILE], scratch: [TILE / 2]."""
    peak = np.float32(_peak(x, scratch))
    octave = octave[: x.shape[0]]
    return peak, np.float32(_exp_tile(x, peak, octave, octave.view(np.float32)))


@njit(fastmath={"reassoc", "contract"})
def combine_tile(
    exponentials: NDArray[np.float32], shares: NDArray[np.float32], out: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    """out[i] = sum over g of shares[g] * exponentials[g, i]."""
    out[:] = np.float32(0)
    for g in range(shares.shape[0]):
        row, share = exponentials[g], shares[g]
        for i in range(out.shape[0]):
            out[i] += share * row[i]


@njit()
def _exponentiate_span(
    task: int,
    tables: NDArray[np.int8],
    appended: NDArray[np.int8],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    first: int,
    exponentials: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
    spans: int,
    positions: int,
    start: int,
) -> None:  # pragma: no cover - compiled
    """Sums of some tiles of one position, exponentiated, with every tile's peak and total."""
    slot, part = task // spans, task % spans
    h, t = (start + slot) // positions, (start + slot) % positions
    columns = exponentials.shape[2]
    octave = np.empty(TILE, np.int32)
    scratch = np.empty(TILE // 2, np.float32)
    for tile in range(part * _TILES_PER_TASK, min((part + 1) * _TILES_PER_TASK, peaks.shape[2])):
        low = tile * TILE
        for g in range(exponentials.shape[1]):
            acc = exponentials[slot, g, low : min(low + TILE, columns)]
            _add_tile(tables[h], appended[h], rows[h, t, g], weights[h, t, g], first + low, acc)
            peaks[slot, g, tile], totals[slot, g, tile] = exponentiate_tile(acc, octave, scratch)


@njit()
def _rescale_slot(
    slot: int, peaks: NDArray[np.float32], totals: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    """Overwrites the peaks of one position's tiles by the factors that turn their exponentials into softmax."""
    _, group, tiles = peaks.shape
    for g in range(group):
        highest = peaks[slot, g, 0]
        for tile in range(1, tiles):
            highest = max(highest, peaks[slot, g, tile])
        mass = 0.0
        for tile in range(tiles):
            peaks[slot, g, tile] = np.exp(peaks[slot, g, tile] - highest)
            mass += totals[slot, g, tile] * peaks[slot, g, tile]
        for tile in range(tiles):
            peaks[slot, g, tile] /= mass


@njit()
def _combine_span(
    task: int,
    exponentials: NDArray[np.float32],
    factors: NDArray[np.float32],
    out: NDArray[np.float32],
    spans: int,
    positions: int,
    start: int,
) -> None:  # pragma: no cover - compiled
    """Exponentials of some tiles of one position, rescaled and summed over the group."""
    slot, part = task // spans, task % spans
    h, t = (start + slot) // positions, (start + slot) % positions
    shares = np.empty(factors.shape[1], np.float32)
    for tile in range(part * _TILES_PER_TASK, min((part + 1) * _TILES_PER_TASK, factors.shape[2])):
        for g in range(factors.shape[1]):
            shares[g] = factors[slot, g, tile]
        low = tile * TILE
        high = min(low + TILE, out.shape[2])
        combine_tile(exponentials[slot, :, low:high], shares, out[h, t, low:high])


@njit("i1x3 i1x3 i4x4 f4x4 i8 f4x3 f4x3 f4x3 f4x3")
def _softmax_sum_rows(
    tables: NDArray[np.int8],
    appended: NDArray[np.int8],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    first: int,
    exponentials: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    positions = out.shape[1]
    queries = out.shape[0] * positions
    wave = exponentials.shape[0]
    spans = (peaks.shape[2] + _TILES_PER_TASK - 1) // _TILES_PER_TASK
    for start in range(0, queries, wave):
        tasks = min(wave, queries - start) * spans
        spread(
            _exponentiate_span,
            tasks,
            (tables, appended, rows, weights, first, exponentials, peaks, totals, spans, positions, start),
        )
        spread(_rescale_slot, min(wave, queries - start), (peaks, totals))
        spread(_combine_span, tasks, (exponentials, peaks, out, spans, positions, start))
