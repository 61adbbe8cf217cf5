"""The wheel is complete: it works unpacked, outside the checkout, with nothing of the checkout on the path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "index-store": "index_store.__main__:main",
    "prefill-worker": "prefill_worker.__main__:main",
    "decode-engine": "decode_engine.__main__:main",
}

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel; building happens in a copy, because setuptools leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("index_store", "prefill_worker", "decode_engine", "protos"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    ]
    built = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    target = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run(unpacked: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs python in an empty folder with the unpacked wheel as the only addition to its path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    elsewhere = unpacked.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=elsewhere,
        env=environment | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_module_and_data_file_is_in_the_wheel(unpacked: Path) -> None:
    for package, base in (("index_store", ROOT), ("prefill_worker", ROOT), ("decode_engine", ROOT)):
        expected = {path.relative_to(base) for path in (base / package).rglob("*.py")}
        assert {path for path in expected if not (unpacked / path).is_file()} == set()
    stubs = {path.name for path in (ROOT / "protos" / "sparsekv" / "v1").iterdir() if path.is_file()}
    assert {path.name for path in (unpacked / "sparsekv" / "v1").iterdir()} == stubs
    for folder in ("index_store/models/reader", "decode_engine/evaluation/data"):
        assert {path.name for path in (unpacked / folder).iterdir()} == {
            path.name for path in (ROOT / folder).iterdir() if path.is_file()
        }


def test_metadata(unpacked: Path) -> None:
    (info,) = unpacked.glob("sparsekv-*.dist-info")
    entry_points = (info / "entry_points.txt").read_text()
    for command, target in COMMANDS.items():
        assert f"{command} = {target}" in entry_points
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    assert "License-Expression: Apache-2.0" in (info / "METADATA").read_text()


def test_imports_come_from_the_wheel(unpacked: Path) -> None:
    names = (
        "index_store, prefill_worker, decode_engine, sparsekv.v1.generation_pb2, sparsekv.v1.context_pb2_grpc"
    )
    code = f"import {names}, sys; print([sys.modules[n.strip()].__file__ for n in {names!r}.split(',')])"
    done = run(unpacked, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(unpacked)) == len(names.split(","))


def test_the_packaged_reader_prefills_and_the_store_lists_it(unpacked: Path, tmp_path: Path) -> None:
    document, questions, store = tmp_path / "document.txt", tmp_path / "questions.jsonl", tmp_path / "store"
    made = run(
        *(unpacked, "-m", "decode_engine", "make-document", "--tokens", "600", "--facts", "2"),
        *("--out", str(document), "--questions", str(questions)),
    )
    assert made.returncode == 0, made.stderr
    prefilled = run(
        *(unpacked, "-m", "prefill_worker", "run", "--model", "reader", "--format", "json"),
        *("--input", str(document), "--store", str(store)),
    )
    assert prefilled.returncode == 0, prefilled.stderr
    report = json.loads(prefilled.stdout)
    assert report["tokens"] == 600
    listed = run(unpacked, "-m", "index_store", "ls", "--store", str(store), "--format", "json")
    assert listed.returncode == 0, listed.stderr
    assert report["id"] in listed.stdout
