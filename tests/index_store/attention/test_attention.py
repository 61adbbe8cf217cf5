"""Attention: merged parts, fused kernels, compiled loops over lists and tails, lists that all heads share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from index_store.attention import fused, selected_keys
from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm
from index_store.attention.fused import (
    Division,
    attend_divided,
    attend_fused,
    attend_fused_backward,
    attend_many,
    attend_masked,
    attend_recent,
    attend_to_all,
    attend_to_themselves,
    attend_window,
    divide_past,
    division_on,
    prepare_many,
)
from index_store.attention.listed_keys_numba import (
    Listed,
    attend_context,
    attend_context_reference,
    attend_listed,
    attend_listed_reference,
    readable,
)
from index_store.attention.rows_in_line_numba import pooled_weights, pooled_weights_reference
from index_store.attention.selected_keys import attend_selected
from tests.support.devices import crossed


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


ON_GPU = pytest.mark.gpu
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


@crossed(
    {
        "dtype": [torch.float32, torch.bfloat16],
        "heads": [1, 2],
        "rows": [1, 63, 64, 100, 500],
        "count": [1, 63, 100, 128, 500],
    }
)
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


def formula(
    queries_HGTD: Tensor,
    kv_HS2D: Tensor,
    first: int,
    window: int | None,
    cap: float | None,
    dropped: int | None = None,
) -> AttentionState:
    """dropped: in chunks, and so many keys are not there any more that came before."""
    keys, values = kv_HS2D.double().unbind(2)
    logits = torch.einsum("hgtd,hsd->hgts", queries_HGTD.double(), keys) * keys.shape[-1] ** -0.5
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    count, many = queries_HGTD.shape[2], kv_HS2D.shape[1]
    ages = first + torch.arange(count)[:, None] - torch.arange(many)
    unseen = ages < 0
    if window is not None and dropped is not None:
        places = dropped + torch.arange(many)
        unseen |= (dropped + first + torch.arange(count))[:, None] // window != places // window
    elif window is not None:
        unseen |= ages >= window
    logits.masked_fill_(unseen, -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)
    return AttentionState(
        torch.einsum("hgts,hsd->hgtd", weights, values).float(), logits.logsumexp(-1).float()
    )


def assert_same(found: AttentionState, expected: AttentionState) -> None:
    torch.testing.assert_close(found.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "before", "window"),
    [
        (1, 0, 4),
        (1, 10, 4),
        (7, 0, 4),
        (7, 2, 4),
        (7, 3, 4),
        (7, 9, 4),
        (20, 0, 64),
        (63, 70, 16),
        (10, 5, 1),
        (9, 1, 2),
    ],
)
def test_a_window_equals_the_formula(tokens: int, before: int, window: int) -> None:
    generator = torch.Generator().manual_seed(tokens + before)
    queries = torch.randn(2, 3, tokens, 16, generator=generator)
    kv = torch.randn(2, before + tokens, 2, 16, generator=generator)
    expected = formula(queries, kv, before, window, None)
    assert_same(attend_window(queries, kv, window), expected)
    assert_same(attend_masked(queries, kv, before, window), expected)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cap", [None, 0.7])
def test_masks_and_caps_equal_the_formula(
    window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some queries see no key, and where keys come in several blocks."""
    monkeypatch.setattr("index_store.attention.fused._LOGIT_BYTES", 4 * 2 * 3 * 30 * 7)
    generator = torch.Generator().manual_seed(3)
    queries, kv = (torch.randn(shape, generator=generator) for shape in ((2, 3, 30, 16), (2, 25, 2, 16)))
    for first in (-4, 0, 24):
        found = attend_masked(queries, kv, first, window, cap)
        assert_same(found, formula(queries, kv, first, window, cap))


@crossed(
    {
        "cap": [None, 2.0],
        "dropped": [0, 3, 4, 13],
        "tokens, before": [(1, 4), (1, 7), (9, 4), (23, 7), (23, 0)],
    }
)
def test_chunks_equal_the_formula(tokens: int, before: int, dropped: int, cap: float | None) -> None:
    """Wherever in a chunk the queries begin and end, and whatever is there of those before."""
    before = (
        before if dropped + before > 8 else 8 - dropped + before
    )  # a whole chunk at least, or all there is
    torch.manual_seed(tokens)
    queries, rows = torch.randn(2, 3, tokens, 16), torch.randn(2, before + tokens, 2, 16)
    found = attend_recent(queries, rows, 8, dropped + before, chunked=True, cap=cap)
    assert_same(found, formula(queries, rows, before, 8, cap, dropped))


