"""Every mutant of `mutants.txt` is caught by the tests that it names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("index_store", "prefill_worker", "decode_engine")
FAILED = 1  # of pytest's: tests ran, and some failed


@dataclass(frozen=True)
class Mutant:
    """breaks: what is wrong then. before: text that the packages have exactly once. tests: arguments of pytest."""

    breaks: str
    before: str
    after: str
    tests: str


def listed() -> Iterator[Mutant]:
    text = (Path(__file__).parent / "mutants.txt").read_text()
    for block in text.split("\n\n")[1:]:
        breaks, *lines = block.strip("\n").split("\n")
        marked = {mark: [line[1:] for line in lines if line[0] == mark] for mark in "-+@"}
        before, after = ("\n".join(marked[mark]) for mark in "-+")
        yield Mutant(breaks, before, after, " ".join(marked["@"]))


MUTANTS = tuple(listed())


def sources(folder: Path) -> dict[Path, str]:
    """All files of the packages."""
    files = [file for package in PACKAGES for file in sorted((folder / package).rglob("*.py"))]
    return {file: file.read_text() for file in files}


def places(files: dict[Path, str], text: str) -> list[Path]:
    """A file for every time that the text is there."""
    return [file for file, source in files.items() for _ in range(source.count(text))]


def run_tests(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The copy's tests on the copy's packages."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0"]
    selected = ["-m", "not gpu and not nightly", *arguments]
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    there = {"PYTHONPATH": os.pathsep.join([str(folder), str(folder / "protos")])}
    return subprocess.run(
        [*command, *selected], cwd=folder, env=others | there, capture_output=True, text=True, check=False
    )


def test_the_table_fits_the_code() -> None:
    files = sources(ROOT)
    wrong = [
        f"{mutant.breaks!r}: {len(found)} times {mutant.before!r}"
        for mutant in MUTANTS
        if len(found := places(files, mutant.before)) != 1
    ]
    assert not wrong, (
        "tests/mutants/mutants.txt breaks lines of the packages by their text, which has to be there exactly once; "
        "where you changed such a line, write the new one and its break there, and run `python -m pytest "
        "tests/mutants -m nightly -k WORD` with a word of its first line:\n" + "\n".join(wrong)
    )
    assert all((ROOT / name).exists() for mutant in MUTANTS for name in mutant.tests.split() if "/" in name)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The packages and their tests, which pass as they are."""
    folder = tmp_path_factory.mktemp("mutants")
    for name in (*PACKAGES, "protos", "tests", "ops", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.breaks for mutant in MUTANTS])
def test_a_mutant_is_caught(mutant: Mutant, copy: Path) -> None:
    files = sources(copy)
    [file] = places(files, mutant.before)
    whole = files[file]
    file.write_text(whole.replace(mutant.before, mutant.after))
    try:
        found = run_tests(copy, mutant.tests.split())
    finally:
        file.write_text(whole)
    assert found.returncode == FAILED, f"{mutant.tests} did not notice that {mutant.breaks}:\n{found.stdout}"


@pytest.mark.nightly
def test_whole_packages_pass(copy: Path) -> None:
    """What catches mutants fails for no other reason."""
    plain = sorted({name for mutant in MUTANTS if "-k" not in mutant.tests for name in mutant.tests.split()})
    found = run_tests(copy, plain)
    assert found.returncode == 0, found.stdout
