"""Pages that are read to the end have a budget of words, and packages one of lines: it changes only for a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MOST_WORDS = {
    "README.md": 900,
    "CONTRIBUTING.md": 1_500,
    "docs/architecture.md": 3_000,
    "docs/benchmarks.md": 2_500,
    "docs/cluster.md": 2_150,  # a front door without Ray, and several GPUs with their figures, are told there
    "docs/evaluation.md": 2_500,
    "docs/gpu.md": 2_500,
    "docs/methods.md": 2_500,
    "docs/metrics.md": 1_320,  # traces and audits are told there, too, and what was mended
    "docs/models.md": 1_930,  # its tables name every architecture; states, few bits, learnt indexes, figures on a GPU
    "docs/operations.md": 2_700,  # tenants, tiers, configuration, draining, backup, upgrades, and what breaks
    "docs/prefill.md": 2_000,
    "docs/start.md": 2_000,
}
REFERENCE = {"docs/api.md", "docs/log.md"}
"""Looked up, not read: the reference of the API, which is made from the code, and the log."""

MOST_LINES = {
    "decode_engine/cli": 2_560,  # tokens have tenants and rights, tenants a table
    "decode_engine/core": 2_590,  # spans, audits, accounts of tenants; a divided model's processes
    "decode_engine/engine": 4_190,  # turns between tenants are taken there
    "decode_engine/evaluation": 3_050,
    "decode_engine/gateway": 3_910,
    "decode_engine/host_search": 1_660,
    "decode_engine/kernels": 8_950,  # states are copied there, too
    "decode_engine/layers": 2_120,
    "decode_engine/model": 3_010,  # drafts are chosen by time; a CPU's steps in few calls; models' own indexes
    "decode_engine/orders": 965,
    "decode_engine/processes": 3_330,  # draining by a client, ends told by the kernel; front doors of a cluster on Ray
    "decode_engine/rpc": 7_570,  # who calls, what they may, and what was refused; what is made again; several servers
    "decode_engine/settings": 600,  # the file of quotas
    "decode_engine/steps": 2_950,  # with those of models with states
    "index_store": 31_330,  # one loop over coded rows; tenants, quotas, tiers; contexts made again
    "prefill_worker": 8_210,  # many documents on Ray; a job knows its tenant, and keeps states at marks
}


@pytest.mark.parametrize("page", MOST_WORDS)
def test_a_page_keeps_its_budget(page: str) -> None:
    """Words as `wc -w` counts them, those of tables and commands among them."""
    words = len((ROOT / page).read_text().split())
    assert words <= MOST_WORDS[page], (
        f"{page} has {words} words of {MOST_WORDS[page]}: shorten it, or raise MOST_WORDS with a reason"
    )


def test_every_page_has_a_budget() -> None:
    pages = {str(path.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md")}
    assert pages == set(MOST_WORDS) | REFERENCE


@pytest.mark.parametrize("package", MOST_LINES)
def test_a_package_keeps_its_budget(package: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py"))
    assert lines <= MOST_LINES[package], (
        f"{package} has {lines} lines of {MOST_LINES[package]}: what can go? Else raise MOST_LINES with a reason"
    )


def test_every_package_has_a_budget() -> None:
    folders = {f"decode_engine/{each.parent.name}" for each in (ROOT / "decode_engine").glob("*/__init__.py")}
    assert folders | {"index_store", "prefill_worker"} == set(MOST_LINES)
