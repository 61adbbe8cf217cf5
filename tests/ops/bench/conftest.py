"""Benchmarks as modules, and over tiny models in the interpreter where there is no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from tests.ops.scripts import load_script

FOLDER = Path(__file__).resolve().parents[3] / "ops" / "bench"
sys.path.insert(0, str(FOLDER))  # where their harness is


def load_bench(name: str) -> ModuleType:
    """By its path in ops/bench, without the ending."""
    return load_script(FOLDER / f"{name}.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Benchmarks run in small at night; by day `test_harness.py` looks at all of them."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.path.name != "test_harness.py":
            item.add_marker(pytest.mark.nightly)


@pytest.fixture
def without_gpu(few_programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks do not ask for a GPU; contexts in float32, which the interpreter is exact in; short warm-ups."""
    monkeypatch.setattr("harness.report.require_device", lambda: None)
    monkeypatch.setattr("harness.made_up.contexts.DTYPE", "float32")
    monkeypatch.setattr("harness.steps.general_steps.WARM_UP", 1)


Run = Callable[..., tuple[list[dict[str, Any]], int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a benchmark's command with options; returns its lines, its exit code and what it wrote to stderr."""

    def run(bench: ModuleType, **options: Any) -> tuple[list[dict[str, Any]], int, str]:
        code = 0
        try:
            bench.main(**options)
        except typer.Exit as ended:
            code = ended.exit_code
        written = capsys.readouterr()
        return [json.loads(line) for line in written.out.splitlines()], code, written.err

    return run
