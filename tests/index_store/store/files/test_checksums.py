"""crc32c without the interpreter's lock is google_crc32c's."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest

from index_store.store.files import checksums


@pytest.mark.parametrize("size", [0, 1, 7, 63, 500, 4096, 100_001])
def test_checksums_equal_those_of_the_package(size: int) -> None:
    raw = np.random.default_rng(size).integers(0, 256, size + 3, dtype=np.uint8)
    for start in (0, 3):
        part = raw[start : start + size]
        for before in (0, 12345, 2**32 - 1):
            assert checksums.extend_crc32c(before, part) == google_crc32c.extend(before, part.tobytes())


def test_the_library_is_called_directly_here() -> None:
    """Otherwise threads that write or load take turns: see which function google_crc32c's library has now."""
    assert checksums._extend is not google_crc32c.extend
