"""Slot caches: what a step brings, what it finds, and who brings it where several sessions want one row."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from decode_engine.kernels import records
from decode_engine.kernels.slots.slot_cache import (
    HASH,
    OTHER_HASH,
    WAYS,
    CopyShape,
    RowCounts,
    SlotCache,
    copy_rows,
)
from decode_engine.kernels.slots.slot_fetch import CLAIM_FIRST, ENTRY_BITS, FetchBuffers, fetch_rows
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import COUNT_BYTES, MARKED, TAG_BYTES
from tests.decode_engine.kernels.problems.slot_problems import (
    LAYER,
    CachedSequence,
    Steps,
    cached_sequence,
    check_shared,
    next_wanted,
    sets_of,
)
from tests.support.devices import crossed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("slots", [16, 64, 77, 300])
@pytest.mark.parametrize("overlap", [0.0, 0.8, 1.0])
def test_steps_on_one_context(slots: int, overlap: float) -> None:
    """52 listed and 12 other keys are less than, as many as and more than there are slots."""
    session = cached_sequence(307, slots, device=DEVICE)
    steps = Steps(1, device=DEVICE)
    wanted = None
    counted = []
    for turn in range(3):
        wanted = next_wanted(session, 2, 52, overlap, generator(turn), wanted)
        counted.append(steps.check([session], [wanted])[0])
    assert all(counts.wanted == 2 * 64 for counts in counted)
    assert counted[0].reused == 0
    if slots >= 300 and overlap == 1.0:
        assert all(counts == RowCounts(128, 128, 0) for counts in counted[1:])
    if slots >= 300 and overlap == 0.8:
        assert all(counts.reused >= 2 * (42 + 12) and counts.bypassed == 0 for counts in counted[1:])
    if slots == 16:
        assert all(counts.bypassed == 2 * 48 for counts in counted)


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.float16), (128, torch.float16), (128, torch.float32)]
)
@pytest.mark.parametrize("heads", [1, 3])
def test_shapes_of_rows(head_dim: int, dtype: torch.dtype, heads: int) -> None:
    session = cached_sequence(90, 40, heads=heads, head_dim=head_dim, dtype=dtype, device=DEVICE)
    steps = Steps(1, heads=heads, keys=128, segments=1 + heads, device=DEVICE)
    for turn in range(2):
        steps.check([session], [next_wanted(session, heads, 30, 0.0, generator(turn))])


def test_a_batch_of_sessions_that_join_and_leave() -> None:
    """Some without a cache, some idle, of different lengths and cache sizes; the same one in another row later."""
    sessions = [
        cached_sequence(400, 90, seed=1, device=DEVICE),
        cached_sequence(33, 500, seed=2, device=DEVICE),
        cached_sequence(120, 0, seed=3, device=DEVICE),
        cached_sequence(6, 16, seed=4, device=DEVICE),
        cached_sequence(250, 33, seed=5, device=DEVICE),
    ]
    rows: list[list[int | None]] = [
        [0, None, 1],
        [0, 2, 1],
        [None, None, None],
        [3, 0, 4],
        [4, 3, 2],
        [4, 1, 0],
    ]
    steps = Steps(3, device=DEVICE)
    last: dict[int, list[list[int]]] = {}
    for turn, batch in enumerate(rows):
        placed: list[CachedSequence | None] = [None if at is None else sessions[at] for at in batch]
        wanted = [
            next_wanted(session, 2, 40, 0.5, generator(turn), None if at is None else last.get(at))
            for at, session in zip(batch, placed, strict=True)
        ]
        last |= {at: keys for at, keys in zip(batch, wanted, strict=True) if at is not None}
        steps.check(placed, wanted)
    left = sessions[0]
    assert left.cache.counts().reused > 0
    left.cache.clear()
    assert left.cache.counts() == RowCounts(0, 0, 0)
    assert steps.check([left, None, None], [last[0], [[], []], [[], []]])[0].reused == 0


def test_random_sequences_of_steps() -> None:
    random = generator(11)

    def number(below: int) -> int:
        return int(torch.randint(below, (1,), generator=random))

    for trial in range(2):
        heads = 1 + number(3)
        sessions = [
            cached_sequence(20 + number(300), 16 * number(6), heads=heads, first=number(5), recent=number(30),
                            head_dim=(64, 256)[trial], seed=trial, device=DEVICE)
            for _ in range(1 + number(3))
        ]  # fmt: skip
        shape = CopyShape(1 + number(4), 2 ** number(4), 1)
        steps = Steps(len(sessions), heads=heads, segments=1 + number(5), shape=shape, device=DEVICE)
        last = None
        for _ in range(3):
            last = [
                next_wanted(s, heads, number(90), number(5) / 4, random, None if last is None else last[b])
                for b, s in enumerate(sessions)
            ]
            steps.check(sessions, last)


def test_keys_of_one_set_compete() -> None:
    """More than the ways of a set in one step, and they have no other: as many are fetched as the step leaves free."""
    session = cached_sequence(2000, 64, heads=1, device=DEVICE)
    assert session.cache is not None
    steps = Steps(1, heads=1, keys=2048, device=DEVICE)
    crowd = [key for key in range(3, 1991) if sets_of(key, 4) == {2}]
    first = steps.check([session], [[crowd[:10]]])[0]
    assert (first.wanted, first.reused) == (22, 0)
    # Ten of the set stay, six more fit in at most, whatever else the step wants of the set.
    held = session.cache.tags_LHS[1, 0, 2 * WAYS : 3 * WAYS].cpu() - 1
    others = len(set(held.tolist()) & set(session.sequence.always().tolist()))
    second = steps.check([session], [[crowd[:40]]])[0]
    assert second.reused == 10 + 12
    assert second.bypassed == 30 - (WAYS - 10 - others)


@pytest.mark.parametrize("of", [HASH, OTHER_HASH])
def test_keys_that_share_one_of_two_sets_find_room_in_the_other(of: int) -> None:
    """Three times as many as it has ways, and all of them are found in the next step."""
    session = cached_sequence(4000, 16 * WAYS, heads=1, device=DEVICE)
    steps = Steps(1, heads=1, keys=4096, device=DEVICE)
    searched = range(session.sequence.first, session.sequence.end)
    crowd = [key for key in searched if ((key * of & 0xFFFFFFFF) * 16) >> 32 == 5 and sets_of(key, 16) != {5}]
    wanted = [[crowd[: 3 * WAYS]]]
    assert steps.check([session], wanted)[0] == RowCounts(60, 0, 0)
    assert steps.check([session], wanted)[0] == RowCounts(60, 60, 0)


def test_more_misses_than_there_is_room_for() -> None:
    """Those that find no room on the list stay where they are, and slots that nobody claims keep their rows."""
    session = cached_sequence(300, 300, device=DEVICE)
    assert session.cache is not None
    steps = Steps(1, device=DEVICE)
    room = steps.buffers
    wanted = [next_wanted(session, 2, 50, 0.0, generator(turn)) for turn in range(2)]
    steps.check([session], [wanted[0]])
    few = ("sources_C", "targets_C", "ids_C", "entries_C")
    steps.buffers = replace(room, **{name: getattr(room, name)[:30] for name in few})
    before = session.cache.counts()
    located = steps.fetch([session], [wanted[1]])[0]
    after = session.cache.counts()
    assert after.fetched - before.fetched == 30
    assert (
        after.bypassed - before.bypassed == sum(list(of_head.values()).count(-1) for of_head in located) > 0
    )
    assert after.reused - before.reused + 30 == sum(
        place >= 0 for of_head in located for place in of_head.values()
    )
    tags = session.cache.tags_LHS[1].cpu()
    for head in range(2):
        for slot in tags[head].nonzero().flatten().tolist():
            row = session.cache.rows_LHS2D[1, head, slot].cpu()
            assert torch.equal(row, session.sequence.kv_HN2D[head, int(tags[head, slot]) - 1])


def test_rows_of_crowded_caches_are_read_after_their_slots_are_claimed() -> None:
    """A cache, layer and KV head is crowded when its last step found no slot for a key, and before its first one."""
    session = cached_sequence(400, 64, device=DEVICE)
    steps = Steps(1, device=DEVICE)
    crowded = []
    for turn in range(5):
        few = range(210 + 15 * turn, 225 + 15 * turn)
        many = range(30, 200) if turn == 2 else few
        counts = steps.check([session], [[list(many), list(few)]])[0]
        assert (counts.bypassed > 0) == (turn == 2)
        misses = counts.wanted - counts.reused
        rows = steps.buffers.entries_C[:misses].cpu() >> ENTRY_BITS
        claimed_first = steps.buffers.sources_C[:misses].cpu() & CLAIM_FIRST
        crowded.append([sorted(set(claimed_first[rows == row].tolist())) for row in range(2)])
    assert crowded == [[[1], [1]], [[0], [0]], [[0], [0]], [[1], [0]], [[0], [0]]]


def test_an_idle_step_between_others() -> None:
    """It lists no misses, and the next step counts its own anew."""
    session = cached_sequence(300, 300, device=DEVICE)
    steps = Steps(1, device=DEVICE)
    for turn in range(5):
        placed = None if turn in (1, 2) else session
        steps.check([placed], [next_wanted(placed, 2, 40, 0.0, generator(turn))])
        missing = [0, 0] if placed is None else [0, int((steps.found_RX2[..., 0]).sum())]
        assert sorted(steps.buffers.counts_4[:2].tolist()) == missing


def test_size_and_fields() -> None:
    cache = SlotCache.make((0, LAYER), 8, 1000, 100, 128, torch.bfloat16, DEVICE)
    assert cache.rows_LHS2D.shape[2] == 112
    # Of every slot a key, a value, a tag and a stamp, and a bit of every key.
    marks = 4 * -(-1000 // MARKED)
    assert cache.nbytes == 2 * 8 * (112 * (2 * 128 * 2 + TAG_BYTES) + COUNT_BYTES + marks)
    assert cache.fields(3) == {}
    fields = cache.fields(LAYER)
    assert fields[records.SETS] == 7
    assert fields[records.SLOTS] == cache.rows_LHS2D[1].data_ptr()
    assert fields[records.SLOT_HEAD] == 112 * 512
    with pytest.raises(InvalidArgumentError, match="0 slots"):
        SlotCache.make((0,), 8, 1000, 0, 128, torch.bfloat16, DEVICE)
    with pytest.raises(InvalidArgumentError, match="0 layers"):
        SlotCache.make((), 8, 1000, 16, 128, torch.bfloat16, DEVICE)


@crossed(
    {
        "count": [0, 1, 15, 16, 17, 100],
        "shape": [CopyShape(), CopyShape(2, 4, 1), CopyShape(1, 32, 2)],
    }
)
def test_copies_between_addresses(count: int, shape: CopyShape) -> None:
    host = torch.randn(120, 64, generator=generator(count)).to(torch.float16)
    host = host.pin_memory() if DEVICE == "cuda" else host
    order = torch.randperm(100, generator=generator(1))[:count]
    sources = host.data_ptr() + 128 * order
    device = torch.zeros(120, 64, dtype=torch.float16, device=DEVICE)
    copy_rows(sources.to(DEVICE), device[:count], shape)
    assert torch.equal(device[:count].cpu(), host[order])
    assert not device[count:].any()


def test_unusable_shapes_are_refused() -> None:
    addresses = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    for row_bytes, shape in (
        (500, CopyShape()),
        (8, CopyShape()),
        (512, CopyShape(33, 12, 1)),
        (512, CopyShape(0)),
    ):
        with pytest.raises(InvalidArgumentError, match="powers of two"):
            copy_rows(addresses, torch.zeros(4, row_bytes, dtype=torch.uint8, device=DEVICE), shape)
    steps = Steps(2, device=DEVICE)
    with pytest.raises(InvalidArgumentError, match="lists of 4 rows"):
        fetch_rows(
            steps.records([None, None]),
            steps.lists([[[], []], [[], []]]),
            steps.joined_RN,
            FetchBuffers.allocate(4, 100, DEVICE),
            256,
        )


@pytest.mark.parametrize("slots", [16, 64, 300])
def test_random_groups_that_join_and_leave(slots: int) -> None:
    """Sessions that want some of the same keys, too many for the slots or not; some come, go, and change rows."""
    choose = random.Random(slots)
    context = cached_sequence(230, slots, heads=1, device=DEVICE)
    steps = Steps(4, heads=1, keys=256, segments=2, device=DEVICE)
    searched = range(context.sequence.first, context.sequence.end)
    for _ in range(4):
        seated = [choose.choice([context, context, None]) for _ in range(3)] + [context]
        choose.shuffle(seated)
        common = choose.sample(searched, 30)
        wanted = [
            [[] if each is None else sorted({*choose.sample(common, 20), *choose.sample(searched, 12)})]
            for each in seated
        ]
        check_shared(steps, seated, wanted)


def test_a_row_that_all_miss_is_brought_once() -> None:
    context = cached_sequence(230, 300, heads=2, device=DEVICE)
    steps = Steps(3, keys=256, device=DEVICE)
    keys = list(range(40, 80))
    first = check_shared(steps, [context] * 3, [[keys, keys]] * 3)
    assert first == RowCounts(3 * 2 * 52, 2 * 2 * 52, 0)  # 40 listed and 12 other ones
    # What one has brought another one finds, also in a step of its own.
    assert check_shared(steps, [None, context, None], [[[], []], [keys, keys], [[], []]]).fetched == 0


def test_groups_on_contexts_of_their_own_do_not_mix() -> None:
    """Equal keys of two contexts are different rows."""
    contexts = [cached_sequence(200, 300, heads=1, seed=seed, device=DEVICE) for seed in (0, 1)]
    steps = Steps(4, heads=1, keys=256, segments=1, device=DEVICE)
    keys = [list(range(50, 90))]
    one, other = contexts
    located = steps.fetch([one, other, one, other], [keys] * 4)
    for each, places in zip((one, other, one, other), located, strict=True):
        for key, place in places[0].items():
            assert torch.equal(each.cache.rows_LHS2D[1, 0, place].cpu(), each.sequence.kv_HN2D[0, key])
    assert [each.cache.counts().fetched for each in contexts if each.cache] == [52, 52]


def test_misses_of_several_sessions_beyond_the_room() -> None:
    """Nobody brings the others: every session reads them in place, and the next step may bring them."""
    context = cached_sequence(300, 320, heads=1, device=DEVICE)
    steps = Steps(2, heads=1, keys=512, device=DEVICE)
    room = steps.buffers
    few = ("sources_C", "targets_C", "ids_C", "entries_C")
    steps.buffers = replace(room, **{name: getattr(room, name)[:30] for name in few})
    wanted = [[list(range(50, 100))], [list(range(60, 120))]]
    first = check_shared(steps, [context] * 2, wanted)
    assert (first.fetched, first.bypassed > 0) == (30, True)
    steps.buffers = replace(room, counts_4=steps.buffers.counts_4)
    assert check_shared(steps, [context] * 2, wanted).fetched == 70 + 12 - 30
