"""What a request gets that leaves method or budget open."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from index_store.errors import SparseKVError
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.store.catalog import Store, TunedDefault
from index_store.store.description.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DefaultMethod:
    """The method of a request that names none, with a budget for those that give none. tuned: whether by tuning."""

    expression: str
    keep: float | None = None
    mass: float | None = None
    tokens: int | None = None
    tuned: bool = False

    def method(self) -> Method:
        """Raises what `get_method` raises."""
        return get_method(self.expression, self.keep, mass=self.mass, tokens=self.tokens)


def supported_methods(manifest: Manifest) -> list[str]:
    """Names of the methods that find what they search in the context."""
    return [method.name for method in METHODS.values() if _refusal(manifest, method) is None]


def default_method(manifest: Manifest, tuned: TunedDefault | None = None) -> DefaultMethod:
    """What the context was tuned to, if it was and that can still be used.

    Otherwise the first usable method of those that it was prefilled for; "full" when there is none.
    """
    if tuned is not None:
        chosen = DefaultMethod(tuned.method, tuned.keep, tuned.mass, tuned.tokens, tuned=True)
        refusal = _unusable(manifest, chosen)
        if refusal is None:
            return chosen
        logger.warning("the tuned default of context %s is not used: %s", manifest.id, refusal)
    prefilled = (DefaultMethod(expression) for expression in manifest.methods)
    return next(
        (choice for choice in prefilled if _unusable(manifest, choice) is None), DefaultMethod("full")
    )


def own_methods(store: Store, manifests: Iterable[Manifest]) -> list[Method]:
    """The methods of these contexts' requests that name none."""
    found = []
    for manifest in manifests:
        try:
            found.append(default_method(manifest, store.default_method(manifest.id)).method())
        except SparseKVError as error:
            logger.info("the default of context %s is not known: %s", manifest.id[:12], error)
    return found


def remainder_name(method: Method) -> str:
    """Name of the method's remainder; empty when every key is attended."""
    return method.remainder.name if method.sparse else ""


def _unusable(manifest: Manifest, chosen: DefaultMethod) -> SparseKVError | None:
    try:
        return _refusal(manifest, chosen.method())
    except SparseKVError as error:
        return error


def _refusal(manifest: Manifest, method: Method) -> SparseKVError | None:
    """Why the context cannot be decoded against by the method; None when it can."""
    try:
        method.on(manifest)
    except SparseKVError as error:
        return error
    return None
