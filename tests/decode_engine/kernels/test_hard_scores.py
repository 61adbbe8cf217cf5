"""Searches on a GPU keep about as many keys as wanted, whatever the scores are: flat, tied, or dwarfed by one key.

On a GPU the kernels do, over contexts of up to 131,072 keys, and print a line for every case (`pytest -s`). Without one
their eager references do, and kernels in Triton's interpreter equal them key for key.
"""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode_engine.kernels.border import (
    draw,
    draw_reference,
    draws_below,
    draws_below_reference,
    sampled_run_reference,
)
from decode_engine.kernels.records import records_of
from decode_engine.kernels.tables import reference as tables
from decode_engine.kernels.tables.reference import kept_mask
from decode_engine.kernels.tables.selection import select
from decode_engine.kernels.tables.sizes import TableWork
from tests.decode_engine.kernels.problems.hard_scores import (
    HEADS,
    SCORES,
    make_scores,
    table_problem,
)
from tests.decode_engine.kernels.problems.table_problems import DEVICE, poisoned
from tests.support.devices import nightly

KINDS = ("pooled", "each")


def kept_by_reference(kind: str, q_BHGD: Tensor, k_HND: Tensor, share: float) -> Tensor:
    """Which keys the reference keeps, [H, N] bool."""
    rows = []
    plan, searched = table_problem(k_HND, share, kind == "pooled")
    work = TableWork.make(plan, 1, k_HND.device)
    for h in range(HEADS):
        picked = tables.picked_sums(q_BHGD[0, h], searched, plan, work, 0, h)
        rows.append(tables.kept_keys(*picked, searched, plan, h))
    return torch.stack(rows)


def kept_by_kernels(kind: str, q_BHGD: Tensor, k_HND: Tensor, share: float) -> Tensor:
    """Which keys the kernels keep, [H, N] bool; lists are as long as they may be."""
    keys = k_HND.shape[1]
    plan, searched = table_problem(k_HND, share, kind == "pooled")
    work, counts = poisoned(plan, 1)
    select(q_BHGD, records_of([searched], DEVICE), plan, work, counts)
    return torch.stack([kept_mask(work.ids[0, h], counts[0, h], keys) for h in range(HEADS)])


def sampled_keys(kind: str, keys: int) -> int:
    """How many keys the threshold is taken from, at least."""
    return min(keys, {"pooled": 8192, "each": 16384}[kind])


def check_counts(kind: str, kept_HN: Tensor, share: float) -> None:
    """On average as many as wanted; each KV head up to what a sample and draws leave to chance."""
    keys = kept_HN.shape[1]
    wanted = round(share * keys)
    of_wanted = kept_HN.sum(1).cpu() / wanted
    chance = math.sqrt(1 / wanted + (1 / (share * sampled_keys(kind, keys)) if keys > 4096 else 0))
    assert 0.8 <= float(of_wanted.mean()) <= 1.25, of_wanted
    assert bool(((of_wanted - 1).abs() <= 0.05 + 3 * chance).all()), of_wanted


LONG = (("flat", "each"), ("repeated", "pooled"), ("sink", "pooled"))


@pytest.mark.parametrize(
    ("keys", "name", "kind"),
    [(1024, name, kind) for name in SCORES for kind in KINDS]
    + [(32768, *long) for long in LONG]
    + nightly(*((32768, name, kind) for name in SCORES for kind in KINDS if (name, kind) not in LONG)),
)
def test_as_many_keys_as_wanted_are_kept(keys: int, name: str, kind: str) -> None:
    q, k = make_scores(name, keys)
    for share in (0.01, 0.05):
        check_counts(kind, kept_by_reference(kind, q, k, share), share)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("keys", [1024, 8192, 32768, 131072])
def test_as_many_keys_as_wanted_are_kept_on_a_gpu(keys: int, name: str, kind: str) -> None:
    q, k = make_scores(name, keys)
    for share in (0.01, 0.05):
        kept = kept_by_kernels(kind, q, k, share)
        of_wanted = [round(count / round(share * keys), 3) for count in kept.sum(1).tolist()]
        line = {"search": kind, "scores": name, "keys": keys, "keep": share, "kept_of_wanted": of_wanted}
        sys.stdout.write(json.dumps(line) + "\n")
        check_counts(kind, kept, share)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["flat", "repeated", "equal", "sink"])
