"""The benchmark of whole-model decode steps: refused without a GPU, its whole path on a CPU, what counts as what."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from decode_engine.config import Compilation
from index_store.memory.placement import Placement
from tests.ops.scripts import check_refusal_without_device, load_script
from tests.ops.tiny_model import IDENTITY, make_model

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "ops" / "bench" / "decode_gpu.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(BENCH)


def test_without_a_device_it_says_so() -> None:
    check_refusal_without_device(BENCH)


def test_nothing_is_fetched_ahead_from_gpu_memory() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--prefetch"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--prefetch is for contexts" in done.stderr


def test_every_kernel_has_a_kind(bench: ModuleType) -> None:
    files = [
        *(ROOT / "decode_engine").rglob("kernels/**/*.py"),
        *(ROOT / "decode_engine").rglob("*_triton.py"),
    ]
    kernels = {name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)}
    assert len(kernels) > 10
    kinds = {
        name: [kind for kind, pattern in bench.KINDS.items() if re.fullmatch(pattern, name)]
        for name in kernels
    }
    assert {name: found for name, found in kinds.items() if len(found) != 1} == {}


def test_bars(bench: ModuleType) -> None:
    rest = {"method": "none", "batch": 1}
    assert not bench.misses(rest | {"rest_over_weights": 1.3})
    assert bench.misses(rest | {"rest_over_weights": 1.4})
    step = {"method": "csattention+dropped:0.01", "batch": 4}
    assert not bench.misses(step | {"speedup": 2.6})
    assert bench.misses(step | {"speedup": 2.4})
    assert bench.misses(step)
    assert not bench.misses({"method": "full", "batch": 4})


def test_a_method_that_fails_does_not_end_the_others(bench: ModuleType) -> None:
    class Measured:
        def measure(self, label: str, method: Any) -> dict[str, Any]:
            if label == "pq":
                raise RuntimeError("too large")
            return {"step_ms": 10.0 if label == "full" else 4.0, "graph_ms": 3.0}

    rows = list(bench.shape_figures(Measured(), ["none", "full", "pq", "csattention:0.01"], 2.0))
    assert [row["method"] for row in rows] == ["none", "full", "pq", "csattention:0.01"]
    assert rows[0]["rest_over_weights"] == 1.5
    assert rows[2] == {"method": "pq", "error": "RuntimeError: too large"}
    assert rows[3]["speedup"] == 2.5


@pytest.fixture
def lines(
    few_programs: None,
    short_warm_up: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """Runs the command over a tiny model, all but what only a GPU's clocks tell; returns its lines and exit code."""
    bench = load_script(BENCH)
    monkeypatch.setattr(sys.modules["placed_contexts"], "DTYPE", "float32")
    wide = replace(IDENTITY, layers=2, query_heads=2, kv_heads=1, head_dim=64)
    monkeypatch.setattr(bench, "require_device", lambda: None)
    monkeypatch.setattr(bench, "make_model", lambda layers: (make_model(wide), wide))
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(bench, "event_ms", lambda work: 1.0)
    monkeypatch.setattr(bench, "eager_ms", lambda graph: 2.0)
    monkeypatch.setattr(bench, "split_us", lambda graph: {})

    def run(methods: str, placement: Placement, prefetch: bool) -> tuple[list[dict[str, Any]], int]:
        with pytest.raises(typer.Exit) as ended:
            bench.main(
                methods=methods,
                shapes="400x1",
                layers=2,
                compilation=Compilation.OFF,
                placement=placement,
                prefetch=prefetch,
                host_gb=1e-3,
                turns=2,
                bars=False,
            )
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()], ended.value.exit_code

    return run


@pytest.mark.slow
def test_every_method_has_its_line(lines: Any) -> None:
    found, code = lines("none,full,streamed,pq+dropped:0.05,quest", Placement.DEVICE, False)
    nothing, full, streamed, codes, pages = found
    assert nothing["rest_over_weights"] > 0
    assert full["logits_difference"] < 1e-3
    assert "speedup" not in full
    assert (full["steps"], streamed["captured"], pages["captured"]) == (2, False, False)
    assert codes["speedup"] > 0
    assert codes["attended"] < 1
    assert "host_mb" not in codes
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [False, True])
def test_contexts_in_host_memory(lines: Any, prefetch: bool) -> None:
    (line,), code = lines("pq+dropped:0.05", Placement.HYBRID, prefetch)
    assert (code, line["prefetch"], line["placement"]) == (0, prefetch, "hybrid")
    assert line["host_mb"] > 0
    assert 0 <= line["reused"] <= 1
    assert line["logits_difference"] < 1e-3
