"""Attention of many queries, divided into calls of few shapes, equals attention in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from index_store.attention import fused
from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import (
    Division,
    attend_divided,
    attend_fused,
    attend_many,
    attend_to_all,
    divide_past,
    division_on,
    prepare_many,
)

SMALL = Division(rows=64, longest=128, shortest=32)
NEAR = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2}}


def make(heads: int, rows: int, count: int, dtype: torch.dtype, dim: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + count)
    queries = 3 * torch.randn(heads, rows, dim, generator=generator)
    return queries.to(dtype), torch.randn(heads, count, 2, dim, generator=generator).to(dtype)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 31, 32, 33, 100, 127])
def test_keys_are_divided_without_gaps_into_few_lengths(count: int) -> None:
    blocks = list(divide_past(count, 32, 8))
    assert [key for start, end in blocks for key in range(start, end)] == list(range(count))
    sizes = [end - start for start, end in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size in (8, 16, 32) for size in sizes[:-1])
    assert list(divide_past(count, 32, 32)) == [
        (start, min(start + 32, count)) for start in range(0, count, 32)
    ]


@pytest.mark.parametrize(
    ("heads", "dim", "processors", "rows", "longest"),
    [
        (8, 128, 132, 2048, 32_768),
        (8, 128, 114, 1792, 32_768),
        (4, 128, 132, 4224, 32_768),
        (32, 128, 132, 512, 8_192),
        (1, 64, 132, 16_896, 32_768),
        (48, 96, 148, 384, 4_096),  # 18 KiB a key: not quite 8,192 of them
        (256, 256, 132, 128, 512),
    ],
)
def test_the_division_fits_heads_and_processors(
    heads: int, dim: int, processors: int, rows: int, longest: int
) -> None:
    division = Division.of(heads, 4 * dim, processors)
    assert division == Division(rows, longest, longest // 4)
    assert division.lengths == (longest, longest // 2, longest // 4)
    assert all(size % 128 == 0 for size in (division.rows, *division.lengths))
    assert longest * heads * 4 * dim <= 128 * 2**20 or longest == 512


@pytest.mark.parametrize(
    ("heads", "rows", "count", "pays"),
    [
        (8, 4096, 131_072, True),  # 16 prompts of 64 tokens, 4 query heads for each KV head
        (8, 2048, 131_072, True),
        (8, 1536, 8_192, True),
        (8, 1535, 131_072, False),  # a wave that is less than three quarters full
        (8, 256, 131_072, False),
        (8, 4096, 8_191, False),  # no block of keys
        (32, 512, 131_072, False),  # copies outweigh the arithmetic
        (32, 1024, 131_072, True),
        (2, 4096, 131_072, False),
    ],
)
def test_divided_calls_pay_where_queries_fill_the_processors(
    heads: int, rows: int, count: int, pays: bool
) -> None:
    assert Division.of(heads, 512, 132).pays(rows, count) is pays


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("rows", [1, 63, 64, 100, 500])
@pytest.mark.parametrize("count", [1, 63, 100, 128, 500])
def test_divided_attention_is_attention(heads: int, rows: int, count: int, dtype: torch.dtype) -> None:
    queries, kv = make(heads, rows, count, dtype)
    expected = attend_to_all(queries[:, :, None], kv)
    kv_before = kv.clone()
    found = attend_divided(queries, kv, SMALL)
    assert found.out.dtype == found.lse.dtype == torch.float32
    torch.testing.assert_close(found.out, expected.out[:, :, 0].float(), **NEAR[dtype])
    torch.testing.assert_close(found.lse, expected.lse[:, :, 0], **NEAR[dtype])
    assert torch.equal(kv, kv_before)


def test_everything_has_been_prepared_whatever_the_lengths_of_contexts_and_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shapes and strides are what cuDNN prepares for."""
    seen: set[Any] = set()
    lengths: list[int] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, cudnn: bool) -> AttentionState:
        if cudnn:
            seen.add(tuple((x.shape, x.stride()) for x in (query, key, value)))
        lengths.append(key.shape[2])
        return attend_fused(query, key, value, causal=causal)

    monkeypatch.setattr(fused, "attend_fused", attend)
    monkeypatch.setattr(fused, "division_on", lambda *_: SMALL)
    monkeypatch.setattr(fused, "_LEAST_ROWS", 48)
    for heads in (1, 2):
        assert prepare_many(heads, 16, torch.bfloat16, torch.device("cpu")) == len(SMALL.lengths)
    prepared = set(seen)
    assert len(prepared) == 2 * len(SMALL.lengths)
    for heads in (1, 2):
        for rows, count in ((70, 500), (64, 128), (130, 333), (64, 32)):
            queries, kv = make(heads, rows, count + 50, torch.bfloat16)
            grouped = queries.view(heads, 2, rows // 2, -1).transpose(1, 2)
            for part in (kv, kv[:, 17 : 17 + count], kv[:, :count].contiguous()):
                found, expected = attend_many(grouped, part), attend_to_all(grouped, part)
                torch.testing.assert_close(found.out, expected.out.float(), **NEAR[torch.bfloat16])
                torch.testing.assert_close(found.lse, expected.lse, **NEAR[torch.bfloat16])
    assert seen == prepared
    assert min(lengths) < SMALL.shortest  # the rest goes elsewhere


def test_a_device_without_such_a_kernel_attends_in_one_call() -> None:
    queries, kv = make(2, 100, 500, torch.bfloat16)
    assert division_on(kv, kv.dtype) is None
    assert prepare_many(2, 16, kv.dtype, torch.device("cpu")) == 0
    found, expected = attend_many(queries[:, :, None], kv), attend_to_all(queries[:, :, None], kv)
    assert found.out.dtype == torch.float32
    assert torch.equal(found.out, expected.out.float())
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "rows", "count"), [(8, 4096, 40_000), (8, 1600, 8_200), (8, 64, 9_000)])
def test_attention_of_many_queries_on_a_gpu(dtype: torch.dtype, heads: int, rows: int, count: int) -> None:
    queries, kv = (x.to("cuda") for x in make(heads, rows, count, dtype, dim=128))
    prepared = prepare_many(heads, 128, dtype, kv.device)
    assert prepared in (0, 3)
    found = attend_many(queries[:, :, None], kv)
    for row in (0, rows // 2, rows - 1):
        logits = torch.einsum("hd,hnd->hn", queries[:, row].float(), kv[:, :, 0].float()) * 128**-0.5
        out = torch.einsum("hn,hnd->hd", logits.softmax(-1), kv[:, :, 1].float())
        torch.testing.assert_close(found.out[:, row, 0], out, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(found.lse[:, row, 0], logits.logsumexp(-1), rtol=1e-2, atol=1e-2)
