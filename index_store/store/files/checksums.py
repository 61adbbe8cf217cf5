"""crc32c of memory, computed while other threads of Python run.

google_crc32c holds the interpreter's lock while it computes, so that threads which write or read files would do so one
after the other. The C library that it brings is called directly instead, which leaves the lock to others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import google_crc32c
import numpy as np
from numpy.typing import NDArray

Extend = Callable[[int, NDArray[np.uint8]], int]


def _unlocked() -> Extend | None:
    """The C library's function; None where the package was built without it, or hides it."""
    try:
        from google_crc32c import _crc32c

        function = ctypes.CDLL(_crc32c.__file__).crc32c_extend
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint32

    def extend(checksum: int, raw: NDArray[np.uint8]) -> int:
        found: int = function(checksum, raw.ctypes.data, raw.size)
        return found

    return extend


_extend: Extend = _unlocked() or google_crc32c.extend


def extend_crc32c(checksum: int, raw: NDArray[np.uint8]) -> int:
    """The crc32c of what has `checksum` so far (0 of nothing) and of these contiguous bytes behind it."""
    return _extend(checksum, raw)
