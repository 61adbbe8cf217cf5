"""Reading a text: passes, causal attention, sampled queries; and windows, learnt sinks, capped logits, other scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from index_store.errors import ModelUnsupportedError
from index_store.indexes.key_clusters.build import undo_rotary
from index_store.models.loading import LoadedModel, load_model, resolve_model
from prefill_worker.reading import prefill
from prefill_worker.reading.capture import Capture, register_attention
from prefill_worker.reading.kept_layers import attend_causally
from prefill_worker.reading.prefill import check_capture, run_context, run_prompts
from prefill_worker.reading.query_sample import (
    JUDGED_QUERIES,
    judged_rows,
    late_rows,
    plan_sample,
    stored_rows,
)
from tests.support.devices import crossed
from tests.support.models import FAMILIES, LAYER_KINDS, write_model_folder

TOKENS = 157
RECORDING = "record_queries_then_sdpa"


def record_then_attend(
    module: torch.nn.Module, query: Tensor, *arguments: Any, recorded: list[Tensor], **options: Any
) -> Any:
    recorded.append(query[0])
    return sdpa_attention_forward(module, query, *arguments, **options)


def ids_of(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_pass(folder: Path, ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """(queries [Hq, N, d], keys and values [H, N, 2, d]) of every layer from transformers' own forward."""
    AttentionInterface.register(RECORDING, record_then_attend)
    model: Any = load_model(resolve_model(str(folder)), RECORDING).model
    recorded: list[Tensor] = []
    with torch.inference_mode():
        out = model(torch.tensor([ids]), use_cache=True, recorded=recorded)
    kv = [torch.stack([layer.keys[0], layer.values[0]], dim=2) for layer in out.past_key_values.layers]
    return recorded, kv


def capture_of(
    loaded: LoadedModel,
    ids: list[int],
    chunk: int,
    rows: int = 1000,
    *,
    prompts: Sequence[list[int]] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    block: int | None = None,
) -> Capture:
    plan = plan_sample(len(ids), [len(prompt) for prompt in prompts], rows, seed)
    capture = Capture(loaded.identity, len(ids), dtype, plan, block_tokens=block)
    run_context(loaded.model, capture, ids, chunk)
    return capture


def load(folder: Path) -> LoadedModel:
    return load_model(resolve_model(str(folder)), register_attention())


@crossed(
    {
        "family": FAMILIES,
        "chunk": [1, 50, TOKENS, 10_000],
    }
)
def test_chunks_give_what_one_pass_gives(tmp_path: Path, family: str, chunk: int) -> None:
    folder = write_model_folder(tmp_path / family, family)
    ids = ids_of(TOKENS)
    queries, kv = one_pass(folder, ids)
    capture = capture_of(load(folder), ids, chunk)
    for layer in range(2):
        torch.testing.assert_close(capture.kv(layer), kv[layer], rtol=1e-4, atol=1e-4)
        sample = capture.query_sample(layer)
        assert sample.positions_P.tolist() == list(range(TOKENS))
        expected = queries[layer].unflatten(0, (2, 2)).transpose(1, 2)
        torch.testing.assert_close(sample.queries_HPGD, expected, rtol=1e-4, atol=1e-4)