def test_a_sink_is_one_more_logit_without_a_value() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 4, 3, 9, generator=generator)
    values, sinks = torch.randn(2, 9, 8, generator=generator), torch.randn(2, 3, generator=generator)
    state = AttentionState(torch.einsum("htgs,hsd->htgd", logits.softmax(-1), values), logits.logsumexp(-1))
    found = LogitForm(sink_HG=sinks).add_sink(state)
    joined = torch.cat([logits, sinks[:, None, :, None].expand(-1, 4, -1, -1)], dim=-1)
    expected = torch.einsum("htgs,hsd->htgd", joined.softmax(-1)[..., :-1], values)
    torch.testing.assert_close(found.out, expected)
    torch.testing.assert_close(found.lse, joined.logsumexp(-1))


H, G = 3, 2


SESSIONS = 4


def sessions(count: int, head_dim: int, dtype: torch.dtype) -> Listed:
    """They have 5 to 80 keys of their own, and list seven more of those before their window than the one before."""
    numbers = range(SESSIONS)
    generator = torch.Generator().manual_seed(count)
    sinks = min(4, count)
    begins = [max(count - 3 + 20 * number, sinks) for number in numbers]
    wanted = [min(7 * number, begins[number] - sinks) for number in numbers]
    ids = torch.full((H, SESSIONS, max(wanted) + 2), 99_999, dtype=torch.int32)  # which no row counts
    counts = torch.zeros(H, SESSIONS, dtype=torch.int32)
    for number in numbers:
        for head in range(H):
            order = torch.randperm(begins[number] - sinks, generator=generator)[: wanted[number]]
            ids[head, number, : wanted[number]] = order.sort().values + sinks
        counts[:, number] = torch.tensor([wanted[number], max(0, wanted[number] - 1), 0])
    shape = (H, SESSIONS, G)
    others = AttentionState(
        torch.randn(*shape, head_dim, generator=generator), torch.randn(shape, generator=generator)
    )
    others.lse[:, ::2] = -torch.inf
    others.out[:, ::2] = 0
    tails = [
        torch.randn(H, 90, 2, head_dim, generator=generator).to(dtype)[:, : 5 + 25 * number]
        for number in numbers
    ]
    queries = 3 * head_dim**-0.5 * torch.randn(*shape, head_dim, generator=generator)
    return Listed(queries, tails, ids, counts, [sinks] * SESSIONS, begins, others)


