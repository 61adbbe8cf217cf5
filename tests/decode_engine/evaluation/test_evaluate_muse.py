"""Evaluation of contexts that were prefilled with approximate attention against exact ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from decode_engine.evaluation.prefill_command import PrefillCommand, PrefillFailedError, attention_flags
from decode_engine.evaluation.settings import EvaluationConfig
from index_store.errors import InvalidArgumentError
from index_store.store.catalog import Store
from tests.decode_engine.evaluation.test_evaluate import Run, run  # noqa: F401 - a fixture


def test_expressions_become_flags() -> None:
    assert attention_flags("exact") == []
    assert attention_flags("muse") == ["--attention", "muse"]
    assert attention_flags("muse:block=1024, cap=2.0,monopole") == [
        *("--attention", "muse", "--muse-block", "1024", "--muse-cap", "2.0", "--no-muse-dipole")
    ]
    for expression in (
        "fast",
        "exact:block=3",
        "muse:",
        "muse:block",
        "muse:speed=2",
        "muse:dipole",
        "muse:block=x",
        "muse:block=1.5",
    ):
        with pytest.raises(InvalidArgumentError, match="attention is"):
            attention_flags(expression)


def test_what_a_usage_error_says_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "computing on cpu\nerror: invalid value for '--chunk'\n"
    done = subprocess.CompletedProcess([], 2, stdout="", stderr=said)
    monkeypatch.setattr("decode_engine.evaluation.prefill_command.subprocess.run", lambda *_, **__: done)
    with pytest.raises(PrefillFailedError, match=r"text: invalid value for '--chunk'$"):
        PrefillCommand("reader", tmp_path, ["full"]).run(tmp_path / "text", "name")


def test_variants_are_there_twice() -> None:
    config = EvaluationConfig(Path("o"), methods=("full",), attention="muse:block=512")
    assert [variant.name for variant in config.variants()] == ["full"]
    assert [variant.name for variant in config.approximated()] == ["full after muse:block=512"]
    assert EvaluationConfig(Path("o")).approximated() == []
    with pytest.raises(InvalidArgumentError, match="cannot read 'speed=2'"):
        EvaluationConfig(Path("o"), attention="muse:speed=2")


@pytest.mark.slow
@pytest.mark.usefixtures("prefilled_here")
def test_the_cost_of_an_approximate_prefill_is_shown(run: Run, tmp_path: Path) -> None:  # noqa: F811
    attention = "muse:block=128,clusters=4"
    results = run(
        *("evaluate", "--out", str(tmp_path), "--context-length", "700", "--questions", "2"),
        *("--facts", "2", "--text-tokens", "16", "--methods", "full", "--attention", attention),
        "--no-picture",
    )
    exact, approximated = results["scores"]
    assert exact["method"] == "full"
    assert exact["kl"] == 0.0
    assert approximated["method"] == f"full after {attention}"
    assert approximated["kl_text"] > 0.0
    assert approximated["questions"] == exact["questions"] == 2
    kept = {manifest.prefill["attention"] for manifest in Store(tmp_path / "store").list()}
    assert kept == {"exact", "muse"}
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["attention"] == attention
