"""Searches of query tables that several threads share: the layers of a decode step, one after another.

Every *word* is an int64 at an address that is a multiple of 8, which threads and devices share. Accesses to words are
sequentially consistent: what was written before a word was stored is seen after it was loaded, and of two threads that
each store one word and then load the other's, one sees the other's. Compilers leave none of them out of a loop.

A *job* says where everything of one batch lies and how long it is, as a vector of int64: a compiled function that runs
for a whole step finds all it needs there. Whoever asks for a search writes the queries of a row, and then the search's
number into the row's word; whoever searches writes the ids of a list, and then number and count into the list's word.

The work of one search is cut into tickets, which threads draw from a counter: first some for every list, which pick
its table rows, then one for every tile of every list, which scores the tile (`table_lists_numba`). A thread holds on to
the tiles that it scored, in its own buffers, until the list's other tiles have been scored too, and then lists the keys
of its tiles that reach the list's bound; who comes last finds the best of them and answers. So nobody waits while there
are tickets left, lists end one after another while others are still read, and scores never leave a core's cache.
Tickets are drawn in the order of the lists and a thread can hold all tiles of one list, so that of all threads
that wait some can go on.

A thread serves one step after another for as long as it lives, without the interpreter's lock: where the next search
of the step in flight has been asked for it takes part, and while nothing is in flight it sleeps. numba's cache notices
changes of this file, and not of those that it calls: who changes `table_lists_numba` removes what is in `__pycache__`
here.

Shape legend: B rows of a batch, H KV heads, R = B * H lists, G query heads per KV head, L searched queries of a list (1
when pooled, else G), D head dim, m subspaces, P tiles of the longest list, N keys of the longest context, W room of a
list, S searches of a step, A rows that are in use.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from decode_engine.host_search.table_lists_numba import (
    BINS,
    best_listed,
    combine,
    count_blocks,
    exponentiate,
    fold_of,
    list_reaching,
    lower_bound,
    pick_rows,
    reach_of,
    score_tile,
)
from index_store.compiled.launch import njit
from index_store.indexes.query_tables.search_numba import TILE

_WORD = ir.IntType(64)
_BYTES = 8
_ON_X86 = platform.machine().lower() in ("x86_64", "amd64")

_Generated = tuple[Any, Callable[..., Any]]


@intrinsic
def load_word(typing: Any, address: Any) -> _Generated:
    """load_word(address) -> int64."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], _WORD.as_pointer()), "seq_cst", _BYTES)

    return types.int64(types.int64), generate


@intrinsic
def store_word(typing: Any, address: Any, value: Any) -> _Generated:
    """store_word(address, value)."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _WORD.as_pointer())
        builder.store_atomic(values[1], pointer, "seq_cst", _BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add_to_word(typing: Any, address: Any, value: Any) -> _Generated:
    """add_to_word(address, value) -> the word before."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def relax(typing: Any) -> _Generated:
    """Tells the processor that this thread spins; where it cannot be told, lets another thread run."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if _ON_X86:
            function = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.sse2.pause"), [])
        else:
            _call(builder, "sched_yield")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def let_others_run(typing: Any) -> _Generated:
    """Gives the core to another thread that waits for one."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _call(builder, "sched_yield")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sleep_us(typing: Any, microseconds: Any) -> _Generated:
    """sleep_us(microseconds): this thread sleeps for about that long."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number = ir.IntType(32)
        function = ir.FunctionType(number, [number])
        called = cgutils.get_or_insert_function(builder.module, function, "usleep")
        builder.call(called, [builder.trunc(values[0], number)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _sem_wait(typing: Any, address: Any) -> _Generated:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _call(builder, "sem_wait", values[0])

    return types.int32(types.int64), generate


@intrinsic
def _sem_post(typing: Any, address: Any) -> _Generated:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _call(builder, "sem_post", values[0])

    return types.int32(types.int64), generate


@intrinsic
def _pointer(typing: Any, address: Any) -> _Generated:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _call(builder: Any, name: str, *addresses: Any) -> Any:
    """Calls a function of the C library that takes addresses and returns an int."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = ir.FunctionType(number, [pointer] * len(addresses))
    called = cgutils.get_or_insert_function(builder.module, function, name)
    return builder.call(called, [builder.inttoptr(address, pointer) for address in addresses])


