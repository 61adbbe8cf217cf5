"""Host kernels of searches in query tables, dense and by Top-L lists, each beside its eager reference.

Both read a shared table of the context's keys and a session-private one of appended keys; key ids count through them.

Shape legend: H KV heads, T query positions, G group heads, J table rows read per query, S stored table rows
(subspaces x centroids), N keys of the context, A columns of the appended table, M ranked keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from index_store.compiled.launch import F4, I1, I2, I4, launch, njit, on_host, spread, task_loop

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

    def arrays(self) -> tuple[I1, I1, I4, F4]:
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
        launch(
            _sum_rows,
            out.shape[:3].numel() * -(-out.shape[3] // (TILE * _TILES_PER_TASK)),
            *reads.arrays(),
            reads.first,
            out.numpy(),
        )
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
def _add_eight(table: I1, rows: I4, weights: F4, afresh: bool, acc: F4) -> None:
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
def add_rows(table: I1, rows: I4, weights: F4, low: int, acc: F4) -> None:
    """acc[i] = sum over j of weights[j] * table[rows[j], low + i]."""
    # Piece by piece, so that sums stay in the first-level cache from one pass to the next.
    for begin in range(0, acc.shape[0], _PIECE):
        _add_piece(table, rows, weights, low + begin, acc[begin : begin + _PIECE])


@njit(fastmath={"reassoc", "contract"})
def _add_piece(table: I1, rows: I4, weights: F4, low: int, acc: F4) -> None:
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
def _add_tile(table: I1, appended: I1, rows: I4, weights: F4, low: int, acc: F4) -> None:
    """`add_rows` over a tile that may lie in the context's table, in the appended one, or across their border."""
    keys = table.shape[1]
    inside = min(max(keys - low, 0), acc.shape[0])
    if inside > 0:
        add_rows(table, rows, weights, low, acc[:inside])
    if inside < acc.shape[0]:
        add_rows(appended, rows, weights, low + inside - keys, acc[inside:])


@task_loop("i1x3 i1x3 i4x4 f4x4 i8 f4x4")
def _sum_rows(task: int, tables: I1, appended: I1, rows: I4, weights: F4, first: int, out: F4) -> None:
    _, positions, group, columns = out.shape
    span = TILE * _TILES_PER_TASK
    spans = (columns + span - 1) // span
    query, part = task // spans, task % spans
    h, t, g = query // (positions * group), (query // group) % positions, query % group
    for low in range(part * span, min((part + 1) * span, columns), TILE):
        acc = out[h, t, g, low : min(low + TILE, columns)]
        _add_tile(tables[h], appended[h], rows[h, t, g], weights[h, t, g], first + low, acc)


@njit(fastmath={"reassoc", "contract"})
def _exp_tile(x: F4, peak: np.float32, octave: I4, factor: F4) -> float:
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
def _peak(x: F4, scratch: F4) -> float:
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
def exponentiate_tile(x: F4, octave: I4, scratch: F4) -> tuple[np.float32, np.float32]:
    """Overwrites x by exp(x - its maximum); the maximum, and the sum. octave: [TILE], scratch: [TILE / 2]."""
    peak = np.float32(_peak(x, scratch))
    octave = octave[: x.shape[0]]
    return peak, np.float32(_exp_tile(x, peak, octave, octave.view(np.float32)))


@njit(fastmath={"reassoc", "contract"})
def combine_tile(exponentials: F4, shares: F4, out: F4) -> None:
    """out[i] = sum over g of shares[g] * exponentials[g, i]."""
    out[:] = np.float32(0)
    for g in range(shares.shape[0]):
        row, share = exponentials[g], shares[g]
        for i in range(out.shape[0]):
            out[i] += share * row[i]


@njit()
def _exponentiate_span(
    task: int,
    tables: I1,
    appended: I1,
    rows: I4,
    weights: F4,
    first: int,
    exponentials: F4,
    peaks: F4,
    totals: F4,
    spans: int,
    positions: int,
    start: int,
) -> None:
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
def _rescale_slot(slot: int, peaks: F4, totals: F4) -> None:
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
    task: int, exponentials: F4, factors: F4, out: F4, spans: int, positions: int, start: int
) -> None:
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
    tables: I1,
    appended: I1,
    rows: I4,
    weights: F4,
    first: int,
    exponentials: F4,
    peaks: F4,
    totals: F4,
    out: F4,
) -> None:
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


_BELOW_ALL = -(2**15) - 1
_ENTRIES = 2**23  # of lists that the reference gathers at a time


@dataclass(frozen=True, slots=True)
class Lists:
    """ids int32 and values int16 [H, S, L], shared; kept and inserted [H, S] int32; insert buffers [H, S, E]."""

    ids_HSL: Tensor
    values_HSL: Tensor
    kept_HS: Tensor
    inserted_ids_HSE: Tensor
    inserted_values_HSE: Tensor
    inserted_HS: Tensor


