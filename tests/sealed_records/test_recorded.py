"""Sealed files that were written before are read as what they were, and written now byte for byte the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from index_store.store.catalog import Store
from prefill_worker.build.checkpoint import Checkpoint, parse_record
from tests.sealed_records.records import CONTEXT, KINDS, LAYER, RECORDED, json_files, write_context
from tests.support.store import other_model


@pytest.mark.parametrize("name", KINDS)
def test_a_record_is_read_and_written_as_before(name: str) -> None:
    sealed, record = KINDS[name]
    recorded = (RECORDED / f"{name}.json").read_bytes()
    read = sealed.parse(recorded, name)
    assert read == record
    assert sealed.render(record) == sealed.render(read) == recorded


def test_a_layers_record_is_read_and_written_as_before() -> None:
    recorded = (RECORDED / "layer.json").read_text()
    read = parse_record(recorded, LAYER.tensors())
    assert read == LAYER
    assert LAYER.describe() == read.describe() == recorded


class OneLayer:
    """Stands in for a `Capture` of one layer, [1, 2, 2, 1]."""

    identity = other_model(layers=1)

    def __init__(self) -> None:
        self.kv = torch.zeros(1, 2, 2, 1)

    def rows(self, start: int, count: int) -> Iterator[tuple[Tensor, None]]:
        yield self.kv[:, start : start + count], None

    def state_tensors(self) -> dict[str, Tensor]:
        return {}

    def put_state(self, tensors: object, behind: int) -> None:
        pass

    def put_rows(self, start: int, count: int, parts: Sequence[tuple[Tensor, None]]) -> None:
        self.kv[:, start : start + count] = parts[0][0]


def test_a_checkpoint_is_read_and_written_as_before(tmp_path: Path) -> None:
    notes: list[str] = []
    names = ("checkpoint.json", "layer-1", "tokens-0")
    for folder in ("read", "written"):
        (tmp_path / folder).mkdir()
    for name in names:
        shutil.copy(RECORDED / name, tmp_path / "read")
    capture: Any = OneLayer()
    read = Checkpoint(tmp_path / "read", CONTEXT, notes.append)
    assert read.restore(capture) == 2
    assert notes == ["went on with a reading that had come to token 2"]
    assert capture.kv.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert read.records() == {1: LAYER}
    written = Checkpoint(tmp_path / "written", CONTEXT, notes.append)
    written.keep(capture, 0, 2)
    written.keep_layer(1, LAYER)
    assert sorted(path.name for path in (tmp_path / "written").iterdir()) == sorted(names)
    for name in names:
        assert (tmp_path / "written" / name).read_bytes() == (RECORDED / name).read_bytes()


def test_a_context_has_the_files_of_before(tmp_path: Path) -> None:
    """All JSON of a context by the names of its files: the manifest, and what zarr says of groups and arrays."""
    Store(tmp_path, create=True)
    write_context(tmp_path)
    assert json_files(tmp_path) == json.loads((RECORDED / "store.json").read_text())


FIRST_READ = """
import sys, threading
from index_store.store.description.manifest import MANIFESTS

sys.setswitchinterval(1e-6)
data, both = sys.stdin.buffer.read(), threading.Barrier(2)
read = lambda: (both.wait(), MANIFESTS.parse(data, "there"))
threads = [threading.Thread(target=read) for _ in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
"""


def test_two_threads_may_be_the_first_to_read() -> None:
    sealed, record = KINDS["manifest-windowed"]
    data = sealed.render(record)
    for _ in range(3):
        subprocess.run([sys.executable, "-c", FIRST_READ], input=data, check=True, timeout=60)
