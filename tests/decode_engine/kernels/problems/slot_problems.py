"""Sessions with slot caches over contexts in host memory, and what a step must leave in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels.attention.sparse_attention import KeyLists, ListedSequence
from decode_engine.kernels.records import records_of
from decode_engine.kernels.slots.slot_cache import (
    DONE,
    HASH,
    OTHER_HASH,
    WAYS,
    CopyShape,
    RowCounts,
    SlotCache,
)
from decode_engine.kernels.slots.slot_fetch import FetchBuffers, fetch_rows, find_programs

LAYER = 5
"""Of the model; the caches' second."""


@dataclass(frozen=True)
class CachedSequence:
    """A session's context, keys and values of one layer in host memory, and its cache, if it has one."""

    sequence: ListedSequence
    cache: SlotCache | None

    def state(self) -> tuple[Tensor, Tensor]:
        """Tags and stamps [H, slots] of the layer."""
        return self.cache.tags_LHS[1].cpu().clone(), self.cache.stamps_LHS[1].cpu().clone()


def cached_sequence(
    keys: int,
    slots: int,
    *,
    heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    first: int = 3,
    recent: int = 9,
    tail: int = 0,
    seed: int = 0,
) -> CachedSequence:
    """slots: of every KV head, 0 for no cache. Behind every head's rows lie rows of nan."""
    generator = torch.Generator().manual_seed(seed + keys)
    kv = torch.randn(heads, keys, 2, head_dim, generator=generator).to(dtype)
    kv = torch.cat([kv, torch.full((heads, 2, 2, head_dim), torch.nan, dtype=dtype)], dim=1)
    kv = kv.pin_memory() if device == "cuda" else kv
    tail_kv = torch.randn(heads, tail + 1, 2, head_dim, generator=generator).to(device, dtype)
    first = min(first, keys)
    sequence = ListedSequence(kv[:, :keys], tail_kv, tail, first, max(first, keys - recent), 0)
    cache = SlotCache.make((1, LAYER, 7), heads, keys, slots, head_dim, dtype, device) if slots else None
    if cache is not None:
        cache.rows_LHS2D.fill_(torch.nan)
    return CachedSequence(sequence, cache)


