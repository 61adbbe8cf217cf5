"""Partial attention: its merge, and what fused kernels return."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import (
    attend_fused,
    attend_fused_backward,
    attend_to_all,
    attend_to_themselves,
)


def attend(logits: torch.Tensor, values: torch.Tensor) -> AttentionState:
    return AttentionState(logits.softmax(-1) @ values, logits.logsumexp(-1))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    cuts=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    scale=st.floats(0.1, 30),
)
def test_merge_of_any_split_in_any_grouping_is_full_attention(
    seed: int, cuts: tuple[int, int], scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 2, 30, generator=generator) * scale
    values = torch.randn(3, 30, 5, generator=generator)
    low, high = sorted(cuts)
    parts = [
        attend(logits[..., a:b], values[:, a:b]) if b > a else AttentionState.empty((3, 2), 5)
        for a, b in ((0, low), (low, high), (high, 30))
    ]
    whole = attend(logits, values)
    for merged in (
        parts[0].merge(parts[1]).merge(parts[2]),
        parts[0].merge(parts[1].merge(parts[2])),
        parts[2].merge(parts[0]).merge(parts[1]),
    ):
        torch.testing.assert_close(merged.out, whole.out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-5, atol=1e-5)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CASES = [
    ("cpu", torch.float32, False),
    ("cpu", torch.bfloat16, False),
    *(
        pytest.param("cuda", dtype, cudnn, marks=ON_GPU)
        for dtype, cudnn in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    ),
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def textbook(queries_HGTD: Tensor, kv_HN2D: Tensor, causal: bool) -> AttentionState:
    keys, values = kv_HN2D.double().unbind(2)
    logits = torch.einsum("hgtd,hnd->hgtn", queries_HGTD.double(), keys) * queries_HGTD.shape[-1] ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    return AttentionState(torch.einsum("hgtn,hnd->hgtd", logits.softmax(-1), values), logits.logsumexp(-1))


def assert_states_close(found: AttentionState, expected: AttentionState, dtype: torch.dtype) -> None:
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    assert found.out.dtype == dtype
    torch.testing.assert_close(found.out.double(), expected.out, **near)
    torch.testing.assert_close(found.lse.double(), expected.lse, **near)


@pytest.mark.parametrize(("device", "dtype", "cudnn"), CASES)
@pytest.mark.parametrize(("group", "count"), [(1, 1), (3, 33), (2, 70)])
def test_queries_attend_to_all_keys_and_to_themselves(
    device: str, dtype: torch.dtype, cudnn: bool, group: int, count: int
) -> None:
    torch.manual_seed(count)
    queries = torch.randn(2, group, count, 64, device=device).to(dtype)
    past = torch.randn(2, 100, 2, 64, device=device).to(dtype).float()  # converted to the queries' dtype
    own = torch.randn(2, count, 2, 64, device=device).to(dtype)
    to_all = attend_to_all(queries, past, cudnn=cudnn)
    assert_states_close(to_all, textbook(queries, past, causal=False), dtype)
    to_themselves = attend_to_themselves(queries, own, cudnn=cudnn)
    assert_states_close(to_themselves, textbook(queries, own, causal=True), dtype)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=ON_GPU),
        pytest.param("cuda", torch.bfloat16, marks=ON_GPU),
    ],
)
def test_the_backward_pass_is_that_of_the_formula(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 40, 64, device=device).to(dtype) for _ in range(3)]
    grad = torch.randn_like(inputs[0])
    state = attend_fused(*inputs, causal=True, scale=0.3, cudnn=True)
    found = attend_fused_backward(grad, *inputs, state, 0.3)
    leaves = [x.double().requires_grad_() for x in inputs]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3)
    expected = torch.autograd.grad(out, leaves, grad.double())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_in_place_is_merging(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one = AttentionState(torch.randn(3, 5, 8), torch.tensor([0.0, 3.0, -torch.inf]).unsqueeze(1).expand(3, 5))
    other = AttentionState(
        torch.randn(3, 5, 8).to(dtype), torch.tensor([1.0, -torch.inf, -torch.inf])[:, None]
    )
    expected = one.merge(AttentionState(other.out.float(), other.lse))
    memory = one.out.data_ptr()
    found = one.merge_(other)
    assert found.out.data_ptr() == memory
    torch.testing.assert_close(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)
