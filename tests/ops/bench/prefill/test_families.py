"""The benchmark of families: its whole path over a toy model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.bench.conftest import Run, load_bench
from tests.support.models import write_model_folder


def test_every_figure_is_there(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("prefill/families")
    model = write_model_folder(tmp_path / "model", "llama", layers=2, head_dim=32, max_positions=8192)
    options = {"stored": "5k", "tokens": "6k", "children": 2, "added": 20, "chunk": 512}
    rows, code, _ = run(bench, model=str(model), folder=tmp_path, **options)
    assert code == 0
    assert [row["figure"] for row in rows] == ["beginning", "from_nothing", "from_beginning", "children"]
    taken = [row["taken_tokens"] for row in rows[:3]]
    assert taken[:2] == [0, 0]
    assert 0 < taken[2] <= 5120
    assert rows[3]["children_bytes"] == 2 * rows[3]["child_bytes"] < rows[3]["parent_bytes"]
