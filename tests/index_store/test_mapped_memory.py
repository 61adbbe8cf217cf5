"""What becomes of blocks of host memory that a GPU could map in large pages."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from index_store import host_memory
from index_store.host_memory import CudaPageLocker, HostBlock, copy_source, is_readable
from index_store.mapped_memory import is_mapped


def test_memory_of_the_host_is_copied_from_as_it_is() -> None:
    plain = torch.zeros(3)
    assert not is_mapped(plain)
    assert not is_readable(plain)
    assert copy_source(plain, torch.device("cpu")) is plain


def test_refused_memory_is_page_locked_instead_and_the_log_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int, device: torch.device) -> Tensor:
        raise RuntimeError(f"no {nbytes} bytes on {device}")

    monkeypatch.setattr(host_memory, "map_memory", refuse)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    locker = CudaPageLocker(torch.device("cuda", 1))
    with caplog.at_level(logging.WARNING):
        blocks = [HostBlock(5000, locker, gathered=True) for _ in range(2)]
    assert caplog.text.count("no 8192 bytes on cuda:1") == 1
    for block in blocks:
        assert not block.locked
        assert block.take((5000,), torch.uint8).numel() == 5000


def test_other_blocks_are_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(host_memory, "map_memory", lambda nbytes, device: asked.append(nbytes))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    HostBlock(5000, CudaPageLocker(), own_pages=True)
    assert asked == []
