"""Loaded models are compared with their own attention: what is read wrongly is found, and it is remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from index_store.attention.logit_form import PLAIN, LogitForm
from index_store.errors import ModelUnsupportedError
from index_store.models.attention_reading import LayerReading
from index_store.models.loading import LoadedModel, load_model, resolve_model
from index_store.models.self_check import Examination, Verdict, differ, examine, rotation_differs
from tests.support.models import LAYER_KINDS, write_model_folder


def load(folder: Path, kind: str) -> LoadedModel:
    family, settings = LAYER_KINDS[kind]
    return load_model(resolve_model(str(write_model_folder(folder, family, layers=3, **settings))), "eager")


def examined(loaded: LoadedModel) -> Examination:
    return examine(loaded.model, loaded.identity, loaded.readings, loaded.forms)


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_attention_as_it_was_read_is_the_models_own(tmp_path: Path, kind: str) -> None:
    seen = examined(load(tmp_path, kind))
    assert seen.difference is None
    assert len(seen.ids) == 96
    assert seen.logits_TV.std() > 0.1


def without_window(own: LayerReading) -> LayerReading:
    return replace(own, window=None)


def with_another_scale(own: LayerReading) -> LayerReading:
    return replace(own, scale=own.scale * 1.1)


@pytest.mark.parametrize(
    ("kind", "read", "form"),
    [
        ("windows", without_window, None),
        ("windows", with_another_scale, None),
        ("sinks", None, PLAIN),
        ("caps", None, PLAIN),
        ("caps", None, LogitForm(2.2)),
    ],
)
def test_what_is_read_wrongly_is_found(
    tmp_path: Path, kind: str, read: Callable[[LayerReading], LayerReading] | None, form: LogitForm | None
) -> None:
    loaded = load(tmp_path, kind)
    readings = loaded.readings if read is None else [read(own) for own in loaded.readings]
    forms = loaded.forms if form is None else [form] * len(loaded.forms)
    seen = examine(loaded.model, loaded.identity, readings, forms)
    assert seen.difference is not None
    assert "differ by" in seen.difference


def test_a_window_longer_than_the_text_is_made_smaller_for_it(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, "mistral", layers=2, sliding_window=1000)
    loaded = load_model(resolve_model(str(folder)), "eager")
    seen = examined(loaded)
    assert seen.difference is None
    assert seen.identity.window is not None
    assert seen.identity.window.size < 96
    assert loaded.model.config.sliding_window == 1000
    without = [replace(own, window=None) for own in loaded.readings]
    assert examine(loaded.model, loaded.identity, without, loaded.forms).difference is not None


def test_keys_show_how_they_are_rotated(tmp_path: Path) -> None:
    for kind, turned in (("experts", None), ("no positions", "keys of layer 1 are not rotated")):
        loaded = load(tmp_path / kind, kind)
        frequencies = loaded.model.model.rotary_emb.inv_freq
        why = rotation_differs(loaded.model, examined(loaded), frequencies, range(3))
        assert why is None if turned is None else turned in str(why)
        assert rotation_differs(loaded.model, examined(loaded), frequencies * 1.01, [0]) is not None


def test_verdicts_are_remembered_by_what_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = load(tmp_path / "model", "sinks")
    asked = []

    def check(seen: Examination) -> Verdict:
        asked.append(seen)
        return {"decoding": None, "also": "a reason"}

    for _ in range(2):
        assert loaded.verify("decoding", check)["also"] == "a reason"
    assert len(asked) == 1
    (file,) = (tmp_path / "cache" / "sparsekv" / "checks").iterdir()
    file.write_text("[]")  # damaged: found out anew
    loaded.verify("decoding", check)
    assert len(asked) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # where nothing can be written
    loaded.verify("decoding", check)
    loaded.verify("decoding", check)
    assert len(asked) == 4


def test_a_model_that_differs_is_refused_by_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = load(tmp_path / "model", "windows")
    wrong = replace(loaded, readings=[without_window(own) for own in loaded.readings])
    for _ in range(2):  # found out, and remembered
        with pytest.raises(ModelUnsupportedError, match="attention as its layers describe it differ by"):
            wrong.verify("prefill", lambda seen: {})
    with pytest.raises(ModelUnsupportedError, match="logits of decoding here are wrong"):
        loaded.verify("decoding", lambda seen: {"decoding": "are wrong"})


def test_a_few_positions_may_differ_and_none_may_be_nan() -> None:
    expected = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[3] += 1.0
    assert differ(expected, found) is None
    found[10:20] += 1.0
    assert "from position 3 of 40 on" in str(differ(expected, found))
    assert differ(expected, expected * 1.02, torch.bfloat16) is None
    assert differ(expected, expected * 1.02) is not None
    found[0, 0] = torch.nan
    assert differ(expected, found) == "are not finite"
