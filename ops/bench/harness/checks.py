"""What has to be right before a time is reported."""

from __future__ import annotations

import traceback

from torch import Tensor

TOLERANCE = 0.1
"""Root mean square of the difference of logits, relative to their standard deviation: rounding to bfloat16 in 32 random
layers makes about 0.05."""


class CheckFailedError(Exception):
    """A result is wrong, so its time means nothing."""


def failure(error: Exception) -> dict[str, str]:
    """What a line says of a case that has failed; where that was no check, the traceback goes to stderr."""
    if isinstance(error, CheckFailedError):
        return {"error": str(error)[:300]}
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"[:300]}


def check_close(what: str, found: Tensor, expected: Tensor, limit: float) -> float:
    """The relative error, a ratio of norms. Raises CheckFailedError when it is larger than the limit."""
    expected = expected.double()
    error = float((found.double().view(expected.shape) - expected).norm() / expected.norm())
    if not error <= limit:
        raise CheckFailedError(f"{what}: relative error {error:.2e}, expected at most {limit:.0e}")
    return error


def compare(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE, of: str = "") -> float:
    """Difference of logits relative to their spread. Raises CheckFailedError when it is too large."""
    difference = float((found - expected).square().mean().sqrt() / expected.std())
    if not difference < tolerance:
        raise CheckFailedError(f"logits{of} differ by {difference:.3f} of their spread, limit {tolerance}")
    return difference
