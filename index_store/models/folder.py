"""A model's files on this machine, and hashes of them. Needs no machine-learning package."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from index_store.errors import ModelUnsupportedError


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face model folder on this machine. `name` is what people call it; it is no part of the fingerprint."""

    path: Path
    name: str

    def refuse(self, why: str) -> ModelUnsupportedError:
        """The error that says why this model cannot be served."""
        return ModelUnsupportedError(f"model {self.name!r} cannot be served: {why}", model=self.name)


def cache_folder() -> Path:
    """What can be made again is kept here: SPARSEKV_CACHE, or sparsekv in the user's cache folder (XDG_CACHE_HOME)."""
    named = os.environ.get("SPARSEKV_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsekv"


def model_cache() -> Path:
    """Where fetched and converted models are kept."""
    return cache_folder() / "models"


def hash_file(path: Path) -> str:
    """SHA-256 of a file, computed once per process for a given path, size and time of change."""
    status = path.stat()
    return _hash_unchanged_file(str(path), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1024)
def _hash_unchanged_file(path: str, size: int, mtime_ns: int) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_line(error: Exception) -> str:
    """The first line of an error's message, for a sentence that quotes it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
