"""The benchmark of whole-model decode steps: its whole path on a CPU, and what counts as what."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from index_store.memory.placement import Placement
from tests.ops.bench.conftest import FOLDER, Run, load_bench
from tests.support.tiny_model import IDENTITY, make_model

KERNELS = FOLDER.parents[1] / "decode_engine" / "kernels"


@pytest.fixture
def bench(without_gpu: None) -> ModuleType:
    return load_bench("whole_model/decode_gpu")


def test_every_kernel_has_a_kind(bench: ModuleType) -> None:
    texts = (file.read_text() for file in KERNELS.rglob("*.py"))
    kernels = {name for text in texts for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)}
    assert len(kernels) > 10
    kinds = {
        name: [kind for kind, pattern in bench.KINDS.items() if re.fullmatch(pattern, name)]
        for name in kernels
    }
    assert {name: found for name, found in kinds.items() if len(found) != 1} == {}


@pytest.fixture
def lines(bench: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command over a tiny model, all but what only a GPU's clocks tell; returns its lines and exit code."""
    wide = replace(IDENTITY, layers=2, query_heads=2, kv_heads=1, head_dim=64)
    for name, value in {
        "make_model": lambda layers: (make_model(wide), wide),
        "copy_bandwidth": lambda: 1e9,
        "event_ms": lambda work: 1.0,
        "eager_ms": lambda graph: 2.0,
        "split_us": lambda graph: {},
    }.items():
        monkeypatch.setattr(bench, name, value)

    def of(methods: str, placement: Placement, trained: bool = False) -> tuple[list[dict[str, Any]], int]:
        found, code, _ = run(
            bench, methods=methods, shapes="400x2" if trained else "400x1", layers=2,
            placement=placement, host_gb=1e-3, turns=2, trained=trained,
        )  # fmt: skip
        return found, code

    return of


def test_every_method_has_its_line(lines: Any) -> None:
    found, code = lines("none,full,streamed,refined+dropped:0.05,quest", Placement.DEVICE)
    nothing, full, streamed, coarse, pages = found
    assert nothing["rest_over_weights"] > 0
    assert full["logits_difference"] < 1e-3
    assert "speedup" not in full
    assert (full["steps"], streamed["captured"], pages["captured"]) == (2, False, False)
    assert (full["flight_alike"], coarse["flight_alike"], "flight_ms" in pages) == (1.0, 1.0, False)
    assert full["flight_ms"] > 0
    assert coarse["speedup"] > 0
    assert coarse["attended"] < 1
    assert "host_mb" not in coarse
    assert code == 0


@pytest.mark.usefixtures("prefilled_here")
def test_a_trained_models_keys_and_queries(lines: Any) -> None:
    """Logits of captured steps are compared with those of the general path, which gets the same queries."""
    (full, refined), code = lines("full,refined:0.05", Placement.DEVICE, True)
    assert (code, full["trained"], full["batch"]) == (0, True, 2)
    assert full["logits_difference"] < 1e-3
    assert refined["logits_difference"] < 1e-3
    assert refined["attended"] < 1


def test_contexts_in_host_memory(lines: Any) -> None:
    (line,), code = lines("refined+dropped:0.05", Placement.HYBRID)
    assert (code, line["placement"]) == (0, "hybrid")
    assert line["host_mb"] > 0
    assert 0 <= line["reused"] <= 1
    assert line["logits_difference"] < 1e-3
