"""Sizes of memory as people write them, and blocks of a host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.memory import memory_sizes
from index_store.memory.host_memory import BlockReader
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


DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def make_layers(count: int, layers: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(2, count, 2, 8, generator=generator) for _ in range(layers)]


def pieces_of(layers: list[Tensor], rows: int, asked: list[int]) -> Iterator[Tensor]:
    for layer in layers:
        for start in range(0, layer.shape[1], rows):
            asked.append(start)
            yield layer[:, start : start + rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_pieces_come_in_order_and_one_ahead(rows: int, device: torch.device) -> None:
    layers = make_layers(8, 3)
    reader = BlockReader((2, rows, 2, 8), torch.float32, device)
    for again in range(2):  # the same blocks serve any number of starts
        asked: list[int] = []
        reader.start(pieces_of(layers, rows, asked))
        for layer in layers:
            read = []
            for start in range(0, 8, rows):
                before = len(asked)
                read.append(reader.next().cpu().clone())
                assert len(asked) in (before, before + 1)
                assert read[-1].shape[1] == min(rows, 8 - start)
            assert torch.equal(torch.cat(read, dim=1), layer), again
        with pytest.raises(ValueError, match="all pieces"):
            reader.next()
    assert reader.nbytes == 2 * 2 * rows * 2 * 8 * 4
    reader.end()
    assert reader.nbytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_start_forgets_what_was_left(device: torch.device) -> None:
    layers = make_layers(8, 2)
    reader = BlockReader((2, 4, 2, 8), torch.float32, device)
    reader.start(pieces_of(layers, 4, []))
    reader.next()
    reader.start(pieces_of(layers[1:], 4, []))
    assert torch.equal(reader.next().cpu(), layers[1][:, :4])
    reader.start(iter(()))
    with pytest.raises(ValueError, match="all pieces"):
        reader.next()


@pytest.mark.gpu
def test_blocks_are_not_overwritten_while_they_are_read() -> None:
    """Slow reading on the main stream, fast copies on the side."""
    device = torch.device("cuda")
    layers = [torch.full((2, 4096, 2, 64), float(n)).pin_memory() for n in range(12)]
    reader = BlockReader((2, 4096, 2, 64), torch.float32, device)
    reader.start(iter(layers))
    seen = []
    for _ in layers:
        block = reader.next()
        torch.cuda._sleep(20_000_000)
        seen.append((block.amin(), block.amax()))
    reader.end()
    assert [(float(low), float(high)) for low, high in seen] == [(n, n) for n in range(12)]
