"""Where a model's files are, and hashes of them. Needs no machine-learning package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

from index_store.errors import ModelUnsupportedError

PACKAGED_MODELS = ("reader",)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face model folder on this machine. `name` is what people call it; it is no part of the fingerprint."""

    path: Path
    name: str

    def refuse(self, why: str) -> ModelUnsupportedError:
        """The error that says why this model cannot be served."""
        return ModelUnsupportedError(f"model {self.name!r} cannot be served: {why}", model=self.name)


def resolve_model(name_or_path: str) -> ModelFolder:
    """The folder of a packaged model ("reader") or of a path. Raises ModelUnsupportedError when there is none."""
    if name_or_path in PACKAGED_MODELS:
        return ModelFolder(Path(str(resources.files("index_store.models") / name_or_path)), name_or_path)
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        raise ModelUnsupportedError(
            f"model {name_or_path!r} is neither a packaged model ({', '.join(PACKAGED_MODELS)}) nor a folder; "
            "models are not downloaded: pass the path of a Hugging Face model folder",
            model=name_or_path,
        )
    if not (path / "config.json").is_file():
        raise ModelUnsupportedError(
            f"model folder {name_or_path!r} has no config.json; expected a Hugging Face model folder",
            model=name_or_path,
        )
    return ModelFolder(path.resolve(), path.resolve().name)


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
