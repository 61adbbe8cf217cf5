"""What a worker leaves, so that another one can go on: one file for every pass over the document, and for every layer.

`checkpoint.json` lists the files with their checksums. It is replaced once a file is there, so it never lists half
of one. Files are not synced, since a process that is killed loses nothing of them; what a machine loses is found by
its checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import google_crc32c
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from index_store.errors import ContextCorruptError, ManifestError, StoreFullError
from index_store.store.description.json_fields import Count, Number, Sealed, Whole, from_plain, plain
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    make_folder,
    new_file,
    permissions_in,
    remove_tree,
    replace_file,
    storing,
)
from index_store.store.files.reading import read_file
from prefill_worker.build.dense_layers import Selectivity
from prefill_worker.reading.capture import Capture


@dataclass(frozen=True, slots=True)
class KeptChunk:
    """A chunk of an array, and the crc32c of its contents."""

    path: str
    indices: tuple[int, ...]
    checksum: int


@dataclass(frozen=True, slots=True)
class KeptArray:
    """An array of an index in one layer: name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer. arrays: of its indexes by their names. counts: what thresholds are calibrated with, by index.

    selectivity: where it was measured.
    """

    chunks: tuple[KeptChunk, ...]
    arrays: Mapping[str, tuple[KeptArray, ...]]
    counts: Mapping[str, tuple[Tensor, int]]
    selectivity: Selectivity | None

    def tensors(self) -> dict[str, Tensor]:
        """What of it are tensors."""
        return {name: keys_B for name, (keys_B, _) in self.counts.items()}

    def describe(self) -> str:
        """The rest of it, as JSON."""
        measured = self.selectivity
        described = _Described(
            self.chunks,
            tuple(_KeptIndex(name, self.counts[name][1], arrays) for name, arrays in self.arrays.items()),
            () if measured is None else (measured.captured, measured.output_error),
        )
        return json.dumps(plain(described))


@dataclass(frozen=True, slots=True)
class _KeptIndex:
    name: str
    searched: Whole
    arrays: tuple[KeptArray, ...]


@dataclass(frozen=True, slots=True)
class _Described:
    chunks: tuple[KeptChunk, ...]
    indexes: tuple[_KeptIndex, ...]
    measured: tuple[Number, ...]


def parse_record(description: str, tensors: Mapping[str, Tensor]) -> LayerRecord:
    """A record of what it was described as. Raises ValueError for anything else."""
    try:
        found = from_plain(json.loads(description), _Described)
        return LayerRecord(
            found.chunks,
            {index.name: index.arrays for index in found.indexes},
            {index.name: (tensors[index.name], index.searched) for index in found.indexes},
            Selectivity(*found.measured) if found.measured else None,
        )
    except (ManifestError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no record of a layer: {error}") from error


_LIST = "checkpoint.json"
_LARGEST_LIST = 1 << 24
_LARGEST_PART = 1 << 34

Note = Callable[[str], None]
"""Told what whoever waits for the job should know."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A file with what `count` tokens from `start` on left in all layers."""

    start: Count
    count: Count
    crc32c: Count

    @property
    def name(self) -> str:
        return f"tokens-{self.start}"


@dataclass(frozen=True, slots=True)
class _Layer:
    """A file with the record of a layer that was written."""

    layer: Count
    crc32c: Count

    @property
    def name(self) -> str:
        return f"layer-{self.layer}"


_Kept = TypeVar("_Kept", _Part, _Layer)


@dataclass(frozen=True, slots=True)
class _Listed:
    """All that was kept. context: id of what is being made."""

    context: str
    parts: tuple[_Part, ...]
    layers: tuple[_Layer, ...]


CHECKPOINTS = Sealed(
    _Listed,
    "the checkpoint",
    "the document is read again from its beginning",
    wrong=ContextCorruptError,
    damaged=ContextCorruptError,
    foreign=ContextCorruptError,
)