def test_kernels_keep_what_the_reference_keeps(name: str, kind: str) -> None:
    """Key for key, where sums are exact or all alike; elsewhere a number that is rounded otherwise may move a key."""
    q, k = make_scores(name, 600)
    kept, expected = (keeps(kind, q, k, 0.05) for keeps in (kept_by_kernels, kept_by_reference))
    differing = int((kept != expected).sum())
    exact = kind == "pooled" or name in ("nothing", "equal")
    assert differing <= (0 if exact else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_above_the_border_are_kept(kind: str) -> None:
    """Of keys that are all alike but for some that score higher, those are kept, and then some of the others."""
    q, k = make_scores("equal", 4096)
    best = torch.arange(13, 4000, 211)
    k[:, best] = q[0].mean(1)[:, None] * 2.0
    kept = kept_by_reference(kind, q, k, 0.05)
    assert bool(kept[:, best].all())
    check_counts(kind, kept, 0.05)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    distinct=st.integers(1, 3000),
    length=st.floats(0.0, 8.0),
    keys=st.integers(2000, 4096),
    share=st.floats(0.02, 0.5),
    kind=st.sampled_from(KINDS),
)
def test_counts_are_those_of_a_cpu(
    seed: int, distinct: int, length: float, keys: int, share: float, kind: str
) -> None:
    """A CPU keeps as many as wanted. Some keys may be there many times, and queries be of any length."""
    q, k = make_scores("normal", keys, seed)
    places = torch.randint(0, min(distinct, keys), (keys,), generator=torch.Generator().manual_seed(seed))
    kept = kept_by_reference(kind, q * length, k[:, places], share)
    wanted = round(share * keys)
    assert bool(((kept.sum(1) - wanted).abs() <= 5 + 4.5 * math.sqrt(wanted)).all())


@pytest.mark.parametrize(("runs", "turns"), [(1024, 256), (2044, 512), (4094, 512), (16384, 256)])
@pytest.mark.parametrize("period", [2, 3, 4])
def test_of_text_that_repeats_itself_all_parts_are_sampled(runs: int, turns: int, period: int) -> None:
    taken = sampled_run_reference(torch.arange(turns), turns, runs)
    assert len(taken.unique()) == turns
    assert 0 <= int(taken.min()) <= int(taken.max()) < runs
    parts = (taken % period).bincount(minlength=period) * period / turns
    assert 0.6 < float(parts.min()) <= float(parts.max()) < 1.5


@triton.jit
def draws_kernel(
    shares_ptr: tl.tensor, drawn_ptr: tl.tensor, below_ptr: tl.tensor, head: tl.tensor, COUNT: tl.constexpr
) -> None:
    n = tl.arange(0, COUNT)
    tl.store(drawn_ptr + n, draw(n * 4 + 1, head))
    tl.store(below_ptr + n, draws_below(tl.load(shares_ptr + n)))


def test_draws_equal_their_reference_and_cover_a_share_evenly() -> None:
    shares = torch.cat([torch.tensor([0.0, 1.0, 1.5, -0.5]), torch.rand(60)]).to(DEVICE)
    drawn, below = (torch.empty(64, dtype=torch.int32, device=DEVICE) for _ in range(2))
    draws_kernel[(1,)](shares, drawn, below, 3, COUNT=64)
    assert torch.equal(drawn, draw_reference(torch.arange(64, device=DEVICE) * 4 + 1, 3))
    assert torch.equal(below, draws_below_reference(shares))
    places = torch.arange(5000)
    for share in (0.01, 0.3, 0.9):
        taken = draw_reference(places, 1) < draws_below_reference(torch.tensor(share))
        for begin, end in ((0, 500), (17, 2100), (4000, 5000)):
            assert abs(int(taken[begin:end].sum()) - share * (end - begin)) <= 3