class Steps:
    """Fetches for a batch of sessions, step by step."""

    def __init__(
        self,
        size: int,
        *,
        heads: int = 2,
        keys: int = 512,
        segments: int = 3,
        shape: CopyShape | None = None,
        device: str = "cpu",
    ) -> None:
        if shape is None and device == "cpu":
            shape = CopyShape(programs=5)  # the interpreter runs them one by one
        self.size, self.heads, self.keys, self.shape, self.device = size, heads, keys, shape, device
        rows = size * heads
        self.segments = segments
        self.joined_RN = torch.full((rows, keys), 2**30, dtype=torch.int32, device=device)
        self.buffers = FetchBuffers.allocate(rows, keys, device)
        self.buffers.locations_RN.fill_(2**30)
        buffers = self.buffers
        for of_misses in (buffers.sources_C, buffers.targets_C, buffers.ids_C, buffers.entries_C):
            of_misses.fill_(2**30)
        found = (rows, find_programs(rows, keys), 2)
        self.found_RX2 = torch.full(found, -1, dtype=torch.int32, device=device)

    def records(self, sessions: Sequence[CachedSequence | None]) -> Tensor:
        found = records_of([None if s is None else s.sequence for s in sessions], "cpu")
        for row, session in zip(found, sessions, strict=True):
            if session is not None and session.cache is not None:
                for field, value in session.cache.fields(LAYER).items():
                    row[field] = value
        return found.to(self.device)

    def lists(self, wanted: Sequence[Sequence[Sequence[int]]]) -> KeyLists:
        """wanted: searched keys of every session and KV head."""
        lists = KeyLists.allocate(self.size * self.heads, self.segments, self.keys, "cpu")
        lists.ids_RPW.fill_(2**30)
        lists.counts_RP.zero_()
        for b, of_heads in enumerate(wanted):
            for head, ids in enumerate(of_heads):
                row = b * self.heads + head
                parts = torch.tensor(sorted(ids), dtype=torch.int32).tensor_split(self.segments)
                for segment, part in enumerate(parts):
                    lists.ids_RPW[row, segment, : len(part)] = part
                    # Entries of -1 do not count.
                    lists.ids_RPW[row, segment, len(part)] = -1
                    lists.counts_RP[row, segment] = len(part) + segment % 2
        return KeyLists(lists.ids_RPW.to(self.device), lists.counts_RP.to(self.device))

    def fetch(
        self, sessions: Sequence[CachedSequence | None], wanted: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[dict[int, int]]]:
        """Locations of every session's and KV head's keys, -1 for those at their own address."""
        row_bytes, records_BF = _row_bytes(sessions), self.records(sessions)
        lists = self.lists(wanted)
        found = fetch_rows(
            records_BF,
            lists,
            self.joined_RN,
            self.buffers,
            row_bytes,
            self.shape,
            found_RX2=self.found_RX2,
        ).cpu()
        joined, located = self.joined_RN.cpu(), []
        for b, session in enumerate(sessions):
            located.append([])
            for head in range(self.heads):
                row = b * self.heads + head
                always = [] if session is None else session.sequence.always().tolist()
                entries = int(lists.counts_RP[row].sum()) + len(always)
                ids, places = joined[row, :entries].tolist(), found[row, :entries].tolist()
                assert sorted(id_ for id_ in ids if id_ >= 0) == sorted([*wanted[b][head], *always])
                assert all(place == -1 for id_, place in zip(ids, places, strict=True) if id_ < 0)
                located[b].append({id_: place for id_, place in zip(ids, places, strict=True) if id_ >= 0})
        return located

    def check(
        self, sessions: Sequence[CachedSequence | None], wanted: Sequence[Sequence[Sequence[int]]]
    ) -> list[RowCounts]:
        """A step that leaves what a cache of dictionaries would; the rows that it counted for every session."""
        cached = [session for session in sessions if session is not None and session.cache is not None]
        before = {id(session): (*session.state(), session.cache.counts()) for session in cached}
        located = self.fetch(sessions, wanted)
        found_B2 = self.found_RX2.view(self.size, -1, 2).sum(1).tolist()
        counted = []
        for session, places, found in zip(sessions, located, found_B2, strict=True):
            if session is None or session.cache is None:
                assert found == [sum(len(of_head) for of_head in places), 0]
                assert all(place == -1 for of_head in places for place in of_head.values())
                counted.append(RowCounts(0, 0, 0))
                continue
            tags, stamps, counts = before[id(session)]
            expected = RowCounts(0, 0, 0)
            for head, of_head in enumerate(places):
                expected = add(expected, check_head(session, head, of_head, tags[head], stamps[head]))
            after = session.cache.counts()
            assert after == add(counts, expected)
            assert found == [expected.wanted - expected.reused, expected.reused]
            counted.append(expected)
        return counted


