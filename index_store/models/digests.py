"""SHA-256 of files: of several at once by all cores, and kept for as long as a file stays as it is."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

from index_store.compiled.places import cache_folder
from index_store.models.model_folder import ModelFolder

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


Progress = Callable[[int, int], None]
"""Is told bytes done and bytes in all, by the threads that hash, one at a time."""

_KIND = "digests"
_PIECE = 2**20  # bytes read at a time
_SETTLED_NS = 100_000_000  # clocks of file systems are coarse: a younger file may change and look the same
_TOLD_S = 1.0  # from which on the log says what hashing took

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file as it is now: where, and what changes when its contents do. Times in nanoseconds."""

    path: str
    size: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Follows symbolic links. Raises OSError."""
        status = path.stat()
        own = (status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        return cls(str(path.resolve()), *own)


class HashingStoppedError(Exception):
    """Nobody waits for the digests any longer."""


class _Tally:
    """Bytes that several threads have hashed."""

    def __init__(self, total: int, progress: Progress | None, stop: threading.Event) -> None:
        self._total, self._progress, self._stop = total, progress, stop
        self._done = 0
        self._adding = threading.Lock()

    def add(self, count: int) -> None:
        if self._stop.is_set():
            raise HashingStoppedError
        with self._adding:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)


def hash_file(path: Path) -> str:
    """SHA-256 of one file, in hexadecimal digits. Raises as `hash_files` does."""
    return hash_files(ModelFolder(path.parent, path.name), [path])[0]


def hash_files(
    folder: ModelFolder,
    paths: Sequence[Path],
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> list[str]:
    """SHA-256 of every file, in the order given. Only files that are new or have changed are read.

    One thread hashes one file, since the digest of a file is that of its bytes in order. stop: ends the hashing with
    HashingStoppedError. Raises OSError, and ModelUnsupportedError, which names the folder, for a file that changes
    while it is read.
    """
    stamps = [Stamp.of(path) for path in paths]
    known = {stamp: digest for stamp in stamps if (digest := _known(stamp)) is not None}
    new = sorted({stamp for stamp in stamps if stamp not in known}, key=lambda own: -own.size)
    total = sum(stamp.size for stamp in stamps)
    tally = _Tally(total, progress, stop or threading.Event())
    tally.add(sum(stamp.size for stamp in stamps if stamp in known))
    if new:
        begin = time.perf_counter()
        threads = min(len(new), len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
            digests = pool.map(lambda stamp: _hash(folder, stamp, tally), new)
            known.update(zip(new, digests, strict=True))
        _tell(folder, new, threads, time.perf_counter() - begin)
    return [known[stamp] for stamp in stamps]


_IN_PROCESS: dict[Stamp, str] = {}


def _known(stamp: Stamp) -> str | None:
    if stamp not in _IN_PROCESS:
        record = recall(_KIND, astuple(stamp))
        digest = None if record is None else record.get("sha256")
        if digest is None:
            return None
        _IN_PROCESS[stamp] = digest
    return _IN_PROCESS[stamp]


def _hash(folder: ModelFolder, stamp: Stamp, tally: _Tally) -> str:
    path = Path(stamp.path)
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    settled = time.time_ns() - stamp.ctime_ns > _SETTLED_NS
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            tally.add(count)
    if Stamp.of(path) != stamp:
        raise folder.refuse(f"its {path.name} changed while it was read; try again when nobody writes to it")
    _IN_PROCESS[stamp] = digest.hexdigest()
    if settled:
        keep(_KIND, astuple(stamp), {"sha256": digest.hexdigest()})
    return digest.hexdigest()


def _tell(folder: ModelFolder, new: Sequence[Stamp], threads: int, seconds: float) -> None:
    if seconds > _TOLD_S:
        logger.info(
            "hashed %.1f GB in %d files of model %s by %d threads in %.1f s, once (the largest file, which is one "
            "thread's, has %.1f GB)",
            sum(stamp.size for stamp in new) / 1e9, len(new), folder.name, threads, seconds, new[0].size / 1e9,
        )  # fmt: skip
