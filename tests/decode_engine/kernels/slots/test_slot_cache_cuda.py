"""What only a CUDA device can show of slot caches: programs that race, captured graphs, and page-locked memory."""

from __future__ import annotations

import random

import pytest
import torch

from decode_engine.kernels.slots.slot_cache import CopyShape, SlotCache
from decode_engine.kernels.slots.slot_fetch import fetch_rows
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import HybridSteps
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import get_method
from index_store.store.description.context_id import ModelIdentity
from tests.decode_engine.kernels.problems.cluster_problems import make_problem, random_lists
from tests.decode_engine.kernels.problems.slot_problems import (
    Steps,
    cached_sequence,
    check_shared,
    next_wanted,
)
from tests.decode_engine.steps.attention.test_hybrid_steps import (
    GivenHybridSteps,
    GivenSteps,
    attend,
    in_host_memory,
    make_steps,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("slots", [256, 3000, 8192])
@pytest.mark.parametrize(
    ("head_dim", "shape"), [(128, None), (256, None), (128, CopyShape(1)), (128, CopyShape(132, 32, 4))]
)
def test_many_programs_claim_slots_at_once(slots: int, head_dim: int, shape: CopyShape | None) -> None:
    sessions = [
        cached_sequence(20000, slots, heads=4, head_dim=head_dim, seed=b, device="cuda") for b in range(3)
    ]
    steps = Steps(3, heads=4, keys=32768, shape=shape, device="cuda")
    last = None
    for turn in range(4):
        generator = torch.Generator().manual_seed(turn)
        last = [
            next_wanted(session, 4, 2900, 0.5, generator, None if last is None else last[b])
            for b, session in enumerate(sessions)
        ]
        steps.check(sessions, last)


def test_sessions_on_one_context_at_full_size() -> None:
    """Sixteen sessions whose programs run at once miss some of the same keys, with too few slots and with enough."""
    choose = random.Random(5)
    for slots in (2_000, 6_000):
        context = cached_sequence(20_000, slots, heads=4, head_dim=128, dtype=torch.bfloat16, device="cuda")
        steps = Steps(16, heads=4, keys=2**15, segments=4, device="cuda")
        searched = range(context.sequence.first, context.sequence.end)
        for _ in range(4):
            seated = [choose.choice([context, context, context, None]) for _ in range(15)] + [context]
            common = [choose.sample(searched, 600) for _ in range(4)]
            wanted = [
                [
                    []
                    if each is None
                    else sorted({*choose.sample(of_head, 300), *choose.sample(searched, 150)})
                    for of_head in common
                ]
                for each in seated
            ]
            check_shared(steps, seated, wanted)


def test_a_replayed_graph_fetches_what_its_lists_name() -> None:
    problem = make_problem([900, 0, 333], head_dim=128, tails=(70, 0, 5), dtype=torch.bfloat16, device="cuda")
    caches: list[SlotCache | None] = [
        SlotCache.make((0, 1), problem.heads, 900, 300, 128, torch.bfloat16, "cuda") for _ in range(3)
    ]
    hybrid = make_steps(GivenHybridSteps, problem, "csattention+dropped", 1024)
    plain = make_steps(GivenSteps, problem, "csattention+dropped", 1024)
    placed = [in_host_memory(problem, caches, layer) for layer in range(2)]
    lists = random_lists(problem, 0.2, 4)
    for rows, _ in placed:
        attend(hybrid, 0, problem, lists, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [attend(hybrid, layer, problem, lists, rows) for layer, (rows, _) in enumerate(placed)]
    for turn in range(8):
        other = random_lists(problem, 0.1 * (turn % 4), 4, seed=turn // 2)
        lists.ids_RPW.copy_(other.ids_RPW)
        lists.counts_RP.copy_(other.counts_RP)
        graph.replay()
        expected = attend(plain, 0, problem, lists, problem.records_BF)
        for out in outs:
            torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
        assert (outs[0][1] == 0).all()
    counts = caches[0].counts() if caches[0] else None
    assert counts.reused > 0
    assert counts.fetched > 0


def test_steps_follow_each_other_without_waiting() -> None:
    """Launches of many steps are queued before the first has run."""
    session = cached_sequence(5000, 512, heads=2, head_dim=128, device="cuda")
    assert session.cache is not None
    steps = Steps(1, keys=8192, device="cuda")
    rows = steps.records([session])
    generator = torch.Generator().manual_seed(0)
    lists = [steps.lists([next_wanted(session, 2, 400, 0.0, generator)]) for _ in range(5)]
    for turn in range(50):
        fetch_rows(rows, lists[turn % 5], steps.joined_RN, steps.buffers, 512)
    counts = session.cache.counts()
    assert counts.wanted == 50 * 2 * 412
    assert counts.reused > 49 * 12
    assert counts.reused + counts.fetched + counts.bypassed == counts.wanted


@pytest.mark.parametrize("slots", [256, 1024])
def test_queued_steps_leave_the_rows_that_they_locate(slots: int) -> None:
    """Rows are read while programs claim their slots, in steps that find slots for all keys and in those that do not.

    Two sessions share the cache, and what one step evicts the next one may bring back.
    """
    session = cached_sequence(6000, slots, heads=2, head_dim=128, device="cuda")
    assert session.cache is not None
    steps = Steps(2, keys=8192, device="cuda")
    rows = steps.records([session, session])
    generator = torch.Generator().manual_seed(0)
    lists = [
        steps.lists([next_wanted(session, 2, count, 0.0, generator) for _ in range(2)])
        for count in (30, 60, 700, 30, 45)
    ]
    kept = []
    for turn in range(40):
        fetch_rows(rows, lists[turn % 5], steps.joined_RN, steps.buffers, 512)
        places = steps.buffers.locations_RN[:, :720].clone()
        heads = torch.arange(4, device="cuda")[:, None] % 2
        found = session.cache.rows_LHS2D[1, heads, places.clamp(min=0, max=slots - 1)]
        kept.append((steps.joined_RN[:, :720].clone(), places, found))
    host = session.sequence.kv_HN2D
    for turn, (joined, places, found) in enumerate(kept):
        entries = lists[turn % 5].counts_RP.sum(1).cpu() + len(session.sequence.always())
        for row, count in enumerate(entries.tolist()):
            located = (places[row, :count] >= 0).cpu()
            ids = joined[row, :count].cpu()[located].long()
            assert located.any()
            assert torch.equal(found[row, :count].cpu()[located], host[row % 2, ids])
    counts = session.cache.counts()
    assert min(counts.reused, counts.fetched, counts.bypassed) > 0


def test_pageable_memory_is_refused() -> None:
    identity = ModelIdentity("test", "test", "0" * 16, "0" * 16, 2, 4, 2, 64, 2, 4096)
    method = get_method("csattention+dropped")
    made = made_up_context(identity, "float16", method, 400, device="cuda")
    kv = {layer: made.kv(layer).cpu() for layer in range(2)}
    pageable = ResidentContext(
        made.manifest, made.tokens(), kv, {}, placement=Placement.HYBRID, device=torch.device("cuda")
    )
    with pytest.raises(InvalidArgumentError, match="not page-locked"):
        HybridSteps.fields(pageable, method, 1)