SEMAPHORE_WORDS = 8
"""Words of a semaphore, more than the C library needs. All zeros is a semaphore that nobody has posted."""


@njit(cache=True)
def wait_for_post(semaphore: int) -> None:
    """Sleeps until the semaphore at that address has been posted; may also return for no reason."""
    _sem_wait(semaphore)


@njit(cache=True)
def post(semaphore: int) -> None:
    """Lets one thread that waits for the semaphore go on, now or when it comes to wait."""
    _sem_post(semaphore)


@njit(cache=True)
def read_word(address: int) -> int:
    """`load_word` for code that is not compiled."""
    return load_word(address)  # type: ignore[no-any-return]


@njit(cache=True)
def write_word(address: int, value: int) -> None:
    """`store_word` for code that is not compiled."""
    store_word(address, value)


@njit(cache=True)
def int8_rows(address: int, rows: int, width: int) -> NDArray[np.int8]:
    """[rows, width] int8 at an address."""
    return carray(_pointer(address), (rows, width), np.int8)  # type: ignore[no-any-return]


@njit(cache=True)
def int32_rows(address: int, rows: int, width: int) -> NDArray[np.int32]:
    """[rows, width] int32 at an address."""
    return carray(_pointer(address), (rows, width), np.int32)  # type: ignore[no-any-return]


@njit(cache=True)
def int64_rows(address: int, rows: int, width: int) -> NDArray[np.int64]:
    """[rows, width] int64 at an address."""
    return carray(_pointer(address), (rows, width), np.int64)  # type: ignore[no-any-return]


@njit(cache=True)
def float32_rows(address: int, rows: int, width: int) -> NDArray[np.float32]:
    """[rows, width] float32 at an address."""
    return carray(_pointer(address), (rows, width), np.float32)  # type: ignore[no-any-return]


JOB_FIELDS = 32
USED, HEADS, GROUP, DIM, SUBSPACES, CENTROIDS, QUERIES, STRIDED, SEARCHES, TILES, KEYS, WIDTH, BASE, STOP = (
    range(14)
)
"""Sizes: A, H, G, D, m, C, L, whether dimensions of subspaces are strided, S, P, N, W. BASE: what is added to a layer
to get the number of its search. STOP: address of a word that is not 0 when searching is to end."""
Q, POSTED, ANSWERS, IDS, BOARD, PLACES, ROWS, PICKS, WEIGHTS, BOUNDS, HISTOGRAMS, PEAKS, TOTALS = range(
    14, 27
)
CANDIDATES, SCORES, COUNTS, ORDER = range(27, 31)
"""Addresses: queries [B, H*G*D] float32, unscaled; words of rows and of lists, LINE apart; ids [R, W] int32; the board
[S, 1 + R, LINE] int64, all zeros before a step; PLACES_FIELDS int64 of every search and row; ROW_FIELDS of every used
row; then what threads leave each other: picked rows [R, L*m] int32 and weights [R, L*m], bounds [R, LINE] float32,
histograms [R*P, BINS] int32, peaks and totals [R*P, L] float32, candidates [R, N] int32 and their scores float32, and
counts [R, P] int64; and the layers that are searched, [S] int64, ascending."""
PLACES_FIELDS = 3
TABLES, CENTROID_ROWS, SCALES = range(PLACES_FIELDS)
"""Of a context's layer: tables [H, S, N] int8, centroids [H, m*C, W] and scales [H, m] float32."""
ROW_FIELDS = 5
ROW, FIRST, END, KEEP, LENGTH = range(ROW_FIELDS)
"""Of a used row: its number, the searched range, how many keys are kept, and the keys of its context."""
LINE = 8
"""Words of a cache line: words that different threads write are so far apart."""
COUNT_BITS = 24
"""An answer is (number of the search << COUNT_BITS) | ids of the list."""
FAILED = -1
"""An answer that ends the wait without a list."""

_PICKED, _SCORED, _COUNTED, _BOUNDED, _LISTED = range(5)
_FREE, _TO_COMBINE, _TO_LIST = 0, 1, 2
_SPINS = 64
_PICKS = 16