def test_a_bounded_sample_holds_the_queries_of_its_positions(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", "qwen3")
    ids = ids_of(400)
    queries, _ = one_pass(folder, ids)
    loaded = load(folder)
    capture = capture_of(loaded, ids, 37, rows=150)
    sample = capture.query_sample(1)
    positions = sample.positions_P
    assert len(positions) == 150
    assert bool((positions.diff() > 0).all())
    assert positions[-100:].tolist() == list(range(300, 400))
    expected = queries[1].unflatten(0, (2, 2))[:, :, positions].transpose(1, 2)
    torch.testing.assert_close(sample.queries_HPGD, expected, rtol=1e-4, atol=1e-4)
    same, other = (capture_of(loaded, ids, 400, rows=150, seed=seed) for seed in (0, 1))
    assert torch.equal(same.query_sample(0).positions_P, positions)
    assert not torch.equal(other.query_sample(0).positions_P, positions)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rotary_embedding_is_undone_by_the_models_frequencies(tmp_path: Path, family: str) -> None:
    """In the first layer equal tokens have equal keys wherever they stand, once the embedding is undone."""
    loaded = load(write_model_folder(tmp_path / family, family))
    frequencies = check_capture(loaded)
    assert frequencies is not None
    capture = capture_of(loaded, [*ids_of(30), *ids_of(30)], 60)
    keys = undo_rotary(capture.kv(0)[:, :, 0], 0, frequencies)
    torch.testing.assert_close(keys[:, :30], keys[:, 30:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(capture.kv(0)[:, :30, 0], capture.kv(0)[:, 30:, 0], atol=0.1)


@pytest.mark.parametrize("family", ["cohere", "glm", "smollm3"])
def test_a_rotary_embedding_of_another_form_has_no_frequencies(tmp_path: Path, family: str) -> None:
    """One turns neighbouring dimensions, one only half of them, one has layers without positions."""
    more = {"no_rope_layers": [1, 0]} if family == "smollm3" else {}
    assert check_capture(load(write_model_folder(tmp_path / family, family, **more))) is None


def test_calibration_prompts_add_queries_and_leave_no_trace(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    loaded = load(folder)
    ids, prompts = ids_of(90), [ids_of(23, seed=2), ids_of(11, seed=3)]
    capture = capture_of(loaded, ids, 32, prompts=prompts)
    before = [capture.kv(layer).clone() for layer in range(2)]
    run_prompts(loaded.model, capture, prompts, 8)
    sample = capture.query_sample(1)
    assert sample.positions_P.tolist() == sorted([*range(90), *range(90, 113), *range(90, 101)])
    for layer in range(2):
        assert torch.equal(capture.kv(layer), before[layer])
    found = sample.queries_HPGD[:, sample.positions_P >= 90]
    expected = []
    for prompt in prompts:
        queries, _ = one_pass(folder, ids + prompt)
        expected.append(queries[1].unflatten(0, (2, 2)).transpose(1, 2)[:, 90:])
    # Rows of equal position keep the order of the prompts.
    order = torch.tensor([*range(23), *range(11)]).argsort(stable=True)
    torch.testing.assert_close(found, torch.cat(expected, dim=1)[:, order], rtol=1e-4, atol=1e-4)


def test_calibration_queries_are_bounded_too() -> None:
    plan = plan_sample(1000, [300, 0, 500], rows=100, seed=4)
    assert sum(len(kept) for kept in plan.prompts) == 100
    assert all(bool((kept < length).all()) for kept, length in zip(plan.prompts, [300, 0, 500], strict=True))
    assert min(len(plan.prompts[0]), len(plan.prompts[2])) > 20


def test_later_tokens_attend_to_keys_as_stored(tmp_path: Path) -> None:
    """Rounding must not depend on the chunk: a token sees its own chunk rounded as well."""
    folder = write_model_folder(tmp_path / "model")
    loaded, ids = load(folder), ids_of(120)
    coarse, fine = (capture_of(loaded, ids, chunk, dtype=torch.bfloat16) for chunk in (120, 13))
    exact = capture_of(loaded, ids, 120)
    difference = (coarse.kv(1).float() - fine.kv(1).float()).abs().mean()
    rounding = (coarse.kv(1).float() - exact.kv(1)).abs().mean()
    assert difference < 0.02 * rounding


class LargestResult(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made._base is None and not func.is_view:
                self.elements = max(self.elements, made.numel())
        return result


@pytest.mark.parametrize("query_heads", [4, 16])
def test_no_tensor_grows_with_tokens_and_heads(tmp_path: Path, query_heads: int) -> None:
    """Scores of one chunk would be chunk * N * query heads elements; nothing near that may exist."""
    folder = write_model_folder(tmp_path / "model", query_heads=query_heads, head_dim=8)
    loaded, chunk = load(folder), 128
    largest = {}
    for tokens in (1024, 4096):
        plan = plan_sample(tokens, [], 64, 0)
        capture = Capture(loaded.identity, tokens, torch.bfloat16, plan)
        with LargestResult() as made:
            run_context(loaded.model, capture, ids_of(tokens), chunk)
        largest[tokens] = made.elements
    past_kv, scores = 4096 * 2 * 2 * 8, chunk * 4096
    assert largest[4096] <= past_kv < scores
    per_pass = chunk * max(128, query_heads * 8)
    assert largest[1024] <= max(1024 * 2 * 2 * 8, per_pass)


def test_released_layers_are_gone(tmp_path: Path) -> None:
    loaded = load(write_model_folder(tmp_path / "model"))
    capture = capture_of(loaded, ids_of(20), 20)
    capture.release(0)
    with pytest.raises(ValueError, match="released"):
        capture.kv(0)
    with pytest.raises(ValueError, match="released"):
        capture.query_sample(0)
    assert capture.kv(1).shape == (2, 20, 2, 16)


def textbook(queries_HGTD: Tensor, past_HS2D: Tensor, chunk_HT2D: Tensor) -> Tensor:
    keys, values = torch.cat([past_HS2D, chunk_HT2D], dim=1).double().unbind(2)
    count, dim = queries_HGTD.shape[2:]
    logits = torch.einsum("hgtd,hsd->hgts", queries_HGTD.double(), keys) * dim**-0.5
    future = torch.ones(count, keys.shape[1], dtype=torch.bool).triu(past_HS2D.shape[1] + 1)
    return torch.einsum("hgts,hsd->hgtd", logits.masked_fill(future, -torch.inf).softmax(-1), values)


@crossed(
    {
        "heads_and_group": [(1, 1), (2, 3), (4, 1)],
        "past, count": [(0, 1), (0, 63), (1, 1), (100, 1), (100, 63), (500, 17)],
    }
)
def test_equals_the_formula(heads_and_group: tuple[int, int], past: int, count: int) -> None:
    torch.manual_seed(past + count)
    heads, group = heads_and_group
    queries = torch.randn(heads, group, count, 16) * 3
    past_kv, chunk = torch.randn(heads, past, 2, 16), torch.randn(heads, count, 2, 16)
    expected = textbook(queries, past_kv, chunk).float()
    torch.testing.assert_close(attend_causally(queries, [past_kv], chunk).out, expected, rtol=2e-5, atol=2e-6)
    pieces = [past_kv[:, : past // 3], past_kv[:, past // 3 :]]
    torch.testing.assert_close(
        attend_causally(queries, pieces, chunk, past_block=7).out, expected, rtol=2e-5, atol=2e-6
    )


def test_stored_half_precision_is_read_as_stored() -> None:
    torch.manual_seed(0)
    queries, past, chunk = torch.randn(2, 2, 9, 32), torch.randn(2, 50, 2, 32), torch.randn(2, 9, 2, 32)
    rounded = attend_causally(queries, [past.bfloat16()], chunk.bfloat16()).out
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(
        rounded, textbook(queries, past.bfloat16(), chunk.bfloat16()).float(), rtol=2e-5, atol=2e-6
    )


def positions(tokens: int, prompts: tuple[int, ...], rows: int) -> Tensor:
    """Of a sample, as a capture orders them."""
    plan = plan_sample(tokens, prompts, rows, seed=0)
    return torch.cat([plan.context_P, *(kept + tokens for kept in plan.prompts)]).sort().values


@pytest.mark.parametrize(
    ("tokens", "prompts", "rows"),
    [(1, (), 64), (60, (), 64), (130, (), 64), (5000, (), 4096), (5000, (40, 300), 256)],
)
def test_stored_are_the_last_positions_and_others_spread_over_the_rest(
    tokens: int, prompts: tuple[int, ...], rows: int
) -> None:
    sampled = positions(tokens, prompts, rows)
    found = sampled[stored_rows(sampled, tokens)].tolist()
    assert found == sorted(found)
    assert found[0] == int(sampled[0])
    last = range(max(0, tokens - 64), tokens)
    assert set(last) <= set(found)
    assert len(found) == min(len(sampled), len(last) + 64)
    assert int(sampled[-1]) == found[-1]
    if not prompts:
        assert len(set(found)) == len(found)
    else:
        assert sum(position >= tokens for position in found) == 32
        assert sum(position < tokens - 64 for position in found) == 32


def test_late_are_the_last_hundred_of_the_context_and_of_the_prompts() -> None:
    sampled = positions(5000, (40, 300), 256)
    found = sampled[late_rows(sampled, 5000)]
    assert found[found < 5000].tolist() == list(range(4900, 5000))
    assert int((found >= 5000).sum()) == 100
    short = positions(30, (3,), 64)
    assert sorted(short[late_rows(short, 30)].tolist()) == list(range(33))


@pytest.mark.parametrize(("count", "judged"), [(1, 1), (5, 5), (48, 48), (60, 30), (96, 48), (1000, 48)])
def test_judged_rows_are_late_and_distinct(count: int, judged: int) -> None:
    rows = judged_rows(torch.arange(count)).tolist()
    assert len(rows) == len(set(rows)) == judged
    assert rows[-1] == count - 1
    if count > JUDGED_QUERIES:
        assert rows[0] >= count // 2


IDS = ids_of(90)


def load_kind(folder: Path, kind: str) -> LoadedModel:
    family, settings = LAYER_KINDS[kind]
    return load(write_model_folder(folder, family, layers=3, **settings))


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_chunks_give_what_the_model_itself_computes(tmp_path: Path, kind: str) -> None:
    loaded = load_kind(tmp_path, kind)
    check_capture(loaded)  # raises where it does not
    model = loaded.identity
    whole, chunks = capture_of(loaded, IDS, 1000), capture_of(loaded, IDS, 7)
    for layer in range(model.layers):
        kept = model.shape(layer).kept(len(IDS))
        assert whole.kv(layer).shape == (model.kv_heads, kept, 2, model.head_dim)
        torch.testing.assert_close(chunks.kv(layer), whole.kv(layer), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["windows", "sinks", "caps", "states"])
def test_prompts_after_the_context_see_its_window_and_leave_no_trace(tmp_path: Path, kind: str) -> None:
    loaded = load_kind(tmp_path, kind)
    context, prompt = IDS[:50], IDS[50:]
    capture = capture_of(loaded, context, 20, prompts=[prompt])
    layers = range(loaded.identity.layers)
    before = [capture.kv(layer).clone() for layer in layers]
    state = capture.packed_state(torch.float32)
    run_prompts(loaded.model, capture, [prompt], 9)
    assert all(torch.equal(capture.kv(layer), before[layer]) for layer in layers)
    if state is not None:
        assert torch.equal(torch.as_tensor(capture.packed_state(torch.float32)), state)
    (layer,) = loaded.identity.full_layers
    expected = capture_of(loaded, IDS, 1000).query_sample(layer)
    found = capture.query_sample(layer)
    torch.testing.assert_close(found.queries_HPGD, expected.queries_HPGD, rtol=1e-3, atol=1e-3)


def test_windows_stay_on_the_device_where_other_layers_do_not(tmp_path: Path) -> None:
    loaded = load_kind(tmp_path, "windows")
    beside, on_device = (capture_of(loaded, IDS, 20, block=block) for block in (16, None))
    for layer in range(3):
        torch.testing.assert_close(beside.kv(layer), on_device.kv(layer), rtol=1e-5, atol=1e-5)
    for layer in range(3):
        beside.release(layer)
        with pytest.raises(ValueError, match="released"):
            beside.kv(layer)
    beside.close()


def test_a_capture_that_sees_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = load_kind(tmp_path / "model", "windows")
    window = loaded.identity.window

    class Forgetful(Capture):
        def __init__(self, identity, *rest):  # type: ignore[no-untyped-def]
            super().__init__(replace(identity, window=replace(window, size=window.size - 4)), *rest)

    monkeypatch.setattr(prefill, "Capture", Forgetful)
    with pytest.raises(ModelUnsupportedError, match=r"prefill here \(keys and values of layer 1\) differ by"):
        check_capture(loaded)
