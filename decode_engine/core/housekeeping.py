"""A server tidies its store, and keeps beginnings of prompts that come again, within bounds in bytes.

Contexts that have expired go by themselves, and what is too much for the store's bound: while nobody is answered, or
after half an hour in which somebody always was. What is in use is noted in the store first, where all who share it see
that.

Prompts that name no context are known by the digests of their whole blocks (`context_id.continued_digests`). A
beginning that has come often enough, and adds enough to what is stored of it, is ordered as a context like any other:
a job of the queue, which a worker makes durable or not at all. What would exceed the bound has those that were not used
for longest removed first.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock

from decode_engine.rpc.contexts.creation import Workshop
from index_store.errors import QueueFullError, QuotaExceededError, SparseKVError, StoreBoundError
from index_store.jobs.job_record import JobRecord
from index_store.memory.arena import Arena
from index_store.methods.default import DEFAULT_METHOD
from index_store.methods.presets import METHODS
from index_store.selection.calibration import CALIBRATION_QUERIES
from index_store.store.catalog import Store
from index_store.store.clean_up import KEPT_BEGINNING, StoreRoom, note_use, renew
from index_store.store.description.array_entry import (
    kv_entry,
    queries_entry,
    state_entry,
    tokens_entry,
    window_entry,
)
from index_store.store.description.callers import Caller
from index_store.store.description.context_id import (
    DIGEST_DIGITS,
    PREFIX_BLOCK,
    ModelIdentity,
    continued_digests,
    first_digest,
)
from index_store.store.description.manifest import Manifest
from sparsekv.v1 import context_pb2, generation_pb2

_INDEXED_TOKENS = 4096
"""From here on a context gets the indexes of the default method: before, steps of full attention take less time."""

_MOST_DIGESTS = 2**16
"""Blocks of prompts that are remembered, those that came last: about 10 MB."""

_ORDERED = -1
"""In place of a count: a beginning that was ordered. It is not ordered again, also where somebody has deleted it."""

_SPARE = 1.0625  # of an estimate, for what is rounded up

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeepingRules:
    """What is kept. tokens: of a beginning, and that it adds to what is stored, at least; 0 for none. after: requests
    from which on. nbytes: of all contexts that were made so, at most."""

    tokens: int
    after: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BeginningStats:
    """Since the start, under the names of the API's ServerStatus.

    Requests that named no context, those of them for which a beginning was found, and its tokens; beginnings that were
    ordered as contexts, and such contexts that were removed for others.
    """

    plain_requests: int = 0
    found_beginnings: int = 0
    found_tokens: int = 0
    kept_beginnings: int = 0
    removed_beginnings: int = 0


class KeptBeginnings:
    """Counts beginnings of prompts, and has some kept. Thread-safe; `close` is called once."""

    def __init__(self, workshop: Workshop, arena: Arena, rules: KeepingRules) -> None:
        self._workshop = workshop
        self._arena = arena
        self._rules = rules
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._used: OrderedDict[str, None] = OrderedDict()  # ids, the one used last at the end
        self._lock = Lock()
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="beginnings")
        self._stats = BeginningStats()

    def stats(self) -> BeginningStats:
        with self._lock:
            return self._stats

    def note(self, token_ids: Sequence[int], found: Manifest, cached: int, tenant: str = "") -> None:
        """A tenant's prompt without a context is answered. found: the context whose `cached` first tokens it begins
        with.

        Its beginnings are counted, and kept, on a thread beside.
        """
        with self._lock:
            was = self._stats
            self._stats = replace(
                was,
                plain_requests=was.plain_requests + 1,
                found_beginnings=was.found_beginnings + (cached > 0),
                found_tokens=was.found_tokens + cached,
            )
            if KEPT_BEGINNING in found.labels:
                self._used[found.id] = None
                self._used.move_to_end(found.id)
        if self._rules.tokens:
            with suppress(RuntimeError):  # the server stops
                self._keeper.submit(self._take, token_ids, cached, tenant)

    def settle(self) -> None:
        """Returns when all that was noted so far is counted, and ordered where it is to be."""
        self._keeper.submit(lambda: None).result()

    def close(self) -> None:
        """Waits for what is being ordered; orders nothing more."""
        self._keeper.shutdown(wait=True, cancel_futures=True)

    def _take(self, token_ids: Sequence[int], cached: int, tenant: str) -> None:
        """Counts the beginnings of a prompt, and orders the one that is to be kept."""
        try:
            first = first_digest(self._workshop.identity, self._workshop.dtype, "", tenant)
            digests = continued_digests(first, token_ids)
            blocks = self._count(digests, cached)
            if blocks:
                digest = digests[blocks * DIGEST_DIGITS : (blocks + 1) * DIGEST_DIGITS]
                try:
                    self._keep(f"beginning-{digest[:12]}", list(token_ids[: blocks * PREFIX_BLOCK]), tenant)
                except (QuotaExceededError, QueueFullError, StoreBoundError):
                    self._counts[digest] = self._rules.after - 1  # the next request that has it tries again
                    raise
        except SparseKVError as error:
            logger.warning("a beginning that comes again is not kept: %s", error)
        except Exception:
            logger.exception("keeping a beginning failed")

    def _count(self, digests: str, cached: int) -> int:
        """Counts a prompt's beginnings; how many blocks the one has that is to be kept, 0 for none."""
        least, often, covered = self._rules.tokens, 0, cached
        blocks = range(max(1, -(-least // PREFIX_BLOCK)), len(digests) // DIGEST_DIGITS)
        keys = {each: digests[each * DIGEST_DIGITS : (each + 1) * DIGEST_DIGITS] for each in blocks}
        for each, key in keys.items():
            count = self._counts.pop(key, 0)
            if count == _ORDERED:
                covered = max(covered, each * PREFIX_BLOCK)
            else:
                count += 1
                often = each if count >= self._rules.after else often
            self._counts[key] = count
        if often * PREFIX_BLOCK - covered < least:
            often = 0
        if often:
            self._counts[keys[often]] = _ORDERED
        while len(self._counts) > _MOST_DIGESTS:
            self._counts.popitem(last=False)
        return often

    def _keep(self, name: str, token_ids: list[int], tenant: str) -> None:
        """Orders a beginning as a context of a tenant, if there is room for it or can be."""
        method = DEFAULT_METHOD if len(token_ids) >= _INDEXED_TOKENS else "full"
        if not self._make_room(self._estimate(len(token_ids), (method,))):
            logger.info("a beginning of %d tokens comes again, for which there is no room", len(token_ids))
            return
        order = context_pb2.CreateContextRequest(
            token_ids=generation_pb2.TokenIds(ids=token_ids),
            display_name=name,
            methods=[method],
            labels={KEPT_BEGINNING: "automatic"},
        )
        operation = replace(self._workshop, caller=Caller(tenant)).order(order).id
        with self._lock:
            self._stats = replace(self._stats, kept_beginnings=self._stats.kept_beginnings + 1)
        logger.info(
            "a beginning of %d tokens comes again and is kept, operation %s", len(token_ids), operation
        )

    def _make_room(self, needed: int) -> bool:
        """Removes what was not used for longest until so many bytes fit into the bound; False where they cannot."""
        if needed > self._rules.nbytes:
            return False
        store, queue = self._workshop.store, self._workshop.queue
        coming = sum(
            self._estimate(job.order.tokens, job.order.methods)
            for job in queue.entries()
            if isinstance(job, JobRecord) and job.open and KEPT_BEGINNING in job.order.labels
        )
        kept = [manifest for manifest in store.list() if KEPT_BEGINNING in manifest.labels]
        held = {manifest.id: sum(array.nbytes for array in manifest.arrays) for manifest in kept}
        free = self._rules.nbytes - coming - sum(held.values())
        with self._lock:
            turns = {id_: turn for turn, id_ in enumerate(self._used, 1)}
        kept.sort(key=lambda manifest: (turns.get(manifest.id, 0), manifest.created_at))
        for manifest in kept:
            if free >= needed:
                break
            if not manifest.pinned and not self._arena.in_use(manifest.id) and self._remove(manifest.id):
                free += held[manifest.id]
        return free >= needed

    def _remove(self, id_: str) -> bool:
        try:
            self._workshop.store.delete(id_)
        except SparseKVError as error:  # somebody has continued it, or deletes it, too
            logger.info("kept beginning %s is not removed: %s", id_[:12], error)
            return False
        self._arena.drop(id_)
        with self._lock:
            self._used.pop(id_, None)
            self._stats = replace(self._stats, removed_beginnings=self._stats.removed_beginnings + 1)
        logger.info("kept beginning %s was not used for longest, and is removed for another one", id_[:12])
        return True

    def _estimate(self, tokens: int, methods: Sequence[str]) -> int:
        """Bytes that a context will have, about; rather too many."""
        return stored_bytes(self._workshop.identity, self._workshop.dtype, tokens, methods)


def stored_bytes(model: ModelIdentity, dtype: str, tokens: int, methods: Sequence[str]) -> int:
    """Bytes that a context of so many tokens takes on disk, with the indexes of presets; rather too many."""
    entries = (
        tokens_entry(tokens),
        kv_entry(model, tokens, dtype),
        window_entry(model, tokens, dtype),
        state_entry(model, dtype),
        queries_entry(model, 2 * CALIBRATION_QUERIES),
    )
    specs = {spec.name: spec for name in methods if name in METHODS for spec in METHODS[name].index_specs()}
    rows = tokens * len(model.full_layers) * model.kv_heads
    indexes = (spec.built.bytes_per_token(model.head_dim) * rows for spec in specs.values())
    return int(_SPARE * (sum(entry.nbytes for entry in entries if entry is not None) + sum(indexes)))


_EVERY_S = 60.0
_MOST_PUT_OFF = 30


class Housekeeping:
    """Looks after a store once a minute, from `start` to `stop`, on a thread of its own."""

    def __init__(
        self,
        store: Store,
        room: StoreRoom,
        in_use: Callable[[], Iterable[str]],
        idle: Callable[[], bool],
        every_s: float = _EVERY_S,
    ) -> None:
        """in_use: ids of contexts that somebody uses now. idle: whether nobody is answered now."""
        self._store = store
        self._room = room
        self._in_use = in_use
        self._idle = idle
        self._every_s = every_s
        self._put_off = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)

    def start(self) -> None:
        """Begins after the first minute."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, when what is being removed is gone. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Notes what is in use, and removes what is to go where it is time for that."""
        for id_ in self._in_use():
            note_use(self._store, id_)
            with suppress(SparseKVError):  # it is gone, or cannot be read now
                renew(self._store, self._store.manifest(id_))
        if not self._idle() and self._put_off < _MOST_PUT_OFF:
            self._put_off += 1
            return
        self._put_off = 0
        try:
            self._room.sweep()
        except SparseKVError as error:
            logger.warning("contexts that have expired are not removed now: %s", error.message)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            try:
                self.look()
            except Exception:
                logger.exception("looking after the store failed")
