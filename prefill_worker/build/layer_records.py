"""What is known about a layer that was built and written, so that another process need not do it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from index_store.errors import ManifestError
from index_store.store.description.json_fields import Number, Whole, from_plain, plain
from prefill_worker.build.dense_layers import Selectivity


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


class LayerKeeper(Protocol):
    """Where records are kept."""

    def records(self) -> Mapping[int, LayerRecord]:
        """Those of layers that were written before, by whoever it was."""
        ...

    def keep_layer(self, layer: int, record: LayerRecord) -> None:
        """Keeps the record of a layer whose chunks have been written."""
        ...
