"""What the `zarr.json` of every array and group must say, and whether it does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from index_store.errors import REPAIR, ArrayMetadataError, ContextCorruptError
from index_store.store.dtypes import STORED_DTYPES
from index_store.store.manifest import ArrayEntry

_FILE = "zarr.json"


def check_metadata(folder: Path, entries: Sequence[ArrayEntry]) -> Iterator[ContextCorruptError]:
    """Compares every `zarr.json` with the entries; yields one error per file that says something else."""
    groups = {str(parent) for entry in entries for parent in Path(entry.path).parents}
    for group in sorted(groups):
        expected = {"zarr_format": 3, "node_type": "group", "attributes": {}}
        yield from _compare(folder / group / _FILE, group, expected)
    for entry in entries:
        yield from _compare(folder / entry.path / _FILE, entry.path, _metadata(entry))


def _metadata(entry: ArrayEntry) -> dict[str, object]:
    """What `zarr.json` of the array must say."""
    dtype = STORED_DTYPES[entry.dtype]
    to_bytes: dict[str, object] = {"name": "bytes"}
    if dtype.itemsize > 1:
        to_bytes["configuration"] = {"endian": "little"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(entry.shape),
        "data_type": dtype.zarr_name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(entry.chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [to_bytes, {"name": "crc32c"}],
        "fill_value": 0,
        "attributes": {"dtype": dtype.name},
        "storage_transformers": [],
    }


def _compare(path: Path, array: str, expected: dict[str, object]) -> Iterator[ContextCorruptError]:
    """Yields an error for the first field of a `zarr.json` that differs from what it must say."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        yield ArrayMetadataError(
            f"{path}: metadata of {array!r} is missing; {REPAIR}", path=path, array=array
        )
        return
    except (OSError, ValueError, RecursionError) as error:
        yield ArrayMetadataError(
            f"{path}: metadata of {array!r} cannot be read ({error}); {REPAIR}", path=path, array=array
        )
        return
    document = found if isinstance(found, dict) else {}
    for field in sorted(expected.keys() | document.keys()):
        # What is empty may as well be left out: zarr's versions differ in that.
        if (document.get(field) or None) != (expected.get(field) or None):
            yield ArrayMetadataError(
                f"{path}: metadata of {array!r} says {field} = {document.get(field)!r}, the manifest says "
                f"{expected.get(field)!r}; {REPAIR}",
                path=path,
                array=array,
                field=field,
                found=document.get(field),
                expected=expected.get(field),
            )
            return
