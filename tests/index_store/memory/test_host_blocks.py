"""Pieces of host memory as blocks of device memory, one ahead of the one that is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from index_store.memory.host_blocks import BlockReader

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