def score_lists(
    lists: Lists, rows_HRJ: Tensor, weights_HRJ: Tensor, first: int, floor_missing: bool, out_HRM: Tensor
) -> None:
    """out[h, r, i] = sum_j weights[h, r, j] * value of key `first + i` in list rows[h, r, j].

    A key missing from a list counts as the list's lowest value with `floor_missing`, else as 0, and a key missing
    from all J lists then gets -inf. A weight of exactly 0 skips the list.
    """
    if not on_host(rows_HRJ):
        score_lists_reference(lists, rows_HRJ, weights_HRJ, first, floor_missing, out_HRM)
        return
    launch(
        _score_lists,
        rows_HRJ.shape[0] * rows_HRJ.shape[1],
        lists.ids_HSL.numpy(),
        lists.values_HSL.numpy(),
        lists.kept_HS.numpy(),
        lists.inserted_ids_HSE.numpy(),
        lists.inserted_values_HSE.numpy(),
        lists.inserted_HS.numpy(),
        rows_HRJ.numpy(),
        weights_HRJ.numpy(),
        first,
        floor_missing,
        out_HRM.numpy(),
    )


def score_lists_reference(
    lists: Lists, rows_HRJ: Tensor, weights_HRJ: Tensor, first: int, floor_missing: bool, out_HRM: Tensor
) -> None:
    """The same by gathering the lists of some queries at a time, on any device."""
    heads, queries, picks = rows_HRJ.shape
    entries = lists.ids_HSL.shape[2] + lists.inserted_ids_HSE.shape[2]
    step = max(1, _ENTRIES // max(1, heads * picks * entries))
    for begin in range(0, queries, step):
        part = slice(begin, begin + step)
        scored = _score_some(
            lists, rows_HRJ[:, part], weights_HRJ[:, part], first, out_HRM.shape[2], floor_missing
        )
        out_HRM[:, part] = scored


def _score_some(
    lists: Lists, rows_HRJ: Tensor, weights_HRJ: Tensor, first: int, columns: int, floor_missing: bool
) -> Tensor:
    ids, values, held = _union(lists, rows_HRJ.long())
    weights_HRJ1 = weights_HRJ[..., None]
    held &= weights_HRJ1 != 0.0
    floor_HRJ1 = torch.zeros_like(weights_HRJ1)
    if floor_missing:
        lowest = torch.where(held, values, torch.inf).amin(-1, keepdim=True)
        floor_HRJ1 = lowest.masked_fill_(torch.isinf(lowest), 0.0)
    found = held & (ids >= first) & (ids < first + columns)
    # The last column takes what lies outside.
    places = torch.where(found, ids - first, columns)
    added = torch.where(found, weights_HRJ1 * (values - floor_HRJ1), 0.0)
    total = torch.zeros(*rows_HRJ.shape[:2], columns + 1, device=places.device)
    # A list has every key once, so that the order of additions is the same every time.
    for place, of_list in zip(places.unbind(2), added.unbind(2), strict=True):
        total.scatter_add_(2, place, of_list)
    total += (weights_HRJ1 * floor_HRJ1).sum(2)
    if not floor_missing:
        seen = torch.zeros(total.shape, dtype=torch.bool, device=total.device)
        total.masked_fill_(~seen.scatter_(2, places.flatten(2), True), -torch.inf)
    return total[..., :columns]


def insert_keys(lists: Lists, scores_HTS: Tensor, first_id: int) -> None:
    """Try-inserts T keys with ids first_id.. and int16 scores [H, T, S] into every list, one after another.

    Updates kept, inserted and the insert buffers in place; the buffers must have room for T more entries.
    """
    if not on_host(scores_HTS):
        insert_keys_reference(lists, scores_HTS, first_id)
        return
    launch(
        _insert_keys,
        lists.kept_HS.numel(),
        lists.values_HSL.numpy(),
        lists.kept_HS.numpy(),
        lists.inserted_ids_HSE.numpy(),
        lists.inserted_values_HSE.numpy(),
        lists.inserted_HS.numpy(),
        scores_HTS.numpy(),
        first_id,
    )


def insert_keys_reference(lists: Lists, scores_HTS: Tensor, first_id: int) -> None:
    """The same for all keys at once, on any device.

    Of stored entries, inserted ones and new keys, in this order, the L with the largest scores stay, of equal ones
    those that come first: inserting one after another ends there too.
    """
    new = scores_HTS.shape[1]
    device = scores_HTS.device
    slots = lists.inserted_ids_HSE.shape[2]
    scores_HST = scores_HTS.transpose(1, 2).int()
    ids_T = torch.arange(first_id, first_id + new, dtype=torch.int32, device=device)
    held = torch.arange(slots, device=device) < lists.inserted_HS[..., None]
    values = torch.where(held, lists.inserted_values_HSE.int(), _BELOW_ALL)
    order = torch.cat([values, scores_HST], dim=2).sort(dim=2, descending=True, stable=True)
    ids = torch.cat([lists.inserted_ids_HSE, ids_T.expand(scores_HST.shape)], dim=2).gather(2, order.indices)
    # Only the last T stored entries can go: one does when as many entries as there is room for come before it.
    places = lists.kept_HS[..., None] - 1 - torch.arange(new, device=device)
    stored = lists.values_HSL.gather(2, places.clamp(min=0).long()).int()
    larger = torch.searchsorted(-order.values, -stored)
    evicted = (places >= 0) & (places + larger >= (lists.kept_HS + lists.inserted_HS)[..., None])
    gone = evicted.sum(2, dtype=torch.int32)
    lists.kept_HS.sub_(gone)
    lists.inserted_HS.add_(gone)
    lists.inserted_values_HSE.copy_(order.values[..., :slots])
    lists.inserted_ids_HSE.copy_(ids[..., :slots])


def _union(lists: Lists, rows_HRJ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, values and which entries count, [H, R, J, L + E] each, of lists by number."""
    heads = torch.arange(len(rows_HRJ), device=rows_HRJ.device)[:, None, None]
    ids, values, held = [], [], []
    for of_ids, of_values, counts_HS in (
        (lists.ids_HSL, lists.values_HSL, lists.kept_HS),
        (lists.inserted_ids_HSE, lists.inserted_values_HSE, lists.inserted_HS),
    ):
        ids.append(of_ids[heads, rows_HRJ])
        values.append(of_values[heads, rows_HRJ])
        entry = torch.arange(of_ids.shape[2], device=rows_HRJ.device)
        held.append(entry < counts_HS[heads, rows_HRJ][..., None])
    return torch.cat(ids, 3).long(), torch.cat(values, 3).float(), torch.cat(held, 3)


@task_loop("i4x3 i2x3 i4x2 i4x3 i2x3 i4x2 i4x3 f4x3 i8 b1 f4x3")
def _score_lists(
    task: int,
    ids: I4,
    values: I2,
    kept: I4,
    inserted_ids: I4,
    inserted_values: I2,
    inserted: I4,
    rows: I4,
    weights: F4,
    first: int,
    floor_missing: bool,
    out: F4,
) -> None:
    (_, queries, picks), columns = rows.shape, out.shape[2]
    head = task // queries
    query = task % queries
    acc = out[head, query]
    acc[:] = np.float32(0) if floor_missing else np.float32(-np.inf)
    base = np.float32(0)
    for pick in range(picks):
        weight = weights[head, query, pick]
        if weight == np.float32(0):
            continue
        row = rows[head, query, pick]
        count = kept[head, row]
        extra = inserted[head, row]
        floor = np.float32(0)
        if floor_missing and count + extra > 0:
            lowest = np.int16(32767)
            if count > 0:
                lowest = values[head, row, count - 1]
            if extra > 0:
                lowest = min(lowest, inserted_values[head, row, extra - 1])
            floor = np.float32(lowest)
            base += weight * floor
        for e in range(count):
            i = int(ids[head, row, e]) - first
            if i >= 0 and i < columns:
                add = weight * (np.float32(values[head, row, e]) - floor)
                acc[i] = add if acc[i] == -np.inf else acc[i] + add
        for e in range(extra):
            i = int(inserted_ids[head, row, e]) - first
            if i >= 0 and i < columns:
                add = weight * (np.float32(inserted_values[head, row, e]) - floor)
                acc[i] = add if acc[i] == -np.inf else acc[i] + add
    if base != np.float32(0):
        for i in range(columns):
            acc[i] += base


@task_loop("i2x3 i4x2 i4x3 i2x3 i4x2 i2x3 i8")
def _insert_keys(
    task: int,
    values: I2,
    kept: I4,
    inserted_ids: I4,
    inserted_values: I2,
    inserted: I4,
    scores: I2,
    first_id: int,
) -> None:
    (_, count, rows), capacity = scores.shape, values.shape[2]
    head = task // rows
    row = task % rows
    for position in range(count):
        score = scores[head, position, row]
        base = kept[head, row]
        extra = inserted[head, row]
        lowest_base = np.int32(values[head, row, base - 1]) if base > 0 else np.int32(32768)
        lowest_extra = np.int32(inserted_values[head, row, extra - 1]) if extra > 0 else np.int32(32768)
        if score <= min(lowest_base, lowest_extra):
            continue
        if base + extra >= capacity:
            if lowest_extra <= lowest_base:
                extra -= 1
            else:
                base -= 1
        slot = extra
        while slot > 0 and inserted_values[head, row, slot - 1] < score:
            inserted_values[head, row, slot] = inserted_values[head, row, slot - 1]
            inserted_ids[head, row, slot] = inserted_ids[head, row, slot - 1]
            slot -= 1
        inserted_values[head, row, slot] = score
        inserted_ids[head, row, slot] = np.int32(first_id + position)
        kept[head, row] = base
        inserted[head, row] = extra + 1
