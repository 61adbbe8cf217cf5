"""The documents of a corpus: files of text, JSON lines and Parquet, on this machine or in an object store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

from index_store.cli.documents import decode_text, document_name
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.objects.bucket import Bucket, check_url, folder_of

_TEXT = (".txt", ".text", ".md")
_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet",)
KINDS = (*_TEXT, *_LINES, *_PARQUET)
"""Endings of the files that are taken from a folder."""


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file: below the URL of an object store, or, where that is "", on this machine."""

    url: str
    path: str

    @property
    def source(self) -> str:
        """For people."""
        return f"{self.url.rstrip('/')}/{self.path}" if self.url else self.path

    def read(self) -> bytes:
        """Raises InvalidArgumentError, and ObjectsUnavailableError where an object store does not answer."""
        if self.url:
            return Bucket.open(self.url).get(self.path)
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise InvalidArgumentError(f"{self.path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or why there is none.

    source: its file, and in a file of many the line or row, from 1. title: of its context. problem, reason: of one
    that cannot be read, "" of others.
    """

    source: str
    title: str
    text: str
    problem: str = ""
    reason: str = ""

    @property
    def nbytes(self) -> int:
        """Of the text as UTF-8."""
        return len(self.text.encode())


def find_files(sources: Sequence[str]) -> tuple[list[CorpusFile], int]:
    """The files that sources name, each once, and how many in folders are of other kinds.

    A folder and the URL of one stand for all files of `KINDS` below them. A file that is named itself is text unless
    its ending says otherwise. Raises InvalidArgumentError for what is not there or cannot be listed.
    """
    found: dict[CorpusFile, None] = {}
    others = 0
    for source in sources:
        local = folder_of(source) if source.startswith("file://") else Path(source)
        if "://" in source and not source.startswith("file://"):
            named, below = _of_bucket(source)
        elif local is not None and local.is_dir():
            named, below = (
                [],
                [CorpusFile("", str(each)) for each in sorted(local.rglob("*")) if each.is_file()],
            )
        elif local is not None and local.is_file():
            named, below = [CorpusFile("", str(local))], []
        else:
            raise InvalidArgumentError(
                f"SOURCE is {source[:200]!r}, which is not there; expected a file, a folder, or a URL of an object "
                "store"
            )
        taken = [each for each in below if each.path.lower().endswith(KINDS)]
        others += len(below) - len(taken)
        found.update(dict.fromkeys([*named, *taken]))
    for file in found:
        if not file.path.isprintable():
            raise InvalidArgumentError(
                f"{ascii(file.path)[:200]} has a name that cannot be printed; rename it"
            )
    if not found:
        raise InvalidArgumentError(
            f"no documents in {', '.join(sources)[:200]}; expected files of {', '.join(KINDS)}"
        )
    return list(found), others


def _of_bucket(url: str) -> tuple[list[CorpusFile], list[CorpusFile]]:
    try:
        check_url(url)
        if urlsplit(url).path.lower().endswith(KINDS):
            folder, _, name = url.rpartition("/")
            Bucket.open(folder).size(name)
            return [CorpusFile(folder, name)], []
        return [], [CorpusFile(url, each.key) for each in Bucket.open(url).list("")]
    except SparseKVError as error:
        raise InvalidArgumentError(f"SOURCE: {error.message}") from error


def documents_of(file: CorpusFile, text_field: str = "text", name_field: str = "name") -> Iterator[Document]:
    """All documents of a file. What cannot be read is a document with a problem, and others are not harmed by it.

    text_field, name_field: members of a JSON line, or columns. A document without a name is called after its file.
    """
    title = document_name((Path(file.path),))
    try:
        data = file.read()
        if file.path.lower().endswith(_PARQUET):
            rows = _parquet_rows(data, text_field, name_field)
        elif file.path.lower().endswith(_LINES):
            rows = _json_rows(decode_text(file.source, data))
        else:
            yield _checked(file.source, title, decode_text(file.source, data))
            return
        for number, row in rows:
            source = f"{file.source}:{number}"
            if isinstance(row, str):
                yield Document(source, title, "", row, InvalidArgumentError.reason)
                continue
            name = row.get(name_field)
            named = document_name((Path(f"{name}.txt"),)) if isinstance(name, str) and name.strip() else ""
            text = row.get(text_field)
            if not isinstance(text, str):
                problem = f"{text_field!r} is {type(text).__name__}, expected text; --text-field names another member"
                yield Document(source, title, "", problem, InvalidArgumentError.reason)
                continue
            yield _checked(source, named or f"{title}-{number}", text)
    except SparseKVError as error:
        yield Document(file.source, title, "", error.message, error.reason)


def _checked(source: str, title: str, text: str) -> Document:
    problem = "" if text.strip() else "empty; expected text"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"half a surrogate pair at character {error.start}; expected text that UTF-8 can write"
    return Document(
        source, title, "" if problem else text, problem, InvalidArgumentError.reason if problem else ""
    )


def _json_rows(text: str) -> Iterator[tuple[int, dict[str, object] | str]]:
    """Each line that is not blank with its number, from 1: its object, or what is wrong with it."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON: {error}"
            continue
        yield number, row if isinstance(row, dict) else f"{type(row).__name__} in JSON, expected an object"


def _parquet_rows(data: bytes, *columns: str) -> Iterator[tuple[int, dict[str, object] | str]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(BytesIO(data))
        there = [name for name in columns if name in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=there):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InvalidArgumentError(f"not a Parquet file that can be read: {error}") from error
