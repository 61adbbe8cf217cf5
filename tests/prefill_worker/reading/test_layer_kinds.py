"""Prefill of models with sliding windows, learnt sinks, capped logits, other scales: what it keeps and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from index_store.errors import ModelUnsupportedError
from index_store.models.loading import LoadedModel, load_model, resolve_model
from prefill_worker.reading import prefill
from prefill_worker.reading.capture import Capture, register_attention
from prefill_worker.reading.prefill import check_capture, run_context, run_prompts
from prefill_worker.reading.query_sample import plan_sample
from tests.support.models import LAYER_KINDS, write_model_folder

IDS = torch.randint(3, 259, (90,), generator=torch.Generator().manual_seed(1)).tolist()


def load(folder: Path, kind: str) -> LoadedModel:
    family, settings = LAYER_KINDS[kind]
    folder = write_model_folder(folder, family, layers=3, **settings)
    return load_model(resolve_model(str(folder)), register_attention())


def capture_of(
    loaded: LoadedModel, ids: list[int], chunk: int, prompts: tuple[int, ...] = (), block: int | None = None
) -> Capture:
    plan = plan_sample(len(ids), prompts, 1000, 0)
    capture = Capture(loaded.identity, len(ids), torch.float32, plan, block_tokens=block)
    run_context(loaded.model, capture, ids, chunk)
    return capture


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_chunks_give_what_the_model_itself_computes(tmp_path: Path, kind: str) -> None:
    loaded = load(tmp_path, kind)
    check_capture(loaded)  # raises where it does not
    model = loaded.identity
    whole, chunks = capture_of(loaded, IDS, 1000), capture_of(loaded, IDS, 7)
    for layer in range(model.layers):
        kept = model.shape(layer).kept(len(IDS))
        assert whole.kv(layer).shape == (model.kv_heads, kept, 2, model.head_dim)
        torch.testing.assert_close(chunks.kv(layer), whole.kv(layer), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["windows", "sinks", "caps", "states"])
def test_prompts_after_the_context_see_its_window_and_leave_no_trace(tmp_path: Path, kind: str) -> None:
    loaded = load(tmp_path, kind)
    context, prompt = IDS[:50], IDS[50:]
    capture = capture_of(loaded, context, 20, (len(prompt),))
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
    loaded = load(tmp_path, "windows")
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
    loaded = load(tmp_path / "model", "windows")
    window = loaded.identity.window
    assert window is not None

    class Forgetful(Capture):
        def __init__(self, identity, *rest):  # type: ignore[no-untyped-def]
            super().__init__(replace(identity, window=replace(window, size=window.size - 4)), *rest)

    monkeypatch.setattr(prefill, "Capture", Forgetful)
    with pytest.raises(ModelUnsupportedError, match=r"prefill here \(keys and values of layer 1\) differ by"):
        check_capture(loaded)
