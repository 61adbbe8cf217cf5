"""Cores near a GPU: of its node, divided among the GPUs that share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_engine.processes.cluster.near import cores_near

TOLD = "0, GPU-a, 00000000:18:00.0\n1, GPU-b, 00000000:3B:00.0\n2, GPU-c, 00000000:9A:00.0\n"


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    for bus, cores in (
        ("0000:18:00.0", "0-3,8-9"),
        ("0000:3b:00.0", "0-3,8-9"),
        ("0000:9a:00.0", "4-7,10-20"),
    ):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "local_cpulist").write_text(cores + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("seen", "cores"),
    [
        ("0", {0, 1, 2}),
        ("1", {3, 8, 9}),
        ("GPU-c", {4, 5, 6, 7, 10, 11}),
        ("7", None),
        ("0,1", None),
        ("", None),
    ],
)
def test_cores_of_a_node_are_divided(devices: Path, seen: str, cores: set[int] | None) -> None:
    assert cores_near({"CUDA_VISIBLE_DEVICES": seen}, lambda: TOLD, devices) == cores


def test_where_nobody_tells_there_are_no_nearest_cores(tmp_path: Path) -> None:
    assert cores_near({"CUDA_VISIBLE_DEVICES": "0"}, lambda: TOLD, tmp_path) is None
    assert cores_near({"CUDA_VISIBLE_DEVICES": "0"}, lambda: "no devices were found", tmp_path) is None