class Checkpoint:
    """The checkpoint of one job in a folder of its own. For one worker at a time, which holds the job's lock.

    `restore` comes before all else. Where the disk is too full for it, it is removed, which
    leaves its room to the context, and the job goes on without one.
    """

    def __init__(self, folder: Path, context: str, note: Note) -> None:
        """context: id of what is being made; a checkpoint of another one counts as damaged."""
        self._folder = folder
        self._context = context
        self._note = note
        self._given_up = False
        self._parts: list[_Part] = []
        self._layers: list[_Layer] = []

    def keep(self, capture: Capture, start: int, count: int) -> None:
        """Keeps what a pass left in the capture. Raises StoreError."""
        if self._given_up:
            return
        tensors: dict[str, Tensor] = capture.state_tensors()
        for layer, (kv, queries) in enumerate(capture.rows(start, count)):
            tensors[f"kv.{layer}"] = kv.contiguous()
            if queries is not None:
                tensors[f"queries.{layer}"] = queries.contiguous()
        data = save(tensors)
        self._keep(_Part(start, count, google_crc32c.value(data)), self._parts, data)

    def keep_layer(self, layer: int, record: LayerRecord) -> None:
        """Keeps the record of a layer. Raises StoreError."""
        data = save(record.tensors(), {"record": record.describe()})
        self._keep(_Layer(layer, google_crc32c.value(data)), self._layers, data)

    def records(self) -> dict[int, LayerRecord]:
        """Records of layers that were written; those that are damaged are left out, and their layers built again."""
        found: dict[int, LayerRecord] = {}
        for kept in self._layers:
            try:
                data = self._read(kept.name, kept.crc32c)
                length = int.from_bytes(data[:8], "little")
                description = json.loads(data[8 : 8 + length])["__metadata__"]["record"]
                found[kept.layer] = parse_record(description, load(data))
            except (OSError, KeyError, ValueError, TypeError, SafetensorError):
                continue
        self._layers = [kept for kept in self._layers if kept.layer in found]
        return found

    def _keep(self, kept: _Kept, among: list[_Kept], data: bytes) -> None:
        if self._given_up:
            return
        try:
            self._write(kept.name, data)
            among.append(kept)
            self._write_list()
        except StoreFullError as error:
            self._given_up = True
            with storing("giving up a checkpoint", self._folder):
                remove_tree(self._folder)
            self._note(f"went on without a checkpoint, for which there is no room: {error.message}")

    def _write(self, name: str, data: bytes) -> None:
        with storing("keeping a checkpoint", self._folder):
            permissions = permissions_in(self._folder.parent)
            make_folder(self._folder, permissions)
            temporary = self._folder / f"{TEMPORARY_PREFIX}{name}"
            with new_file(temporary, permissions) as file:
                file.write(data)
            temporary.replace(self._folder / name)

    def _write_list(self) -> None:
        listed = _Listed(self._context, tuple(self._parts), tuple(self._layers))
        with storing("keeping a checkpoint", self._folder):
            replace_file(self._folder / _LIST, CHECKPOINTS.render(listed), permissions_in(self._folder))

    def _read(self, name: str, crc32c: int) -> bytes:
        """A file of the checkpoint. Raises OSError, and ValueError where it is damaged."""
        data, _ = read_file(self._folder / name, _LARGEST_PART)
        if google_crc32c.value(data) != crc32c:
            raise ValueError(f"{name} is damaged")
        return data

    @property
    def begun(self) -> bool:
        return (self._folder / _LIST).exists()

    def restore(self, capture: Capture) -> int:
        """Has the capture hold what was kept; returns the token to go on with, 0 where there is nothing.

        What is damaged is read again, with all that follows it, and noted.
        """
        self._parts = []
        parts, self._layers = self._listed()
        expected = 0
        for part in parts:
            if part.start != expected or not self._put(part, capture):
                self._note(
                    f"the checkpoint is damaged from token {expected} on; the document is read again from there"
                )
                break
            self._parts.append(part)
            expected = part.start + part.count
        if expected:
            self._note(f"went on with a reading that had come to token {expected}")
        return expected

    def _listed(self) -> tuple[list[_Part], list[_Layer]]:
        path = self._folder / _LIST
        try:
            data, _ = read_file(path, _LARGEST_LIST)
            listed = CHECKPOINTS.parse(data, str(path))
            if listed.context != self._context:
                raise ContextCorruptError(f"{path}: of context {listed.context}", path=path)
            return list(listed.parts), list(listed.layers)
        except FileNotFoundError:
            return [], []
        except (OSError, ContextCorruptError):
            self._note("the checkpoint is damaged; the document is read again from its beginning")
            remove_tree(self._folder)
            return [], []

    def _put(self, part: _Part, capture: Capture) -> bool:
        """Whether the part was as it was kept, and is in the capture now."""
        try:
            tensors = load(self._read(part.name, part.crc32c))
            layers = range(capture.identity.layers)
            parts = [(tensors[f"kv.{layer}"], tensors.get(f"queries.{layer}")) for layer in layers]
            capture.put_rows(part.start, part.count, parts)
            capture.put_state(tensors, part.start + part.count)
        except (OSError, KeyError, ValueError, SafetensorError):
            return False
        return True
