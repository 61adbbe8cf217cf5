"""What is kept of models, by what was found out: under its key alone, and believed only as it was written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from index_store.models.files import digests
from index_store.models.files.digests import keep, recall

KEY = ("name", 7)
RECORD = {"attention": None, "serving": "differ by 3%"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_is_found_under_its_key_alone() -> None:
    assert recall("checks", KEY) is None
    keep("checks", KEY, RECORD)
    assert recall("checks", KEY) == RECORD
    assert recall("digests", KEY) is None
    assert recall("checks", ("name", "7")) is None
    keep("checks", KEY, {"attention": None})
    assert recall("checks", KEY) == {"attention": None}


@pytest.mark.parametrize(
    ("part", "value"),
    [("record", {}), ("record", {"attention": 1}), ("key", ["other"]), ("version", 2), ("sha256", "0")],
)
def test_what_was_changed_is_not_believed(cache: Path, part: str, value: object) -> None:
    keep("checks", KEY, RECORD)
    (file,) = (cache / "checks").iterdir()
    sealed = json.loads(file.read_text())
    file.write_text(json.dumps({**sealed, part: value}))
    assert recall("checks", KEY) is None
    keep("checks", KEY, RECORD)
    assert recall("checks", KEY) == RECORD


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"record": {}}'])
def test_damaged_records_are_not_there(cache: Path, content: bytes) -> None:
    keep("checks", KEY, RECORD)
    (file,) = (cache / "checks").iterdir()
    file.write_bytes(content)
    assert recall("checks", KEY) is None


def test_the_oldest_go(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MOST", 3)
    for number in range(5):
        keep("checks", (number,), RECORD)
        for age, file in enumerate(
            sorted((cache / "checks").iterdir(), key=lambda own: -own.stat().st_mtime_ns)
        ):
            os.utime(file, ns=(0, 10**15 - age * 10**9))  # clocks are too coarse to tell them apart
    assert [number for number in range(5) if recall("checks", (number,))] == [2, 3, 4]
    assert len(list((cache / "checks").iterdir())) == 3


def test_a_cache_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "file"))
    keep("checks", KEY, RECORD)
    assert recall("checks", KEY) is None
