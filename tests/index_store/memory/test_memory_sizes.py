"""Sizes of memory in words, and what is free of it."""

from __future__ import annotations

import pytest
import torch

from index_store.errors import InvalidArgumentError
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
