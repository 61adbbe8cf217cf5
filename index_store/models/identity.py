"""Which model: its shape, read from its files alone, and a fingerprint of their contents."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from index_store.errors import InvalidArgumentError
from index_store.models.attention_reading import LayerReading, read_layers
from index_store.models.configuration import max_positions, read_config
from index_store.models.files.digests import Progress, Stamp, hash_files
from index_store.models.files.folder import ModelFolder, weight_files
from index_store.models.tokenizer import tokenizer_fingerprint
from index_store.store.description.context_id import LayerShape, ModelIdentity, ModelStates, WindowLayers
from index_store.store.description.dtypes import KV_DTYPES

_UNKNOWN = "unknown"  # in place of a fingerprint that is still being computed

# Entries of config.json that name the software or the place, not the function that the model computes.
_INCIDENTAL_CONFIG = frozenset({"_name_or_path", "transformers_version", "use_cache", "_attn_implementation"})


@dataclass(frozen=True, slots=True)
class Identifying:
    """A model whose weights are being hashed. described: all that is known without, the fingerprint a placeholder."""

    described: ModelIdentity
    _fingerprint: Future[str]

    def result(self) -> ModelIdentity:
        """Waits for the fingerprint. Raises ModelUnsupportedError for a file that changed while it was read."""
        return replace(self.described, fingerprint=self._fingerprint.result())


def identify(folder: ModelFolder, progress: Progress | None = None) -> ModelIdentity:
    """What the model is, from its files alone; weights are hashed but not loaded.

    The fingerprint covers the configuration and the bytes of the weights, whatever the folder's name or place.
    progress: of hashing weights that are new or have changed. Raises ModelUnsupportedError for a model that cannot be
    served, naming the feature.
    """
    with identifying(folder, progress) as model:
        return model.result()


@contextmanager
def identifying(folder: ModelFolder, progress: Progress | None = None) -> Iterator[Identifying]:
    """Hashes a model's weights by threads beside what the block does; an error in the block ends the hashing.

    A model that cannot be served is refused before the block begins. Leaving the block waits for the fingerprint, and
    raises ModelUnsupportedError if a file of the model changed since it was entered.
    """
    described = _describe(folder)
    before = _stamps(folder)
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="identify") as pool:
        model = Identifying(described, pool.submit(_fingerprint, folder, progress, stop))
        try:
            yield model
            model.result()
        finally:
            stop.set()
    for earlier, now in zip(before, _stamps(folder), strict=False):
        if earlier != now:
            raise folder.refuse(
                f"its {Path(now.path).name} changed while it was read; try again when nobody writes to it"
            )


def _describe(folder: ModelFolder) -> ModelIdentity:
    """Everything but the fingerprint."""
    config = read_config(folder)
    readings, states = _read_once(folder, (folder.path / "config.json").read_bytes())
    full = _common(
        folder, "that see all keys", (shape for shape in _shapes(readings) if shape.window is None)
    )
    windowed = _common(
        folder, "with a sliding window or chunks", (shape for shape in _shapes(readings) if shape.window)
    )
    window = None
    if windowed is not None and windowed.window is not None:
        layers = tuple(layer for layer, reading in enumerate(readings) if reading.window)
        window = WindowLayers(
            layers,
            windowed.window,
            windowed.query_heads,
            windowed.kv_heads,
            windowed.head_dim,
            windowed.chunked,
        )
    shape = full or windowed
    if shape is None:
        raise folder.refuse("it has no layers")
    return ModelIdentity(
        name=folder.name,
        architecture=_architecture(config),
        fingerprint=_UNKNOWN,
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        layers=len(readings),
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=int(config.vocab_size),
        max_positions=max_positions(folder, config),
        window=window,
        states=states,
    )


def attention_of(folder: ModelFolder) -> tuple[LayerReading, ...]:
    """How every layer of the model attends that does. Raises ModelUnsupportedError as `read_attention` does."""
    return _read_once(folder, (folder.path / "config.json").read_bytes())[0]


@lru_cache(maxsize=64)
def _read_once(folder: ModelFolder, settings: bytes) -> tuple[tuple[LayerReading, ...], ModelStates | None]:
    return read_layers(folder, read_config(folder))


def checkpoint_dtype(folder: ModelFolder) -> str:
    """Name of the dtype that the configuration gives; ModelUnsupportedError when K and V cannot be stored in it."""
    dtype = getattr(read_config(folder), "dtype", None) or torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in KV_DTYPES:
        raise folder.refuse(
            f"its weights are {name}; keys and values can be stored in {', '.join(KV_DTYPES)}"
        )
    return name


def check_positions(identity: ModelIdentity, count: int) -> None:
    """Raises InvalidArgumentError when `count` tokens are more than the model has positions for."""
    if count > identity.max_positions:
        raise InvalidArgumentError(
            f"{count} tokens are more than the {identity.max_positions} positions of model {identity.name!r}; "
            "shorten the text",
            tokens=count,
            max_positions=identity.max_positions,
        )


def _shapes(readings: Sequence[LayerReading]) -> Iterable[LayerShape]:
    return (
        LayerShape(own.query_heads, own.kv_heads, own.head_dim, own.window, own.chunked) for own in readings
    )


def _common(folder: ModelFolder, which: str, shapes: Iterable[LayerShape]) -> LayerShape | None:
    """The one shape of these layers; None where there are none."""
    different = list(dict.fromkeys(shapes))
    if len(different) > 1:
        raise folder.refuse(
            f"its layers {which} differ ({different[0]} and {different[1]}); they must be alike"
        )
    return different[0] if different else None


def _architecture(config: Any) -> str:
    names: Sequence[str] = getattr(config, "architectures", None) or ()
    return names[0] if names else str(AutoModelForCausalLM._model_mapping[type(config)].__name__)


def _stamps(folder: ModelFolder) -> list[Stamp]:
    return [Stamp.of(file) for file in (folder.path / "config.json", *weight_files(folder))]


def _fingerprint(folder: ModelFolder, progress: Progress | None, stop: threading.Event) -> str:
    raw = json.loads((folder.path / "config.json").read_text())
    meaningful = {name: value for name, value in raw.items() if name not in _INCIDENTAL_CONFIG}
    digest = hashlib.sha256(json.dumps(meaningful, sort_keys=True).encode())
    for own in hash_files(folder, weight_files(folder), progress, stop):
        digest.update(own.encode())
    return digest.hexdigest()