@njit(cache=True)
def tiles_of(first: int, end: int, keep: int) -> int:
    """Tiles of a list; none when all keys are kept, or none are searched."""
    if end - first <= keep:
        return 0
    return (end - first + TILE - 1) // TILE


@njit(cache=True)
def number_of(job: NDArray[np.int64], search: int) -> int:
    """What words say about the step's search of that place in the order."""
    return job[BASE] + int64_rows(job[ORDER], 1, job[SEARCHES])[0, search]  # type: ignore[no-any-return]


@njit(cache=True)
def serve_search(
    job: NDArray[np.int64],
    search: int,
    held: NDArray[np.int64],
    buffers: NDArray[np.float32],
    words: NDArray[np.uint64],
    bins: NDArray[np.int32],
) -> bool:
    """Takes part in one search until all of its tickets are drawn and what this thread holds is done.

    held [P, 3], buffers [P, (L + 1) * TILE], words [TILE / 32 + 2] and bins [2 * TILE]: this thread's own. False when
    told to stop.
    """
    lists = job[USED] * job[HEADS]
    picks = lists * _pick_parts(job)
    total = picks + lists * job[TILES]
    counter = _board(job, search, 0)
    room = held.shape[0]
    held[:, 0] = _FREE
    holding, spins, more = 0, 0, True
    while True:
        done = _go_on(job, search, held, buffers, words, bins) if holding > 0 else 0
        holding -= done
        if more and holding < room:
            ticket = add_to_word(counter, 1)
            if ticket >= total:
                more = False
            elif ticket < picks:
                if not _pick(job, search, ticket):
                    return False
            else:
                taken = _score(job, search, ticket - picks, held, buffers, bins)
                if taken < 0:
                    return False
                holding += taken
        elif holding == 0:
            return True
        elif done == 0:
            spins += 1
            if not _may_wait(job, spins):
                return False


@njit(cache=True)
def _list_of(job: NDArray[np.int64], index: int) -> tuple[NDArray[np.int64], int, int]:
    """Of the index-th used list: its row's ROW_FIELDS, the row's place among the used ones, and its KV head.

    All rows of a head come before those of the next, so that the first heads of all rows are answered first.
    """
    place = index % job[USED]
    return int64_rows(job[ROWS], job[USED], ROW_FIELDS)[place], place, index // job[USED]


@njit(cache=True)
def _board(job: NDArray[np.int64], search: int, line: int) -> int:
    """Address of a line of the board: 0 for the counter of tickets, 1 + i for the i-th used list."""
    lines = job[USED] * job[HEADS] + 1
    return job[BOARD] + (search * lines + line) * LINE * 8  # type: ignore[no-any-return]


@njit(cache=True)
def _may_wait(job: NDArray[np.int64], spins: int) -> bool:
    """One turn of waiting for other threads or for queries; False when told to stop."""
    relax()
    if spins % _SPINS == 0:
        let_others_run()
    return load_word(job[STOP]) == 0  # type: ignore[no-any-return]


@njit(cache=True)
def _wait_for_word(job: NDArray[np.int64], address: int, value: int) -> bool:
    """Waits until the word is at least `value`; False when told to stop."""
    spins = 0
    while load_word(address) < value:
        spins += 1
        if not _may_wait(job, spins):
            return False
    return True


@njit(cache=True)
def is_posted(job: NDArray[np.int64], search: int) -> bool:
    """Whether the first row's queries of a search are there."""
    row = int64_rows(job[ROWS], job[USED], ROW_FIELDS)[0, ROW]
    return load_word(job[POSTED] + row * LINE * 8) >= number_of(job, search)  # type: ignore[no-any-return]


@njit(cache=True)
def _answer(job: NDArray[np.int64], search: int, number: int, count: int) -> None:
    address = job[ANSWERS] + number * LINE * 8
    store_word(address, (number_of(job, search) << COUNT_BITS) | count)
    if load_word(job[STOP]) != 0:  # who told to stop may have written before this answer
        store_word(address, FAILED)


