"""The attention benchmark runs at a tiny size, and refuses to report a time for a wrong result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from index_store.methods.method import get_method
from index_store.selection.ranking import Ranking
from tests.ops.scripts import load_script

BENCH = Path(__file__).resolve().parents[2] / "ops" / "bench" / "attention_cpu.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(BENCH)


def test_one_json_line_per_result(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--lengths", "1k", "--shapes", "reader", "--keep", "0.05"]
    command += ["--repeats", "2", "--table", str(tmp_path / "table.md")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["method"] for row in rows] == [
        "full",
        "full-products",
        "full-engine",
        "read",
        "csattention-dense",
        "csattention-lists",
        "csattention-remainder",
    ]
    for row in rows:
        assert (row["shape"], row["context"]) == ("reader", 1024)
        assert row["step_us"] > 0
        assert {"date", "processor", "cores", "torch", "numba", "python"} <= set(row["machine"])
    table = (tmp_path / "table.md").read_text().splitlines()
    assert len(table) == 9
    assert len({line.count("|") for line in table}) == 1
    variants = rows[0]["variants_us"]
    assert rows[0]["step_us"] == min(us for name, us in variants.items() if name.startswith("sdpa"))
    assert rows[1]["step_us"] == min(us for name, us in variants.items() if name.startswith("bmm"))
    for row in rows:
        assert row["speedup"] == pytest.approx(rows[0]["step_us"] / row["step_us"], abs=0.02, rel=0.01)
        assert row["speedup_products"] == pytest.approx(
            rows[1]["step_us"] / row["step_us"], abs=0.02, rel=0.01
        )
    for row in rows[4:]:
        assert 0 < row["search_us"] < row["search_us"] + row["gather_us"] + row["attend_us"]


def test_a_wrong_length_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--lengths", "many"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: length is 'many'")


@pytest.mark.parametrize("layout", ["dense", "lists"])
def test_a_spoiled_index_fails_the_check(bench: ModuleType, layout: str) -> None:
    problem = bench.make_problem(bench.SHAPES["reader"], 2048, 2, 0)
    method = get_method("csattention+dropped", 0.05)
    index = bench.build_index(problem, layout, 0)
    bench.SparseBench(problem, index, method).check()
    index.rank = lambda *arguments: spoil(type(index).rank(index, *arguments))
    with pytest.raises(bench.CheckFailedError, match="selection holds"):
        bench.SparseBench(problem, index, method).check()


def spoil(ranking: Ranking) -> Ranking:
    return Ranking(-ranking.logits_HTGM, ranking.items)


def test_a_spoiled_partition_fails_the_check(bench: ModuleType) -> None:
    problem = bench.make_problem(bench.SHAPES["reader"], 2048, 2, 0)
    index, partition = bench.build_index(problem, "dense", 0), bench.build_partition(problem, 0)
    method = get_method("csattention", 0.05)
    bench.SparseBench(problem, index, method, partition).check()
    partition.arrays()["value_sums"].mul_(1.1)
    with pytest.raises(bench.CheckFailedError, match="sparse attention: relative error"):
        bench.SparseBench(problem, index, method, partition).check()


def test_wrong_attention_fails_the_check(bench: ModuleType) -> None:
    truth = torch.ones(2, 3).double()
    bench.check_close("right", torch.ones(2, 3), truth, 1e-3)
    with pytest.raises(bench.CheckFailedError, match="relative error"):
        bench.check_close("wrong", torch.ones(2, 3) * 1.01, truth, 1e-3)
    with pytest.raises(bench.CheckFailedError):
        bench.check_close("nan", torch.full((2, 3), torch.nan), truth, 1e-3)


def test_missed_bars_are_named(bench: ModuleType) -> None:
    row = {
        "method": "csattention-dense",
        "shape": "llama-3.1-8b",
        "context": 32768,
        "keep": 0.05,
        "speedup": 2.9,
    }
    assert len(bench.missed_bars([row])) == 1
    assert bench.missed_bars([row | {"speedup": 3.0}]) == []
    assert bench.missed_bars([row | {"context": 8192}]) == []
    assert bench.missed_bars([row | {"method": "csattention-lists"}]) == []
    assert bench.missed_bars([{"method": "full", "shape": "llama-3.1-8b", "context": 131072}]) == []
