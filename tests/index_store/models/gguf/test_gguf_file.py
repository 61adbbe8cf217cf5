"""GGUF files: converted once, kept by content, refused with a sentence; and where fetched models are looked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch

from index_store.errors import ModelUnsupportedError
from index_store.models.loading import identify, load_model, load_tokenizer
from index_store.models.resolve import resolve_model
from tests.index_store.models.gguf.gguf_files import write_gguf
from tests.support.models import write_model_folder

TEXT = "The price of the lantern is 4821."


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "llama")


def test_a_gguf_file_is_served_as_the_model_that_it_came_from(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    found = resolve_model(str(file))
    assert found.name == "tiny"
    identity = identify(found)
    assert (identity.layers, identity.query_heads, identity.kv_heads) == (2, 4, 2)
    tokenizer, original = load_tokenizer(found), load_tokenizer(resolve_model(str(folder)))
    ids = tokenizer.encode(TEXT)
    assert ids == original.encode(TEXT)
    assert tokenizer.eos_ids == original.eos_ids
    with torch.inference_mode():
        made = load_model(found, "sdpa").model(torch.tensor([ids])).logits
        expected = load_model(resolve_model(str(folder)), "sdpa").model(torch.tensor([ids])).logits
    torch.testing.assert_close(made, expected)


def test_quantised_weights_become_bfloat16(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    found = resolve_model(str(file))
    settings = json.loads((found.path / "config.json").read_text())
    assert settings["dtype"] == "bfloat16"
    assert "quantization_config" not in settings
    assert load_model(found, "sdpa").kv_dtype == "bfloat16"


def test_the_cache_goes_by_content(folder: Path, tmp_path: Path, cache: Path) -> None:
    first = write_gguf(folder, tmp_path / "first.gguf")
    second = tmp_path / "second.gguf"
    shutil.copyfile(first, second)
    one, two = resolve_model(str(first)), resolve_model(str(second))
    assert one.path == two.path
    assert (one.name, two.name) == ("first", "second")
    assert identify(one).fingerprint == identify(two).fingerprint
    write_gguf(folder, first, kind=gguf.GGMLQuantizationType.Q8_0)
    assert resolve_model(str(first)).path != one.path
    assert sorted(cache.iterdir()) == sorted({one.path, resolve_model(str(first)).path})


def test_what_is_no_usable_gguf_file_is_refused(folder: Path, tmp_path: Path, cache: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    with pytest.raises(ModelUnsupportedError, match="no GGUF file"):
        resolve_model(str(text))
    whole = write_gguf(folder, tmp_path / "whole.gguf").read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ModelUnsupportedError, match=r"'short' cannot be served: the GGUF file cannot be converted"
    ):
        resolve_model(str(short))
    other = write_gguf(folder, tmp_path / "other.gguf", architecture="an_unknown_one")
    with pytest.raises(ModelUnsupportedError, match="an_unknown_one"):
        resolve_model(str(other))
    assert list(cache.iterdir()) == []


def test_missing_packages_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    monkeypatch.setattr("index_store.models.gguf.gguf_file.find_spec", lambda name: None)
    with pytest.raises(
        ModelUnsupportedError, match=r"needs the package gguf: pip install 'sparsekv\[gguf\]'"
    ):
        resolve_model(str(file))


def test_a_model_that_was_not_fetched_says_how(cache: Path, folder: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match="decode-engine fetch-model smollm2"):
        resolve_model("smollm2")
    shutil.copytree(folder, cache / "smollm2")
    assert resolve_model("smollm2").name == "smollm2"