@njit(cache=True)
def _pick_parts(job: NDArray[np.int64]) -> int:
    """Parts in which a list's table rows are picked, so that with few lists as well there is one for most threads."""
    return max(1, min(job[SUBSPACES], _PICKS // (job[USED] * job[HEADS])))  # type: ignore[no-any-return]


@njit(cache=True)
def _pick(job: NDArray[np.int64], search: int, ticket: int) -> bool:
    """Picks a part of a list's table rows when its queries are there; the first one answers a list without tiles."""
    parts = _pick_parts(job)
    index, part = ticket // parts, ticket % parts
    row, place, h = _list_of(job, index)
    number = row[ROW] * job[HEADS] + h
    if not _wait_for_word(job, job[POSTED] + row[ROW] * LINE * 8, number_of(job, search)):
        return False
    if tiles_of(row[FIRST], row[END], row[KEEP]) == 0:
        if part > 0:
            return True
        count = min(max(row[END] - row[FIRST], 0), job[WIDTH])
        ids = int32_rows(job[IDS] + 4 * number * job[WIDTH], 1, job[WIDTH])[0]
        for i in range(count):
            ids[i] = row[FIRST] + i
        _answer(job, search, number, count)
        return True
    queries, subspaces, group, dim = job[QUERIES], job[SUBSPACES], job[GROUP], job[DIM]
    places = int64_rows(job[PLACES] + 8 * PLACES_FIELDS * (search * job[USED] + place), 1, PLACES_FIELDS)[0]
    centroids = subspaces * job[CENTROIDS]
    width = dim // subspaces
    pick_rows(
        float32_rows(job[Q] + 4 * number * group * dim, group, dim),
        np.float32(dim**-0.5),
        float32_rows(places[CENTROID_ROWS] + 4 * h * centroids * width, centroids, width),
        float32_rows(places[SCALES] + 4 * h * subspaces, 1, subspaces)[0],
        job[STRIDED] != 0,
        subspaces * part // parts,
        subspaces * (part + 1) // parts,
        int32_rows(job[PICKS] + 4 * number * queries * subspaces, queries, subspaces),
        float32_rows(job[WEIGHTS] + 4 * number * queries * subspaces, queries, subspaces),
    )
    add_to_word(_board(job, search, 1 + index) + 8 * _PICKED, 1)
    return True


@njit(cache=True)
def _score(
    job: NDArray[np.int64],
    search: int,
    ticket: int,
    held: NDArray[np.int64],
    buffers: NDArray[np.float32],
    bins: NDArray[np.int32],
) -> int:
    """Scores a tile; 1 when it is held now, 0 when the list has no such tile, -1 when told to stop."""
    index, tile = ticket // job[TILES], ticket % job[TILES]
    row, place, h = _list_of(job, index)
    count = tiles_of(row[FIRST], row[END], row[KEEP])
    if tile >= count:
        return 0
    number = row[ROW] * job[HEADS] + h
    board = _board(job, search, 1 + index)
    if not _wait_for_word(job, board + 8 * _PICKED, _pick_parts(job)):
        return -1
    slot = 0
    while held[slot, 0] != _FREE:
        slot += 1
    queries, subspaces = job[QUERIES], job[SUBSPACES]
    places = int64_rows(job[PLACES] + 8 * PLACES_FIELDS * (search * job[USED] + place), 1, PLACES_FIELDS)[0]
    table_rows = subspaces * job[CENTROIDS]
    low = row[FIRST] + tile * TILE
    keys = min(TILE, row[END] - low)
    # One piece, whatever the tile's size: loops over views of any other layout are not vectorised.
    scores_LX = buffers[slot][: queries * keys].reshape(queries, keys)
    score_tile(
        int8_rows(places[TABLES] + h * table_rows * row[LENGTH], table_rows, row[LENGTH]),
        int32_rows(job[PICKS] + 4 * number * queries * subspaces, queries, subspaces),
        float32_rows(job[WEIGHTS] + 4 * number * queries * subspaces, queries, subspaces),
        low,
        scores_LX,
    )
    held[slot, 1], held[slot, 2] = index, tile
    if queries == 1:
        held[slot, 0] = _TO_LIST
        _count(job, search, index, tile, scores_LX[0], bins)
        return 1
    held[slot, 0] = _TO_COMBINE
    peaks, totals = _softmax_parts(job, number, tile)
    exponentiate(scores_LX, peaks[0], totals[0], bins, buffers[slot][queries * TILE :])
    add_to_word(board + 8 * _SCORED, 1)
    return 1


@njit(cache=True)
def _softmax_parts(
    job: NDArray[np.int64], number: int, tile: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Peaks and totals of a list's tiles from `tile` on, [P - tile, L]."""
    tiles, queries = job[TILES], job[QUERIES]
    offset = 4 * (number * tiles + tile) * queries
    return (
        float32_rows(job[PEAKS] + offset, tiles - tile, queries),
        float32_rows(job[TOTALS] + offset, tiles - tile, queries),
    )


@njit(cache=True)
def _count(
    job: NDArray[np.int64],
    search: int,
    index: int,
    tile: int,
    scores_X: NDArray[np.float32],
    bins: NDArray[np.int32],
) -> None:
    """Adds a tile to the list's histograms; the last one finds the list's bound."""
    row, _, h = _list_of(job, index)
    number = row[ROW] * job[HEADS] + h
    queries, subspaces = job[QUERIES], job[SUBSPACES]
    reach = reach_of(float32_rows(job[WEIGHTS] + 4 * number * queries * subspaces, queries, subspaces))
    tiles = job[TILES]
    histograms = int32_rows(job[HISTOGRAMS] + 4 * BINS * number * tiles, tiles, BINS)
    fold = fold_of(row[END] - row[FIRST], row[KEEP])
    count_blocks(scores_X, fold, reach, bins, histograms[tile])
    board = _board(job, search, 1 + index)
    count = tiles_of(row[FIRST], row[END], row[KEEP])
    if add_to_word(board + 8 * _COUNTED, 1) == count - 1:
        bounds = float32_rows(job[BOUNDS] + 4 * LINE * number, 1, 1)[0]
        bounds[0] = lower_bound(histograms[:count], row[KEEP], reach)
        store_word(board + 8 * _BOUNDED, 1)


@njit(cache=True)
def _go_on(
    job: NDArray[np.int64],
    search: int,
    held: NDArray[np.int64],
    buffers: NDArray[np.float32],
    words: NDArray[np.uint64],
    bins: NDArray[np.int32],
) -> int:
    """Goes on with the tiles that this thread holds, as far as others let it; how many it holds no more."""
    queries = job[QUERIES]
    done = 0
    for slot in range(held.shape[0]):
        if held[slot, 0] == _FREE:
            continue
        index, tile = held[slot, 1], held[slot, 2]
        board = _board(job, search, 1 + index)
        row, _, h = _list_of(job, index)
        count = tiles_of(row[FIRST], row[END], row[KEEP])
        keys = min(TILE, row[END] - row[FIRST] - tile * TILE)
        number = row[ROW] * job[HEADS] + h
        # Weights lie behind the exponentials that they were combined from, pooled scores at the beginning.
        begin = queries * TILE if queries > 1 else 0
        weights_X = buffers[slot][begin : begin + keys]
        if held[slot, 0] == _TO_COMBINE and load_word(board + 8 * _SCORED) == count:
            peaks, totals = _softmax_parts(job, number, 0)
            exponentials_LX = buffers[slot][: queries * keys].reshape(queries, keys)
            combine(exponentials_LX, tile, peaks[:count], totals[:count], weights_X)
            held[slot, 0] = _TO_LIST
            _count(job, search, index, tile, weights_X, bins)
        if held[slot, 0] == _TO_LIST and load_word(board + 8 * _BOUNDED) == 1:
            _list(job, search, index, tile, weights_X, words)
            held[slot, 0] = _FREE
            done += 1
    return done


@njit(cache=True)
def _list(
    job: NDArray[np.int64],
    search: int,
    index: int,
    tile: int,
    scores_X: NDArray[np.float32],
    words: NDArray[np.uint64],
) -> None:
    """Lists a tile's keys that reach the bound; the last one finds the best of all and answers."""
    tiles, room = job[TILES], job[KEYS]
    row, _, h = _list_of(job, index)
    number = row[ROW] * job[HEADS] + h
    candidates = int32_rows(job[CANDIDATES] + 4 * number * room, 1, room)[0]
    scores = float32_rows(job[SCORES] + 4 * number * room, 1, room)[0]
    counts = int64_rows(job[COUNTS] + 8 * number * tiles, 1, tiles)[0]
    keys = scores_X.shape[0]
    begin = tile * TILE
    bound = float32_rows(job[BOUNDS] + 4 * LINE * number, 1, 1)[0, 0]
    counts[tile] = list_reaching(
        scores_X,
        bound,
        row[FIRST] + begin,
        words,
        candidates[begin : begin + keys],
        scores[begin : begin + keys],
    )
    count = tiles_of(row[FIRST], row[END], row[KEEP])
    if add_to_word(_board(job, search, 1 + index) + 8 * _LISTED, 1) == count - 1:
        ids = int32_rows(job[IDS] + 4 * number * job[WIDTH], 1, job[WIDTH])[0]
        kept = best_listed(candidates, scores, counts[:count], row[KEEP], ids)
        _answer(job, search, number, kept)


EPOCH, JOB, INSIDE = 0, LINE, 2 * LINE
STEP_WORDS = 3 * LINE
"""The number of the step in flight or 0, the address of its job, and how many threads are inside."""

_PATIENCE, _NAP_US = 50_000, 50
"""Turns of waiting, a few milliseconds, after which a thread naps between looks."""


@njit(cache=True)
def take_part(step: int, semaphore: int, end: int) -> None:
    """Takes part in the searches of all steps until told to end.

    Given the addresses of the step's words, of this thread's semaphore, and of the word that ends it.
    """
    served = searched = spins = 0
    inside = False
    held = np.zeros((1, 3), np.int64)
    buffers = np.empty(1, np.float32)
    tile_words = np.empty(TILE // 32 + 2, np.uint64)
    bins = np.empty(2 * TILE, np.int32)
    while load_word(end) == 0:
        if not inside:
            inside = _enter(step, served)
            if not inside:
                wait_for_post(semaphore)
                continue
            served, searched = load_word(step + 8 * EPOCH), 0
        job = int64_rows(load_word(step + 8 * JOB), 1, JOB_FIELDS)[0]
        leaving = searched == job[SEARCHES] or load_word(job[STOP]) != 0
        if not leaving and is_posted(job, searched):
            width = (job[QUERIES] + 1) * TILE
            if held.shape[0] < job[TILES] or buffers.shape[0] < job[TILES] * width:
                held, buffers = (
                    np.zeros((job[TILES], 3), np.int64),
                    np.empty(job[TILES] * width, np.float32),
                )
            own = buffers[: job[TILES] * width].reshape(job[TILES], width)
            leaving = not serve_search(job, searched, held[: job[TILES]], own, tile_words, bins)
            searched += 1
            spins = 0
        else:
            spins += 1
            _spin(spins)
        if leaving:
            inside = False
            add_to_word(step + 8 * INSIDE, -1)
    if inside:
        add_to_word(step + 8 * INSIDE, -1)


def compile_search() -> None:
    """Returns when `take_part` is compiled: half a minute on a machine that has no such code yet.

    A device that has asked for lists waits no longer than a few seconds.
    """
    ended, semaphore = np.ones(1, np.int64), np.zeros(SEMAPHORE_WORDS, np.int64)
    no_step = np.zeros(STEP_WORDS, np.int64)
    take_part(no_step.ctypes.data, semaphore.ctypes.data, ended.ctypes.data)


@njit(cache=True)
def _spin(spins: int) -> None:
    """One turn of waiting for a device: it asks again within a fraction of a millisecond, unless it is held up."""
    relax()
    if spins > _PATIENCE:
        sleep_us(_NAP_US)
    elif spins % _SPINS == 0:
        let_others_run()


@njit(cache=True)
def _enter(base: int, served: int) -> bool:
    """Whether this thread is inside of a step now: one that it has not served yet, and that has not ended."""
    epoch = load_word(base + 8 * EPOCH)
    if epoch in (0, served):
        return False
    # First counted, then looked at again: who ends a step waits for those who are counted.
    add_to_word(base + 8 * INSIDE, 1)
    if load_word(base + 8 * EPOCH) == 0:
        add_to_word(base + 8 * INSIDE, -1)
        return False
    return True