@crossed(
    {
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "head_dim": [40, 64],
        "count": [3, 63, 500],
    }
)
def test_attention_equals_the_reference_and_depends_on_no_other_session(
    count: int, head_dim: int, dtype: torch.dtype
) -> None:
    context = torch.randn(H, count + 5, 2, head_dim, generator=torch.Generator().manual_seed(9)).to(dtype)
    context = context[:, :count]  # with room behind the rows of a head
    listed = sessions(count, head_dim, dtype)
    before = listed.others.out.clone()
    together, expected = attend_listed(context, listed), attend_listed_reference(context, listed)
    torch.testing.assert_close(together.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.lse, expected.lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(listed.others.out, before)
    for number in range(SESSIONS):
        alone = attend_listed(context, listed.of(number))
        assert torch.equal(alone.out[:, 0], together.out[:, number])
        assert torch.equal(alone.lse[:, 0], together.lse[:, number])


def rows(count: int, head_dim: int, dtype: torch.dtype, slack: int = 5) -> torch.Tensor:
    """Of a buffer with room behind every head's."""
    generator = torch.Generator().manual_seed(count)
    buffer = torch.randn(H, count + slack, 2, head_dim, generator=generator).to(dtype)
    buffer[:, count:] = torch.nan
    return buffer[:, :count]


@crossed(
    {
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "head_dim": [16, 40, 96, 128],
        "context, tail": [(1, 0), (63, 5), (500, 100)],
        "positions": [1, 4],
    }
)
def test_attention_of_positions_equals_that_to_gathered_rows(
    dtype: torch.dtype, head_dim: int, context: int, tail: int, positions: int
) -> None:
    generator = torch.Generator().manual_seed(context)
    queries = torch.randn(H, positions, G, head_dim, generator=generator)
    order = torch.rand(H, positions, context + tail, generator=generator).argsort(-1)
    counts = torch.randint(0, context + tail + 1, (H, positions), generator=generator)
    counts[0, 0], counts[1, 0] = 0, context + tail
    kv, own, end = rows(context, head_dim, dtype), rows(tail, head_dim, dtype), context + tail
    listed = Listed.of_positions(queries, own, end, order.int(), counts.int())
    found, expected = attend_listed(kv, listed), attend_listed_reference(kv, listed)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    last = Listed.of_positions(queries[:, -1:, :1], own, end, order[:, -1:], counts[:, -1:])
    alone = attend_listed(kv, last)
    assert torch.equal(alone.out, found.out[:, -1:, :1])


@pytest.mark.parametrize(("threads", "count"), [(1, 2100), (2, 5000), (8, 5000), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_context_is_read_for_all_sessions_at_once(
    threads: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("index_store.attention.listed_keys_numba.thread_count", lambda: threads)
    kv = rows(count, 40, dtype)
    queries = 3 * 40**-0.5 * torch.randn(H, 7, G, 40, generator=torch.Generator().manual_seed(1))
    found, expected = attend_context(kv, queries), attend_context_reference(kv, queries)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    for number in (0, 3, 6):
        alone = attend_context(kv, queries[:, number : number + 1])
        assert torch.equal(alone.out[:, 0], found.out[:, number])
        assert torch.equal(alone.lse[:, 0], found.lse[:, number])


def test_far_apart_logits_are_attended_to_without_overflow() -> None:
    kv = torch.zeros(1, 200, 2, 16)
    kv[0, :, 0, 0] = torch.linspace(-1000, 1000, 200)
    kv[0, :, 1, 3] = torch.arange(200.0)
    ids = torch.arange(200, dtype=torch.int32).view(1, 1, -1)
    counts = torch.tensor([[200]])
    state = attend_listed(kv, Listed.of_positions(torch.ones(1, 1, 1, 16), kv[:, :0], 200, ids, counts))
    assert state.out[0, 0, 0, 3] == pytest.approx(199.0, abs=1e-3)
    assert state.lse.item() == pytest.approx(1000.0)


HEADS, GROUP, COUNT = 2, 3, 40
TAILS = (1, 7, 70, 16)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def of_sessions(q_HSGD: Tensor, kvs: list[Tensor]) -> AttentionState:
    """Attention of each session to its keys and values [H, n, 2, d]; 0 and -inf where there are none."""
    states = []
    for session, kv in enumerate(kvs):
        logits = torch.einsum("hgd,hnd->hgn", q_HSGD[:, session].double(), kv[:, :, 0].double())
        out = torch.einsum("hgn,hnd->hgd", logits.softmax(-1), kv[:, :, 1].double())
        states.append((out.float(), logits.logsumexp(-1).float()))
    return AttentionState(
        torch.stack([out for out, _ in states], 1), torch.stack([lse for _, lse in states], 1)
    )


@crossed(
    {
        "head_dim": [32, 64, 128],
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "count": [COUNT, 0],
    }
)
def test_tails_are_added_to_what_the_context_gave(head_dim: int, dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(head_dim + count)
    rows = torch.randn(HEADS, 100, 2, head_dim, generator=generator).to(dtype)
    context = rows[:, :count]
    kept = torch.randn(len(TAILS), HEADS, 90, 2, head_dim, generator=generator).to(dtype)
    tails = [each[:, :length] for each, length in zip(kept, TAILS, strict=True)]
    q = torch.randn(HEADS, len(TAILS), GROUP, head_dim, generator=generator) * head_dim**-0.5
    given = of_sessions(q, [context] * len(TAILS))
    before = given.out.clone(), given.lse.clone()
    found = attend_listed(context, Listed.of_tails(q, tails, given, count))
    expected = of_sessions(q, [torch.cat([context, tail], dim=1) for tail in tails])
    torch.testing.assert_close(found.out, expected.out, **CLOSE)
    torch.testing.assert_close(found.lse, expected.lse, **CLOSE)
    assert torch.equal(given.out, before[0])
    assert torch.equal(given.lse, before[1])
    for session, tail in enumerate(tails):
        own = AttentionState(given.out[:, session : session + 1], given.lse[:, session : session + 1])
        alone = attend_listed(context, Listed.of_tails(q[:, session : session + 1], [tail], own, count))
        assert torch.equal(alone.out[:, 0], found.out[:, session])
        assert torch.equal(alone.lse[:, 0], found.lse[:, session])


def test_rows_that_the_loop_cannot_read_are_left_to_others() -> None:
    context, q = torch.zeros(HEADS, 5, 2, 64), torch.zeros(HEADS, 1, GROUP, 64)
    good = torch.zeros(HEADS, 3, 2, 64)
    assert readable(q, context, [good])
    for kv, tails in (
        (context, [good, good.bfloat16()]),
        (context, [good.transpose(0, 1).contiguous().transpose(0, 1)]),
        (context.double(), [good.double()]),
    ):
        assert not readable(q, kv, tails)


@pytest.mark.parametrize("count", [1, 63, 1024, 20_000])
@pytest.mark.parametrize(("positions", "group"), [(1, 2), (3, 4)])
def test_it_equals_the_reference(count: int, positions: int, group: int) -> None:
    """Also of logits that are missing, of heads without any, and of weights too small for a float."""
    generator = torch.Generator().manual_seed(count)
    logits = 30 * torch.randn(2, positions, group, count, generator=generator)
    logits[:, :, 0, ::3] = -torch.inf
    logits[:, :, :, ::6] = -torch.inf
    logits[1, 0, 1] = -torch.inf
    logits[:, :, :, 1::6] -= 500
    found, expected = pooled_weights(logits), pooled_weights_reference(logits)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-30)
    assert torch.equal(found.isneginf(), torch.isneginf(logits).all(2))


def test_no_keys_have_no_weights() -> None:
    assert pooled_weights(torch.empty(2, 1, 3, 0)).shape == (2, 1, 0)


DIM = 8


def by_mask(
    q_HTGD: Tensor, kv_HN2D: Tensor, ids_TK: Tensor, position: int, form: LogitForm
) -> AttentionState:
    logits = form.capped(torch.einsum("htgd,hnd->htgn", q_HTGD, kv_HN2D[:, :, 0]))
    listed = torch.zeros(len(ids_TK), kv_HN2D.shape[1], dtype=torch.bool).scatter(1, ids_TK.long(), True)
    places = torch.arange(position, position + len(ids_TK))
    seen = listed & (torch.arange(kv_HN2D.shape[1]) <= places[:, None])
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    out = torch.einsum("htgn,hnd->htgd", logits.softmax(-1), kv_HN2D[:, :, 1])
    return form.add_sink(AttentionState(out, logits.logsumexp(-1)))


@pytest.mark.parametrize("cuts", [(40,), (31, 9), (0, 40), (12, 0, 28)])
@pytest.mark.parametrize(
    "form", [PLAIN, LogitForm(2.0, torch.linspace(-1, 1, HEADS * GROUP).view(HEADS, GROUP))]
)
def test_lists_give_what_a_mask_gives(
    monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], form: LogitForm
) -> None:
    """Over rows in several pieces, some at a time, with tokens in the lists that come later."""
    monkeypatch.setattr(selected_keys, "_ROW_BYTES", 5000)
    generator = torch.Generator().manual_seed(len(cuts))
    tokens, keys = 7, 40
    q_HTGD = torch.randn(HEADS, tokens, GROUP, DIM, generator=generator)
    kv_HN2D = torch.randn(HEADS, keys, 2, DIM, generator=generator)
    ids_TK = torch.stack([torch.randperm(keys, generator=generator)[:20] for _ in range(tokens)]).int()
    found = attend_selected(q_HTGD, kv_HN2D.split(cuts, dim=1), ids_TK, keys - tokens, form)
    expected = by_mask(q_HTGD, kv_HN2D, ids_TK, keys - tokens, form)
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.lse, expected.lse)


def test_there_is_no_list_of_no_keys() -> None:
    with pytest.raises(ValueError, match="no keys"):
        attend_selected(torch.zeros(1, 1, 1, 4), (), torch.zeros(1, 3), 0)
