"""What was found out once and is kept in the user's cache: small records under a key, sealed, the oldest removed."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from index_store.compiled.places import cache_folder

MOST = 2048
"""Records of one kind."""

_VERSION = 1
_SUFFIX = ".json"

Key = Sequence[str | int]
Record = Mapping[str, str | None]


def recall(kind: str, key: Key) -> Record | None:
    """What was kept under the key; None for what is not there, damaged, or of another version."""
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        sealed = json.loads(_place(kind, key).read_text(encoding="utf-8"))
        record = sealed["record"]
        if sealed == _seal(key, record) and all(isinstance(text, str | None) for text in record.values()):
            return dict(record)
    return None


def keep(kind: str, key: Key, record: Record) -> None:
    """Keeps a record by one rename. Where nothing can be written, nothing is kept."""
    place = _place(kind, key)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_oldest(place.parent)
        with tempfile.NamedTemporaryFile(
            "w", dir=place.parent, suffix=_SUFFIX, delete=False, encoding="utf-8"
        ) as file:
            json.dump(_seal(key, record), file)
        Path(file.name).replace(place)


def _place(kind: str, key: Key) -> Path:
    return cache_folder() / kind / f"{hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()}{_SUFFIX}"


def _seal(key: Key, record: Record) -> dict[str, object]:
    content = {"version": _VERSION, "key": list(key), "record": dict(record)}
    return {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def _remove_oldest(folder: Path) -> None:
    """Makes room for one more, also among what a killed process has not finished."""
    files = list(folder.glob(f"*{_SUFFIX}"))
    if len(files) < MOST:
        return
    written = {file: file.stat().st_mtime_ns for file in files}
    for file in sorted(files, key=written.__getitem__)[: len(files) - MOST + 1]:
        file.unlink(missing_ok=True)
