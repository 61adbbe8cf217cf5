"""Sizes of memory in words, and what is free of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.memory import memory_sizes
from index_store.memory.memory_sizes import free_memory, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("42", 42), (" 1TB ", 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "much", "-1GiB", "0", "8 GiBs", "8gib", "1e9", "GiB", "9" * 400, "١GiB"]
)
def test_bad_sizes(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="8GiB"):
        parse_size(text)


def test_free_memory_is_less_than_the_machine_has() -> None:
    assert 2**20 < free_memory(torch.device("cpu")) < 2**50


V2 = {"memory.max": "{limit}", "memory.current": "{used}", "memory.stat": "anon 5\ninactive_file {cached}"}
V1 = {
    "memory/memory.limit_in_bytes": "{limit}",
    "memory/memory.usage_in_bytes": "{used}",
    "memory/memory.stat": "inactive_file 5\ntotal_inactive_file {cached}",
}
MIB = 2**20


@pytest.mark.parametrize("files", [V2, V1])
@pytest.mark.parametrize(("used", "free"), [(10, 9), (16, 3), (40, 0)])
def test_what_a_container_uses_is_not_free(
    files: dict[str, str], used: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text.format(limit=16 * MIB, used=used * MIB, cached=3 * MIB) + "\n")
    monkeypatch.setattr(memory_sizes, "_CGROUP", tmp_path)
    assert free_memory(torch.device("cpu")) == free * MIB


def test_a_container_without_a_limit_has_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(memory_sizes, "_CGROUP", tmp_path)
    assert free_memory(torch.device("cpu")) > 2**20
