"""Pages that are read to the end: each has a budget of words, which changes only for a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MOST_WORDS = {
    "README.md": 900,
    "CONTRIBUTING.md": 1_500,
    "docs/architecture.md": 3_000,
    "docs/benchmarks.md": 2_500,
    "docs/evaluation.md": 2_500,
    "docs/gpu.md": 2_500,
    "docs/methods.md": 2_500,
    "docs/metrics.md": 1_250,  # traces and audits are told there, too
    "docs/models.md": 1_400,  # its tables name every architecture, and layers with states are a kind of their own
    "docs/prefill.md": 2_000,
    "docs/start.md": 2_000,
}
REFERENCE = {"docs/api.md", "docs/log.md"}
"""Looked up, not read: the reference of the API, which is made from the code, and the log."""


@pytest.mark.parametrize("page", MOST_WORDS)
def test_a_page_keeps_its_budget(page: str) -> None:
    """Words as `wc -w` counts them, those of tables and commands among them."""
    words = len((ROOT / page).read_text().split())
    assert words <= MOST_WORDS[page], f"{page} has {words} words of {MOST_WORDS[page]}: shorten it"


def test_every_page_has_a_budget() -> None:
    pages = {str(path.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md")}
    assert pages == set(MOST_WORDS) | REFERENCE
