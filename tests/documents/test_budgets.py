"""Pages that are read to the end: a page has a budget of words, it changes only for a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MOST_WORDS = {
    "docs/architecture.md": 3_000,
    "docs/benchmarks.md": 2_500,
    "docs/evaluation.md": 2_500,
    "docs/gpu.md": 2_500,
    "docs/methods.md": 2_500,
    "docs/metrics.md": 400,
    "docs/models.md": 1_200,
    "docs/prefill.md": 2_000,
    "docs/start.md": 2_000,
}


@pytest.mark.parametrize("page", MOST_WORDS)
def test_a_page_keeps_its_budget(page: str) -> None:
    """Words as `wc -w` counts them, those of tables and commands among them."""
    words = len((ROOT / page).read_text().split())
    assert words <= MOST_WORDS[page], f"{page} has {words} words of {MOST_WORDS[page]}: shorten it"
