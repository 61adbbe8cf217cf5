"""Cases of a parametrised test that the nightly run alone takes."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*cases: Any) -> list[Any]:
    """Each is a value, or a tuple of values where the test has several parameters."""
    marks = pytest.mark.nightly
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]
