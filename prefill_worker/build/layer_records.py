"""What is known about a layer that was built and written, so that another process need not do it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from index_store.errors import ManifestError
from index_store.store.description.json_fields import JsonFields
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
        return json.dumps(
            {
                "chunks": [
                    {"path": chunk.path, "indices": list(chunk.indices), "checksum": chunk.checksum}
                    for chunk in self.chunks
                ],
                "indexes": [
                    {
                        "name": name,
                        "searched": self.counts[name][1],
                        "arrays": [
                            {"name": array.name, "shape": list(array.shape), "dtype": array.dtype}
                            for array in arrays
                        ],
                    }
                    for name, arrays in self.arrays.items()
                ],
                "measured": [] if measured is None else [measured.captured, measured.output_error],
            }
        )


def parse_record(description: str, tensors: Mapping[str, Tensor]) -> LayerRecord:
    """A record of what it was described as. Raises ValueError for anything else."""
    try:
        fields = JsonFields(json.loads(description), "the record of a layer")
        indexes = fields.items("indexes", _parse_index)
        measured = fields.numbers("measured")
        return LayerRecord(
            fields.items("chunks", _parse_chunk),
            {name: arrays for name, _, arrays in indexes},
            {name: (tensors[name], searched) for name, searched, _ in indexes},
            Selectivity(*measured) if measured else None,
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


def _parse_chunk(fields: JsonFields) -> KeptChunk:
    return KeptChunk(fields.text("path"), fields.integers("indices"), fields.integer("checksum"))


def _parse_index(fields: JsonFields) -> tuple[str, int, tuple[KeptArray, ...]]:
    return fields.text("name"), fields.integer("searched"), fields.items("arrays", _parse_array)


def _parse_array(fields: JsonFields) -> KeptArray:
    return KeptArray(fields.text("name"), fields.integers("shape"), fields.text("dtype"))
