"""Where compiled loops are kept, under which names, and who may put them there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from index_store.compiled import loop_cache
from index_store.compiled.launch import njit
from index_store.compiled.loop_cache import LoopCache, compiled_from
from index_store.compiled.places import distrust, make, remove_unused


def test_a_loop_is_named_by_all_that_it_is_compiled_from() -> None:
    module = "index_store.indexes.coarse_rows.best_keys_numba"
    found = compiled_from(module)
    assert {module, "index_store.selection.top_k_numba", "index_store.attention.vectors.code"} <= found
    assert {"index_store.compiled.launch", "index_store.indexes.coarse_rows.coded_passes_numba"} <= found
    assert (
        "index_store.selection.collect_numba" not in found
    )  # a change there compiles this one no second time


def test_a_changed_source_gets_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module, called = "index_store.attention.rows_in_line_numba", "index_store.attention.vectors.code"
    before = loop_cache._content.__wrapped__(module)
    read = loop_cache._source

    def changed(name: str) -> bytes:
        return read(name) + (b"\n" if name == called else b"")

    monkeypatch.setattr(loop_cache, "_source", changed)
    assert loop_cache._content.__wrapped__(module) != before


def test_a_loop_is_written_once_and_read_from_any_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(numbers, addend):  # type: ignore[no-untyped-def]
        numbers[0] += addend

    own, shared = tmp_path / "own", tmp_path / "shared"
    monkeypatch.setattr(loop_cache, "file_name", lambda module, function: f"{function}-0")
    monkeypatch.setattr(loop_cache, "own_place", lambda: own)
    monkeypatch.setattr(loop_cache, "shared_place", lambda: shared)
    numbers = np.zeros(1, np.float32)
    first = njit("f4x1 i8")(add)
    first._cache = LoopCache(add, into=shared)
    first(numbers, 2)
    second = njit("f4x1 i8")(add)
    second(numbers, 3)
    assert numbers[0] == 5
    assert (sum(first.stats.cache_misses.values()), sum(second.stats.cache_misses.values())) == (1, 0)
    assert sum(second.stats.cache_hits.values()) == 1
    assert not own.exists()
    assert sorted(path.suffix for path in shared.rglob("*.nb*")) == [".nbc", ".nbi"]


def test_a_folder_that_others_can_write_to_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "loops"
    make(folder)
    assert distrust(folder) is None
    folder.chmod(0o777)
    assert distrust(folder) == f"other users may write to {folder}"
    folder.chmod(0o755)
    folder.parent.chmod(0o1777)  # others may add to it, not rename what is there
    assert distrust(folder) is None
    folder.parent.chmod(0o777)
    assert distrust(folder) == f"other users may write to {folder.parent}"


def test_a_folder_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    expected = None if owner == 0 else f"{tmp_path} belongs to user {owner}"
    assert distrust(tmp_path) == expected


def test_files_that_nobody_used_for_months_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "one" / "old.nbc", tmp_path / "one" / "new.nbc"
    old.parent.mkdir()
    for file in (old, new):
        file.write_bytes(b"")
    os.utime(old, (time.time() - 100 * 24 * 3600,) * 2)
    remove_unused(tmp_path)
    assert (old.exists(), new.exists()) == (False, True)
