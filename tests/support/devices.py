"""Where kernels run in tests, on a GPU or in Triton's interpreter on the CPU; and which cases run at night alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ON_GPU = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU)]


def nightly(*cases: Any) -> list[Any]:
    """Cases of a parametrised test for the nightly run: values, or tuples where the test has several parameters."""
    marks = pytest.mark.nightly
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]


def make_kv(count: int, dtype: torch.dtype, head_dim: int = 64, centres: int = 30) -> Tensor:
    """[2, count, 2, d] keys around a few centres."""
    generator = torch.Generator().manual_seed(count)
    places = torch.randint(0, centres, (2, count), generator=generator)
    middles = torch.randn(2, centres, head_dim, generator=generator)
    keys = middles.gather(1, places[..., None].expand(-1, -1, head_dim))
    keys = keys + 0.3 * torch.randn(2, count, head_dim, generator=generator)
    values = torch.randn(2, count, head_dim, generator=generator)
    return torch.stack([keys, values], dim=2).to(DEVICE, dtype)


def crossed(axes: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrises with every combination of the axes' values, two diagonals of which run by day: each value does.

    A name of several parameters (`"count, first"`) has tuples for values. A value may be a `pytest.param`, whose marks
    are those of its cases.
    """
    values = [list(axis) for axis in axes.values()]
    longest = max(map(len, values))
    daily = {
        tuple((step + turn * place) % len(axis) for place, axis in enumerate(values))
        for step, turn in itertools.product(range(longest), (0, 1))
    }
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in values)):
        chosen = [axis[place] for axis, place in zip(values, places, strict=True)]
        marks = [] if places in daily else [pytest.mark.nightly]
        parts = []
        for names, part in zip(axes, chosen, strict=True):
            if isinstance(part, type(pytest.param())):
                marks += part.marks
                parts.append(part.values)
            else:
                parts.append(part if "," in names else (part,))
        cases.append(pytest.param(*itertools.chain(*parts), marks=marks))
    return pytest.mark.parametrize(", ".join(axes), cases)
