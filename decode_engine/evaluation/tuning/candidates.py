"""Which methods and budgets tuning tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from index_store.errors import MethodUnsupportedError, SparseKVError
from index_store.methods.default import DEFAULT_METHOD
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.selection.budgets import Mass
from index_store.store.description.manifest import Manifest

KEEPS = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2)
"""Fractions of the keys that are tried."""

MASSES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995)
"""Attention masses that are tried, for methods whose budget follows mass."""

_NEVER = frozenset({"full", "oracle"})  # a reference, and a search that reads every key


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method at one budget: keep or mass, whichever the method takes."""

    expression: str
    keep: float | None = None
    mass: float | None = None

    def method(self) -> Method:
        return get_method(self.expression, self.keep, mass=self.mass)

    @property
    def budget(self) -> str:
        """The budget as a text."""
        return f"{self.keep:.2%}" if self.keep is not None else f"mass {self.mass:.4g}"


@dataclass(frozen=True, slots=True)
class BudgetSweep:
    """One method at all budgets, the smallest first. index_bytes: of what it needs stored."""

    expression: str
    candidates: tuple[Candidate, ...]
    index_bytes: int


def find_sweeps(manifest: Manifest, expressions: Sequence[str]) -> list[BudgetSweep]:
    """The methods to try: those named, or all that the context supports.

    Raises MethodUnsupportedError for a named method that is unknown, has no budget or cannot be used with the context,
    and when the context supports none.
    """
    if expressions:
        return [_sweep(manifest, expression) for expression in expressions]
    found = []
    for name in METHODS:
        if name in _NEVER:
            continue
        try:
            found.append(_sweep(manifest, name))
        except SparseKVError:
            continue
    if not found:
        raise MethodUnsupportedError(
            f"context {manifest.id} has no index that a method could be tuned for; prefill the document again with "
            f"--method {DEFAULT_METHOD} or another one",
            context=manifest.id,
        )
    return found


def _sweep(manifest: Manifest, expression: str) -> BudgetSweep:
    method = get_method(expression)
    if not method.sparse:
        raise MethodUnsupportedError(
            f"method {expression!r} attends to every key, there is no budget to tune", method=expression
        )
    needed = {spec.name for spec in method.on(manifest).method.index_specs()}
    nbytes = sum(index.nbytes for index in manifest.indexes if index.name in needed)
    if isinstance(method.budget, Mass):
        candidates = tuple(Candidate(expression, mass=mass) for mass in MASSES)
    else:
        candidates = tuple(Candidate(expression, keep=keep) for keep in KEEPS)
    return BudgetSweep(expression, candidates, nbytes)