def check_head(
    session: CachedSequence, head: int, places: dict[int, int], tags: Tensor, stamps: Tensor
) -> RowCounts:
    """Every key is where it was, or in the place of one used longest ago, or nowhere when its set is in use."""
    new_tags, new_stamps = (tensor[head].tolist() for tensor in session.state())
    rows = session.cache.rows_LHS2D[1, head].cpu()
    kv = session.sequence.kv_HN2D[head]
    step = int(session.cache.tallies_LHC[1, head, DONE])
    held = {tag - 1: slot for slot, tag in enumerate(tags.tolist()) if tag}
    assert len(held) == int((tags != 0).sum()), "a key is there twice"
    reused = [key for key in places if key in held]
    assert all(places[key] == held[key] for key in reused)
    in_use = {held[key] for key in reused}
    missing = {key: place for key, place in places.items() if key not in held}
    installed = {place: key for key, place in missing.items() if place >= 0}
    assert not installed.keys() & in_use
    fetched = len(installed)
    assert fetched == sum(place >= 0 for place in missing.values()), "two keys in a slot"
    taken = installed.keys() | in_use
    ages = stamps.tolist()
    for key, place in missing.items():
        own = own_slots(key, len(tags) // WAYS)
        assert place in own or place < 0
        # Those used longest ago first, and it gives up only when a step uses all.
        age = ages[place] if place >= 0 else step
        assert all(slot in taken for slot in own if ages[slot] < age)
    expected_tags = dict(enumerate(tags.tolist())) | {slot: key + 1 for slot, key in installed.items()}
    expected_stamps = dict(enumerate(ages)) | dict.fromkeys(taken, step)
    assert new_tags == list(expected_tags.values())
    assert new_stamps == list(expected_stamps.values())
    for key, place in places.items():
        if place >= 0:
            assert torch.equal(rows[place].view(torch.int16), kv[key].view(torch.int16))
    return RowCounts(len(places), len(reused), len(places) - len(reused) - fetched)


def check_shared(
    steps: Steps, seated: Sequence[CachedSequence | None], wanted: Sequence[Sequence[Sequence[int]]]
) -> RowCounts:
    """A step in which every session reads its keys' own rows, and each missing row was brought at most once.

    Returns what it counted over all sessions, which are those of one context, and idle rows.
    """
    (context,) = {id(each): each for each in seated if each is not None}.values()
    cache = context.cache
    before, counts = context.state()[0], cache.counts()
    located = steps.fetch(seated, wanted)
    after, changed = context.state()[0], cache.counts()
    brought = in_place = 0
    for head in range(steps.heads):
        held, holds = slots_of(before[head]), slots_of(after[head])
        rows = cache.rows_LHS2D[1, head].cpu()
        places: dict[int, int] = {}
        for of_session in located:
            for key, place in of_session[head].items():
                assert places.setdefault(key, place) == place, "sessions read a key in different places"
                in_place += place < 0
        for key, place in places.items():
            if place >= 0:
                assert holds[key] == place
                assert torch.equal(rows[place], context.sequence.kv_HN2D[head, key])
            if key in held:
                assert place == held[key], "a wanted row was evicted"
        brought += len(holds.keys() - held.keys())
    wants = sum(len(of_head) for of_session in located for of_head in of_session)
    found = steps.found_RX2.sum((0, 1)).tolist()
    assert found == [brought + in_place, wants - brought - in_place]
    step = RowCounts(
        changed.wanted - counts.wanted, changed.reused - counts.reused, changed.bypassed - counts.bypassed
    )
    assert step == RowCounts(wants, wants - brought - in_place, in_place)
    assert not cache.missed_LHM.any(), "marks are left"
    return step


def slots_of(tags: Tensor) -> dict[int, int]:
    """Slots by the keys that they hold."""
    held = [(tag - 1, slot) for slot, tag in enumerate(tags.tolist()) if tag]
    assert len(dict(held)) == len(held), "a key is in two slots"
    return dict(held)


def sets_of(key: int, sets: int) -> set[int]:
    """The sets that a key hashes to."""
    return {((key * factor & 0xFFFFFFFF) * sets) >> 32 for factor in (HASH, OTHER_HASH)}


def own_slots(key: int, sets: int) -> set[int]:
    """Where it may be."""
    return {WAYS * own + way for own in sets_of(key, sets) for way in range(WAYS)}


def add(one: RowCounts, other: RowCounts) -> RowCounts:
    return RowCounts(one.wanted + other.wanted, one.reused + other.reused, one.bypassed + other.bypassed)


def next_wanted(
    session: CachedSequence | None, heads: int, count: int, overlap: float, generator: torch.Generator,
    last: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:  # fmt: skip
    """`count` searched keys of every KV head, of which about a share are those of the last step."""
    if session is None:
        return [[] for _ in range(heads)]
    searched = list(range(session.sequence.first, session.sequence.end))
    count = min(count, len(searched))
    wanted = []
    for head in range(heads):
        old = list(last[head]) if last else []
        order = torch.randperm(len(old), generator=generator).tolist()
        kept = {old[at] for at in order[: round(overlap * count)]}
        kept &= set(searched)
        for at in torch.randperm(len(searched), generator=generator).tolist():
            if len(kept) >= count:
                break
            if overlap == 0.0 and searched[at] in old and len(searched) >= 2 * count:
                continue
            kept.add(searched[at])
        wanted.append(sorted(kept))
    return wanted


def _row_bytes(sessions: Sequence[CachedSequence | None]) -> int:
    kv = next((s.sequence.kv_HN2D for s in sessions if s is not None), None)
    return 256 if kv is None else 2 * kv.shape[3] * kv.element_size()
