"""Prefill with approximate attention: blocks, jobs, manifests, and the clusters handed to indexes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from index_store.errors import InvalidArgumentError
from index_store.store.catalog import Store
from index_store.store.description.context_id import ModelIdentity
from prefill_worker.muse.ranges import RangeAttention, label_points, planned_bytes
from prefill_worker.muse.settings import MuseSettings
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.query_sample import plan_sample
from tests.prefill_worker.jobs.support_jobs import MakeConfig, run
from tests.prefill_worker.muse.muse_points import error, make_inputs

TOKENS, BLOCK = 333, 32
SMALL = MuseSettings(clusters=12, block=BLOCK, iterations=2)


def read_in_blocks(
    settings: MuseSettings, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, RangeAttention]:
    """What a context's queries get, what they get exactly, and the attention."""
    query, key, value = (x.to(device) for x in make_inputs(1, 4, 2, TOKENS, 16, dtype))
    attention = RangeAttention(settings, 1)
    found = read_by(attention, query, key, value)
    return found, scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True), attention


def read_by(attention: RangeAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    kv_EN2D = torch.stack([key[0], value[0]], dim=2)
    outs = []
    for start in range(0, TOKENS, BLOCK):
        end = min(TOKENS, start + BLOCK)
        block = query[0, :, start:end].unflatten(0, (2, 2))
        own = kv_EN2D[:, start:end]
        outs.append(attention.attend(0, block, start, own, lambda first, last: kv_EN2D[:, first:last]).out)
    return torch.cat(outs, dim=2).flatten(0, 1)[None]


def test_blocks_attend_to_all_before_them() -> None:
    found, exact, _ = read_in_blocks(MuseSettings(clusters=128, block=BLOCK, cap=8.0))
    assert error(found, exact) < 1e-4
    coarse, _, _ = read_in_blocks(SMALL)
    assert 1e-4 < error(coarse, exact) < 0.15
    plain, _, _ = read_in_blocks(MuseSettings(clusters=12, block=BLOCK, iterations=2, dipole=False))
    assert error(coarse, exact) < error(plain, exact)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_read_in_blocks(dtype: torch.dtype) -> None:
    found, exact, attention = read_in_blocks(MuseSettings(clusters=128, block=BLOCK, cap=8.0), "cuda", dtype)
    assert error(found, exact) < (1e-4 if dtype == torch.float32 else 0.02)
    coarse, _, _ = read_in_blocks(SMALL, "cuda", dtype)
    assert error(coarse, exact) < 0.15
    starts = attention.starts(0, 2, TOKENS)
    assert starts is not None
    assert starts.clusters_HN.is_cuda


def test_clusters_are_handed_over() -> None:
    _, _, attention = read_in_blocks(SMALL)
    starts = attention.starts(0, 2, TOKENS)
    assert starts is not None
    # Two heads of a group, eight blocks with 12 means and less in the last one, which has 13 queries.
    assert starts.queries_HXD.shape == (2, 2 * 8 * 12, 16)
    labels = starts.clusters_HN
    assert (labels[:, : 10 * BLOCK] >= 0).all()
    assert (labels[:, 10 * BLOCK :] == -1).all()
    assert len(set(labels[0, : 8 * BLOCK].tolist())) == 12
    assert len(set(labels[0, : 10 * BLOCK].tolist())) == 24  # clusters of two ranges
    attention.release(0)
    assert attention.starts(0, 2, TOKENS) is None


def held_bytes(kept: object) -> int:
    """Memory of all tensors in what is kept, in lists, dictionaries and dataclasses."""
    if isinstance(kept, Tensor):
        return kept.nbytes
    if isinstance(kept, list | dict):
        return sum(map(held_bytes, kept.values() if isinstance(kept, dict) else kept))
    if is_dataclass(kept):
        return sum(held_bytes(getattr(kept, field.name)) for field in fields(kept))
    return held_bytes(vars(kept)) if isinstance(kept, RangeAttention) else 0


@pytest.mark.parametrize("settings", [SMALL, MuseSettings(clusters=5, block=16, dipole=False)])
def test_what_a_layer_keeps_was_planned(settings: MuseSettings) -> None:
    """333 tokens end with two ranges of blocks of 32, and with two of 16 (20 blocks before the last)."""
    model = ModelIdentity("m", "llama", "0", "0", 1, 4, 2, 16, 100, 1000)
    query, key, value = make_inputs(1, 4, 2, TOKENS, 16, torch.float32)
    kv = torch.stack([key[0], value[0]], dim=2)
    attention = RangeAttention(settings, 1)
    most = 0
    for start in range(0, TOKENS, settings.block):
        block = slice(start, start + settings.block)
        attention.attend(
            0, query[0, :, block].unflatten(0, (2, 2)), start, kv[:, block], lambda a, b: kv[:, a:b]
        )
        most = max(most, held_bytes(attention))
    planned = planned_bytes(settings, model, TOKENS, torch.float32)
    assert 0 < most <= planned < 4 * most


def test_labels_name_the_members() -> None:
    from prefill_worker.muse.kernels.clusters import find_clusters_reference

    points = make_inputs(1, 2, 2, 60, 4)[0].unsqueeze(2)
    found = find_clusters_reference(points, 7, 1.5, 1, 0)
    labels = label_points(found, 60)
    for problem in range(2):
        for cluster in range(7):
            members = found.members[problem, cluster][found.filled[problem, cluster]].long()
            assert (labels[problem, members] == cluster).all()
            assert int((labels[problem] == cluster).sum()) == len(members)


def test_a_pass_is_one_block() -> None:
    query, key, value = make_inputs(1, 2, 2, 40, 8, torch.float32)
    kv = torch.stack([key[0], value[0]], dim=2)
    attention = RangeAttention(MuseSettings(block=32), 1)
    for start, count in ((0, 40), (8, 8)):
        with pytest.raises(ValueError, match="not one block"):
            attention.attend(0, query[0, :, None, :count], start, kv[:, :count], lambda a, b: kv[:, a:b])


@pytest.mark.parametrize("kept_on_host", [False, True])
def test_capture_uses_it_for_the_context_and_not_for_prompts(kept_on_host: bool) -> None:
    identity = ModelIdentity("m", "llama", "0", "0", 1, 4, 2, 16, 100, 1000)
    query, key, value = make_inputs(1, 4, 2, TOKENS + 20, 16, torch.float32)
    plan = plan_sample(TOKENS, [20], 64, 0)
    block_tokens = 64 if kept_on_host else None
    attention = RangeAttention(SMALL, 1)
    capture = Capture(identity, TOKENS, torch.float32, plan, "cpu", block_tokens, attention)
    told: list[bool] = []

    def passed(layer: int, start: int, count: int) -> None:
        if start + count == TOKENS:
            told.append(capture.cluster_starts(layer) is not None)

    capture.when_passed(passed)
    outs = []
    for start in range(0, TOKENS, BLOCK):
        end = min(TOKENS, start + BLOCK)
        capture.begin_context_chunk(start, end - start)
        outs.append(capture.attend(0, *(x[0, :, start:end] for x in (query, key, value))))
    assert told == [True]
    found = torch.cat(outs).transpose(0, 1)[None]
    torch.testing.assert_close(found, read_by(RangeAttention(SMALL, 1), query, key, value))
    capture.begin_prompt_chunk(0, 0, 20)
    prompt = capture.attend(0, *(x[0, :, TOKENS:] for x in (query, key, value)))
    exact = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(prompt.transpose(0, 1), exact[0, :, TOKENS:])
    capture.close()


def test_a_job_says_how_it_attended(make_config: MakeConfig) -> None:
    exact = run(make_config()).manifest
    muse = {"attention": "muse", "muse_block": 64, "muse_clusters": 8}
    found = run(make_config(**muse)).manifest
    assert exact.prefill["attention"] == "exact"
    assert found.id != exact.id
    assert found.prefill["attention"] == "muse"
    assert found.prefill["muse_block"] == found.prefill["chunk"] == 64
    assert found.prefill["muse_dipole"] is True
    other = run(make_config(**muse, muse_dipole=False)).manifest
    assert len({found.id, other.id, exact.id}) == 3
    store = Store(make_config().store)
    with store.open(found.id) as context, store.open(exact.id) as whole:
        own, theirs = (c.array("kv", 1, 0).float() for c in (context, whole))
    assert torch.equal(own[:64], theirs[:64])
    assert error(own, theirs) > 0
    again = run(make_config(**muse, chunk=50))
    assert not again.created


def test_settings_are_checked(make_config: MakeConfig) -> None:
    for changes, part in (
        ({"attention": "fast"}, "--attention"),
        ({"muse_block": 512}, "--attention muse"),
        ({"attention": "muse", "muse_clusters": 500}, "clusters"),
        ({"attention": "muse", "muse_cap": 0.5}, "cap"),
    ):
        with pytest.raises(InvalidArgumentError, match=part):
            make_config(**changes)
