"""A model's folder on this machine, and where the user's cache is. Needs no machine-learning package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from index_store.compiled.places import cache_folder
from index_store.errors import ModelUnsupportedError


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face model folder on this machine. `name` is what people call it; it is no part of the fingerprint."""

    path: Path
    name: str

    def refuse(self, why: str) -> ModelUnsupportedError:
        """The error that says why this model cannot be served."""
        return ModelUnsupportedError(f"model {self.name!r} cannot be served: {why}", model=self.name)


def model_cache() -> Path:
    """Where fetched and converted models are kept."""
    return cache_folder() / "models"


def first_line(error: Exception) -> str:
    """The first line of an error's message, for a sentence that quotes it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
