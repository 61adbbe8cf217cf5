"""What jobs refuse, and what a failure leaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from index_store.errors import (
    ChecksumError,
    InvalidArgumentError,
    MethodUnsupportedError,
    SparseKVError,
    StoreError,
    StoreFullError,
    TruncatedChunkError,
)
from index_store.store.catalog import Store
from index_store.store.writer import ContextWriter
from tests.prefill_worker.jobs.support_jobs import MakeConfig, hidden_entries, run
from tests.support.models import write_model_folder

TABLES = ("csattention",)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "nowhere"}, SparseKVError, "neither a packaged model"),
        ({"method": ("nonsense",)}, MethodUnsupportedError, "nonsense"),
        ({"centroids": 8}, InvalidArgumentError, "shape query tables, but refined stores none"),
        ({"dense_layers": "0,2"}, InvalidArgumentError, "names layer 2, model 'tiny' has layers 0 to 1"),
        ({"method": TABLES, "subspaces": 3}, InvalidArgumentError, "does not split into 3 subspaces"),
        (
            {"method": TABLES, "centroids": 10**4},
            InvalidArgumentError,
            r"--centroids is 10000, expected at most \d+: that many queries",
        ),
        (
            {"method": ("csattention-paper",), "centroids": 8},
            InvalidArgumentError,
            "fixed by the paper.*--method csattention for",
        ),
        (
            {"method": ("csattention-paper", "full"), "tables": "dense"},
            InvalidArgumentError,
            "fixed by the paper",
        ),
    ],
)
def test_what_is_refused_leaves_nothing(
    make_config: MakeConfig, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = make_config(**changes)
    with pytest.raises(error, match=message):
        run(config)
    assert not config.store.exists()


def test_too_long_for_the_model(make_config: MakeConfig, tmp_path: Path) -> None:
    short = write_model_folder(tmp_path / "short", max_positions=128)
    with pytest.raises(InvalidArgumentError, match="more than the 128 positions"):
        run(make_config(model=str(short)))


def test_overflow_of_the_stored_dtype_is_an_error(make_config: MakeConfig, tmp_path: Path) -> None:
    wild = write_model_folder(tmp_path / "wild")
    tensors = load_file(wild / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e6
    save_file(tensors, wild / "model.safetensors", metadata={"format": "pt"})
    config = make_config(model=str(wild), dtype="float16", dense_layers="0,1")
    with pytest.raises(InvalidArgumentError, match=r"layer 1 are not finite in float16"):
        run(config)
    assert hidden_entries(config.store) == []


@pytest.mark.parametrize("moment", ["create_array", "write_rows", "write_tokens", "sync", "publish"])
def test_a_full_disk_leaves_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    config = make_config()
    keeper = run(make_config(salt="keeper")).manifest
    calls = 0

    def fail(*_: object, **__: object) -> None:
        raise StoreFullError("no space is left")

    original = getattr(ContextWriter, moment)

    def fail_late(self: ContextWriter, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return (
            fail()
            if calls > 2 or moment in ("publish", "sync", "write_tokens")
            else original(self, *arguments, **options)
        )

    with monkeypatch.context() as patched:
        patched.setattr(ContextWriter, moment, fail_late)
        with pytest.raises(StoreFullError):
            run(config)
    store = Store(config.store)
    assert [manifest.id for manifest in store.list()] == [keeper.id]
    assert hidden_entries(config.store) == []
    assert run(config).created


def test_space_is_checked_before_the_model_runs(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreFullError, match="1000 are free"):
        run(make_config())


def test_a_store_that_is_a_file(make_config: MakeConfig, document: Path) -> None:
    with pytest.raises(StoreError):
        run(make_config(store=document))


def _cut(data: bytearray) -> None:
    del data[-5:]


def _other_end(data: bytearray) -> None:
    data[-1] ^= 1


@pytest.mark.parametrize(("damage", "error"), [(_cut, TruncatedChunkError), (_other_end, ChecksumError)])
def test_files_that_are_not_what_was_written_are_never_published(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[bytearray], None],
    error: type[Exception],
) -> None:
    """Lengths and ends of files are compared with what the memory held; contents when they are read."""
    original = ContextWriter.sync

    def sync_then_damage(self: ContextWriter, *arguments: Any) -> None:
        original(self, *arguments)
        chunk = next((make_config().store / "contexts").rglob("kv/c/*/*/*/*/*"))
        data = bytearray(chunk.read_bytes())
        damage(data)
        chunk.write_bytes(data)

    with monkeypatch.context() as patched:
        patched.setattr(ContextWriter, "sync", sync_then_damage)
        with pytest.raises(error, match="kv"):
            run(make_config())
    assert Store(make_config().store).entries() == []
    assert hidden_entries(make_config().store) == []
