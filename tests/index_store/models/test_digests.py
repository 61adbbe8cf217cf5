"""Digests of files: those of their bytes, found again until a file changes; and what is hashed is what is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from index_store.errors import ModelUnsupportedError
from index_store.models import digests, loading
from index_store.models.digests import HashingStoppedError, hash_file, hash_files, keep, recall
from index_store.models.loading import identify, identifying, load_model, load_tokenizer, resolve_model
from index_store.models.model_folder import ModelFolder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed from now on."""
    names: list[str] = []
    whole = digests._hash

    def noting(folder: ModelFolder, stamp: digests.Stamp, tally: Any) -> str:
        names.append(Path(stamp.path).name)
        return whole(folder, stamp, tally)

    monkeypatch.setattr(digests, "_hash", noting)
    return names


@pytest.fixture
def sharded(llama: Path, tmp_path: Path) -> Path:
    """The folder with its weights in two files."""
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = ({}, {})
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        parts[number % 2][name] = tensor
    named = {name: f"part-{number}.safetensors" for number, part in enumerate(parts) for name in part}
    for number, part in enumerate(parts):
        save_file(part, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return folder


def forget() -> None:
    """As a new process."""
    digests._IN_PROCESS.clear()


def test_digests_are_those_of_the_bytes_in_the_order_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_PIECE", 100)
    contents = [b"", b"a" * 99, b"b" * 100, b"c" * 1001]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    told: list[tuple[int, int]] = []
    found = hash_files(ModelFolder(tmp_path, "m"), paths, lambda done, total: told.append((done, total)))
    assert found == [hashlib.sha256(content).hexdigest() for content in contents]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (1200, 1200)
    assert len(told) >= 12  # a piece at a time


def test_a_file_is_read_once_in_all_processes_until_it_changes(tmp_path: Path, read: list[str]) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = hash_file(path)
    forget()
    assert hash_file(path) == first
    assert read == ["weights"]
    (tmp_path / "link").symlink_to(path)
    assert hash_file(tmp_path / "link") == first
    assert read == ["weights"]
    # The same length and the same time, as tools that preserve times leave it: the time of change tells.
    was = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    forget()
    assert hash_file(path) == hashlib.sha256(b"two").hexdigest()
    (tmp_path / "new").write_bytes(b"six")
    (tmp_path / "new").replace(path)
    assert hash_file(path) == hashlib.sha256(b"six").hexdigest()
    assert read == ["weights"] * 3


def test_a_file_that_has_just_changed_is_read_again_by_the_next_process(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_SETTLED_NS", 10**15)
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    hash_file(path)
    hash_file(path)
    assert read == ["weights"]
    forget()
    hash_file(path)
    assert read == ["weights"] * 2


def test_a_file_that_changes_while_it_is_hashed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")

    def grow(done: int, total: int) -> None:
        if done:
            path.write_bytes(b"longer")

    with pytest.raises(ModelUnsupportedError, match="its weights changed while it was read"):
        hash_files(ModelFolder(tmp_path, "m"), [path], grow)


def test_files_are_hashed_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(b"x")
    together = threading.Barrier(3)
    whole = digests._hash

    def meeting(folder: ModelFolder, stamp: digests.Stamp, tally: Any) -> str:
        together.wait(timeout=60)
        return whole(folder, stamp, tally)

    monkeypatch.setattr(digests, "_hash", meeting)
    assert len(hash_files(ModelFolder(tmp_path, "m"), paths)) == 3


def test_hashing_ends_when_nobody_waits(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    stop = threading.Event()
    stop.set()
    with pytest.raises(HashingStoppedError):
        hash_files(ModelFolder(tmp_path, "m"), [path], stop=stop)


def test_an_error_beside_the_hashing_is_the_one_that_is_seen(llama: Path) -> None:
    begun = threading.Event()

    def fail() -> None:
        with identifying(resolve_model(str(llama)), lambda done, total: begun.set()):
            assert begun.wait(timeout=60)
            raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        fail()


def test_weights_are_hashed_while_they_are_loaded(
    sharded: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    loaded, told = threading.Event(), []

    def after_loading(done: int, total: int) -> None:
        assert loaded.wait(timeout=60)  # were one to wait for the other, this would never end well
        told.append((done, total))

    load_weights = loading._load_weights

    def load_and_tell(*arguments: Any) -> Any:
        try:
            return load_weights(*arguments)
        finally:
            loaded.set()

    monkeypatch.setattr(loading, "_load_weights", load_and_tell)
    model = load_model(resolve_model(str(sharded)), "sdpa", hashing=after_loading)
    assert told[-1][0] == told[-1][1] > 0
    assert [name for name in read if name.startswith("part")] == sorted(
        ["part-0.safetensors", "part-1.safetensors"]
    )
    forget()
    assert identify(resolve_model(str(sharded))) == model.identity
    assert len([name for name in read if name.startswith("part")]) == 2


@pytest.mark.parametrize("name", ["part-1.safetensors", "config.json", "tokenizer.json"])
def test_what_changes_between_hashing_and_loading_is_noticed(
    sharded: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model(str(sharded))
    load_weights = loading._load_weights

    def load_and_change(*arguments: Any) -> Any:
        model = load_weights(*arguments)
        end = b"\n" if name.endswith(".json") else b""
        (sharded / "new").write_bytes((sharded / name).read_bytes() + end)
        (sharded / "new").replace(sharded / name)
        return model

    monkeypatch.setattr(loading, "_load_weights", load_and_change)
    if name != "tokenizer.json":
        with pytest.raises(ModelUnsupportedError, match=f"its {name} changed while it was read"):
            load_model(folder, "sdpa")
        return
    identity = load_model(folder, "sdpa").identity
    with pytest.raises(ModelUnsupportedError, match="its tokenizer changed while it was read"):
        load_tokenizer(folder, identity.tokenizer_fingerprint)


def test_shards_are_hashed_and_loaded_without_what_lies_beside_them(sharded: Path, llama: Path) -> None:
    expected = load_model(resolve_model(str(llama)), "sdpa")
    other = load_file(llama / "model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in other.items()},
        sharded / "other.safetensors",
        metadata={"format": "pt"},
    )
    before = identify(resolve_model(str(sharded))).fingerprint
    loaded = load_model(resolve_model(str(sharded)), "sdpa")
    assert loaded.identity.fingerprint == before
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name])


def test_the_fingerprint_is_the_digest_of_whole_files_in_order(sharded: Path) -> None:
    settings = json.loads((sharded / "config.json").read_text())
    for incidental in ("_name_or_path", "transformers_version", "use_cache", "_attn_implementation"):
        settings.pop(incidental, None)
    expected = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for number in range(2):
        content = (sharded / f"part-{number}.safetensors").read_bytes()
        expected.update(hashlib.sha256(content).hexdigest().encode())
    assert identify(resolve_model(str(sharded))).fingerprint == expected.hexdigest()


KEY = ("name", 7)
RECORD = {"attention": None, "serving": "differ by 3%"}


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
    monkeypatch.setattr(digests, "MOST", 3)
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
