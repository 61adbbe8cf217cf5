"""Decode steps over contexts in host memory give what steps over contexts in the device's give, whatever is cached.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists, attend_lists_reference
from decode_engine.kernels.slots.slot_cache import SlotCache
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import HybridSteps, ListedSteps, slot_cache
from decode_engine.steps.attention.step_attention import StepAttention, StepPlan
from index_store.memory.placement import slot_bytes
from index_store.methods.presets import get_method
from index_store.selection.budgets import TokenCount
from tests.decode_engine.kernels.problems.cluster_problems import Problem, make_problem, random_lists
from tests.decode_engine.steps.attention.layer_steps import GivenHybridSteps, GivenLists, GivenSteps, model_of
from tests.support.devices import DEVICE, nightly

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
pytestmark = [pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.usefixtures("few_programs")]


def make_steps(kind: type[ListedSteps], problem: Problem, expression: str, segments: int = 2) -> ListedSteps:
    """segments: of the lists that they will be given."""
    rows, group, head_dim = problem.q_RGD.shape
    heads = problem.heads
    model, size = model_of(group, head_dim, heads), rows // heads
    GivenLists.lists = random_lists(problem, 0.0, segments)
    return kind(StepPlan(model, get_method(expression), size, 128, DTYPE, torch.device(DEVICE)))


def attend(steps: ListedSteps, layer: int, problem: Problem, lists: KeyLists, rows: Tensor) -> Tensor:
    assert isinstance(steps.selection, GivenLists)
    steps.selection.lists = lists
    rows_BHGD = problem.q_RGD.view(len(rows), problem.heads, *problem.q_RGD.shape[1:])
    return steps.attend(layer, rows_BHGD, rows).clone()


def in_host_memory(
    problem: Problem, caches: list[SlotCache | None], layer: int
) -> tuple[Tensor, list[Tensor]]:
    """Records that point to copies of keys and values in host memory and to slot caches; and the copies."""
    found = problem.records_BF.clone()
    copies = []
    for b, sequence in enumerate(problem.sequences):
        if sequence is None:
            continue
        kv = sequence.kv_HN2D.to("cpu", copy=True).contiguous()
        kv = kv.pin_memory() if DEVICE == "cuda" else kv
        copies.append(kv)
        found[b, records.KV] = kv.data_ptr()
        found[b, records.KV_HEAD] = kv.stride(0) * kv.element_size()
        cache = caches[b]
        for field, value in ({} if cache is None else cache.fields(layer)).items():
            found[b, field] = value
    return found, copies


@pytest.mark.parametrize(
    ("expression", "slots"),
    [
        ("csattention+dropped", 16),
        ("csattention+dropped", 128),
        ("csattention+monopole", 32),
        ("csattention", 32),
    ],
)
def test_a_cache_changes_no_bit(expression: str, slots: int) -> None:
    """A cache that is too small, one that is about large enough, one for everything; a session without, an idle row.

    The sums that `csattention` takes out of clusters are added in any order on a GPU.
    """
    problem = make_problem(
        [90, 0, 33], per_cluster=16, tails=(5, 0, 40), dtype=DTYPE, device=DEVICE, recent=10
    )
    caches = [
        SlotCache.make((0, 1), problem.heads, 90, slots, 64, DTYPE, DEVICE) if b != 2 else None
        for b in range(3)
    ]
    for cache in caches:
        if cache is not None:
            cache.rows_LHS2D.fill_(torch.nan)
    plain, hybrid = (make_steps(kind, problem, expression) for kind in (GivenSteps, GivenHybridSteps))
    for turn, (share, layer) in enumerate(((0.3, 0), (0.2, 0), (1.0, 1))):
        lists = random_lists(problem, share, 2, seed=turn)
        rows, _copies = in_host_memory(problem, caches, layer)
        expected = attend(plain, layer, problem, lists, problem.records_BF)
        found = attend(hybrid, layer, problem, lists, rows)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        if turn == 1 and (DEVICE == "cpu" or expression != "csattention"):
            uncached = rows.clone()
            uncached[:, records.SLOTS :] = 0
            assert torch.equal(found, attend(hybrid, layer, problem, lists, uncached))
        assert (found[1] == 0).all()
        assert torch.equal(hybrid.kept_B(), plain.kept_B())
    counts = caches[0].counts() if caches[0] else None
    assert counts.reused > 0
    assert counts.fetched > 0
    assert (counts.bypassed == 0) == (slots == 128)


def test_who_shares_a_context_changes_no_bit() -> None:
    """Of what a session gets, which reads rows that the other one has brought, in this step or before."""
    problem = make_problem([90, 90], heads=1, tails=(5, 40), dtype=DTYPE, device=DEVICE, recent=10)
    cache = SlotCache.make((0,), 1, 90, 32, 64, DTYPE, DEVICE)
    cache.rows_LHS2D.fill_(torch.nan)
    steps = make_steps(GivenHybridSteps, problem, "csattention+dropped", 1)
    rows, _copies = in_host_memory(problem, [cache, cache], 0)
    context = [records.KV, records.KV_HEAD]
    rows[1, context] = rows[0, context]
    uncached, alone = rows.clone(), rows.clone()
    uncached[:, records.SLOTS :] = 0
    alone[1] = 0
    for turn in range(2):
        lists = random_lists(problem, 0.4, 1, seed=turn)
        expected = attend(steps, 0, problem, lists, uncached)
        together = attend(steps, 0, problem, lists, rows)
        assert torch.equal(together, expected)
        lists.counts_RP[1] = 0
        assert torch.equal(attend(steps, 0, problem, lists, alone)[0], expected[0])
    counts = cache.counts()
    assert min(counts.reused, counts.fetched, counts.bypassed) > 0


@pytest.mark.parametrize(
    ("group", "head_dim"),
    [
        *((1, 64), (3, 128), (16, 256)),
        *nightly((3, 64), (8, 64), (16, 64), (1, 128), (8, 128), (16, 128), (1, 256), (3, 256), (8, 256)),
    ],
)
def test_shapes(group: int, head_dim: int) -> None:
    problem = make_problem(
        [90, 41], heads=3, group=group, head_dim=head_dim, tails=(2,), dtype=DTYPE, device=DEVICE
    )
    caches: list[SlotCache | None] = [
        SlotCache.make((0,), 3, 90, 48, head_dim, DTYPE, DEVICE) for _ in range(2)
    ]
    steps = make_steps(GivenHybridSteps, problem, "csattention+dropped", 1)
    rows, _copies = in_host_memory(problem, caches, 0)
    for turn in range(2):
        lists = random_lists(problem, 0.4, 1, seed=turn)
        found = attend(steps, 0, problem, lists, rows)
        expected = attend_lists_reference(problem.q_RGD, problem.sequences, lists, problem.scale).out
        torch.testing.assert_close(found.view(expected.shape).float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tokens", [40, 400, 1000])
def test_slots_are_a_share_of_the_context(tokens: int) -> None:
    """As many bytes as memory was counted for."""
    identity = model_of(2, 64)
    context = made_up_context(identity, "bfloat16", get_method("full"), tokens)
    caches = [slot_cache(context, layer) for layer in range(2)]
    assert slot_cache(context, 1) is caches[1]
    assert {cache.tags_LHS.shape[2] for cache in caches} == {max(16, -(-tokens // 256) * 16)}
    assert sum(cache.nbytes for cache in caches) == slot_bytes(context.manifest)
    many = made_up_context(identity, "bfloat16", get_method("full"), tokens)
    many.slot_share = 4
    caches = [slot_cache(many, layer) for layer in range(2)]
    assert {cache.tags_LHS.shape[2] for cache in caches} == {max(16, -(-tokens // 64) * 16)}
    assert sum(cache.nbytes for cache in caches) == slot_bytes(many.manifest, 4)


def test_sessions_of_a_context_share_its_cache() -> None:
    identity = model_of(2, 64)
    method = replace(get_method("csattention"), budget=TokenCount(20))
    context = made_up_context(identity, "float32", method, 400)
    kind: type[StepAttention] = HybridSteps
    one, again, other = (kind.fields(context, method, layer) for layer in (1, 1, 0))
    assert one == again
    assert one[records.SLOTS] != other[records.SLOTS]
    assert one.keys() >= ListedSteps.fields(context, method, 1).keys()
