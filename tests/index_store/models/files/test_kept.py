"""What is kept of models' files, and how weights are named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from index_store.errors import ModelUnsupportedError
from index_store.models.files import kept
from index_store.models.files.kept import keep, recall
from index_store.models.loading import identify, load_model, resolve_model

KEY = ("name", 7)
RECORD = {"attention": None, "serving": "differ by 3%"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_is_found_under_its_key_alone() -> None:
    assert recall("checks", KEY) is None
    keep("checks", KEY, RECORD)
    assert recall("checks", KEY) == RECORD
    assert recall("digests", KEY) is None
    assert recall("checks", ("name", "7")) is None
    keep("checks", KEY, {"attention": None})
    assert recall("checks", KEY) == {"attention": None}


@pytest.mark.parametrize(
    ("part", "value"),
    [("record", {}), ("record", {"attention": 1}), ("key", ["other"]), ("version", 2), ("sha256", "0")],
)
def test_what_was_changed_is_not_believed(cache: Path, part: str, value: object) -> None:
    keep("checks", KEY, RECORD)
    (file,) = (cache / "checks").iterdir()
    sealed = json.loads(file.read_text())
    file.write_text(json.dumps({**sealed, part: value}))
    assert recall("checks", KEY) is None
    keep("checks", KEY, RECORD)
    assert recall("checks", KEY) == RECORD


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"record": {}}'])
def test_damaged_records_are_not_there(cache: Path, content: bytes) -> None:
    keep("checks", KEY, RECORD)
    (file,) = (cache / "checks").iterdir()
    file.write_bytes(content)
    assert recall("checks", KEY) is None


def test_the_oldest_go(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST", 3)
    for number in range(5):
        keep("checks", (number,), RECORD)
        for age, file in enumerate(
            sorted((cache / "checks").iterdir(), key=lambda own: -own.stat().st_mtime_ns)
        ):
            os.utime(file, ns=(0, 10**15 - age * 10**9))  # clocks are too coarse to tell them apart
    assert [number for number in range(5) if recall("checks", (number,))] == [2, 3, 4]
    assert len(list((cache / "checks").iterdir())) == 3


def test_a_cache_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "file"))
    keep("checks", KEY, RECORD)
    assert recall("checks", KEY) is None


def changed_weights(llama: Path, folder: Path, **tensors: torch.Tensor) -> Path:
    """A copy of the folder with some more weights, or others. Names have `__` for dots."""
    shutil.copytree(llama, folder)
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    weights = load_file(folder / "model.safetensors") | named
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"model__embed_tokens__weight": torch.zeros(300, 64)},
            r"its weights have \[300, 64\] for model\.embed_tokens\.weight, its config\.json, whose vocab_size is 259, "
            r"means \[259, 64\]; they belong to different models: copy both",
        ),
        (
            {"model__norm__weight": torch.zeros(32)},
            r"its weights have \[32\] for model\.norm\.weight, its config\.json means \[64\]; they belong",
        ),
        (
            {"model__layers__0__self_attn__q_proj__bias": torch.zeros(64)},
            r"its weights have 'model\.layers\.0\.self_attn\.q_proj\.bias' \(1 such tensors\), for which a "
            r"LlamaForCausalLM of its config\.json has no place; the config\.json .*copy both",
        ),
    ],
)
def test_weights_of_another_model_are_refused_in_one_sentence(
    llama: Path,
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = resolve_model(str(changed_weights(llama, tmp_path / "model", **tensors)))
    with pytest.raises(ModelUnsupportedError, match=message):
        load_model(folder, "sdpa")
    assert capfd.readouterr().err == ""


def test_weights_that_belong_to_nothing_are_told(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = changed_weights(
        llama, tmp_path / "model", score__weight=torch.zeros(2), v_head__bias=torch.zeros(1)
    )
    load_model(resolve_model(str(folder)), "sdpa")
    assert (
        "2 tensors of its weights belong to no part of a LlamaForCausalLM and are not used, the first is score.weight"
        in caplog.text
    )
    assert capfd.readouterr().err == ""


def test_truncated_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(
        ModelUnsupportedError, match=r"has \d+ bytes, its header promises \d+; copy the file anew"
    ):
        load_model(resolve_model(str(folder)), "sdpa")


def test_pickled_weights_are_not_loaded(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ModelUnsupportedError, match=r"only pytorch_model\.bin, .*convert them to safetensors"
    ):
        identify(resolve_model(str(folder)))


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors", ""])
def test_weights_outside_of_the_folder_are_refused(llama: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    shutil.copy(folder / "model.safetensors", tmp_path / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelUnsupportedError, match="weights must lie in the model's own folder"):
        identify(resolve_model(str(folder)))


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 100, b"\2" + b"\0" * 7 + b"[]"])
def test_files_that_hold_no_weights_are_refused(llama: Path, tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelUnsupportedError, match=r"model\.safetensors.*copy the file anew"):
        identify(resolve_model(str(folder)))
