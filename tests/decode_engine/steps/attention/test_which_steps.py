"""Which captured steps run a method, by shape, placement and kind of rows; or why none do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from decode_engine.model.unstored import unstored_manifest
from decode_engine.steps.attention.listed_steps import DenseSteps
from decode_engine.steps.batch_kinds import step_attention_for
from index_store.memory.placement import Placement
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import get_method
from index_store.selection.budgets import REMAINDERS, Mass, Threshold
from index_store.store.description.dtypes import AS_DTYPE, INT8
from tests.decode_engine.steps.attention.layer_steps import model_of
from tests.support.store import in_planes

DEVICE, HYBRID, HOST = Placement.DEVICE, Placement.HYBRID, Placement.HOST
TABLES, CLUSTERS = (
    f"the kernels over {what} take groups of 1 to 8" for what in ("query tables", "key clusters")
)
NO_MASS = "a ratio or a number of keys"


def cases() -> Iterator[Any]:
    """Method, query heads of a KV head and channels, placement, rows, and what is expected."""
    usual = (3, 64)
    for expression, expected in (
        ("full", "DenseSteps"),
        ("multipole", "ListedSteps"),
        ("multipole+dropped", "ListedSteps"),
        ("csattention", "ListedSteps"),
        ("csattention+dropped", "ListedSteps"),
        ("csattention+monopole", "ListedSteps"),
        ("refined", "ListedSteps"),
        ("refined+dropped", "ListedSteps"),
        ("multipole-windowed", "windowed RoPE"),
        ("squeezed", "budget"),
        ("csattention-paper", "lists"),
        ("multipole-tree", "no kernels"),
        ("tactic", "budget"),
        ("quest", "no kernels"),
        ("oracle", "no kernels"),
        ("multipole+centred", "other clusters"),
        ("csattention+coarse", "over rows that its search does not score"),
        ("refined-3", "take 4 of that dimension"),
    ):
        yield get_method(expression), usual, DEVICE, AS_DTYPE, expected
        hybrid = expected.replace("ListedSteps", "HybridSteps")
        yield get_method(expression), usual, HYBRID, AS_DTYPE, hybrid
    for name in ("csattention+dropped", "refined+dropped", "refined"):
        yield replace(get_method(name), budget=Mass(0.9)), usual, DEVICE, AS_DTYPE, NO_MASS
    multipole = get_method("multipole")
    yield replace(multipole, budget=Threshold(keep=0.05)), usual, DEVICE, AS_DTYPE, "budget"
    other = replace(multipole, index=INDEX_SPECS["remainder_clusters"], remainder=REMAINDERS["centred"])
    yield other, usual, DEVICE, AS_DTYPE, "ListedSteps"
    yield get_method("refined-3"), (16, 128), HOST, AS_DTYPE, "HybridSteps"
    yield get_method("refined"), (9, 256), DEVICE, AS_DTYPE, "take groups of 1 to 8 of that dimension"
    for expression, placement, expected in (
        ("full", DEVICE, "DenseSteps"),
        ("refined", DEVICE, "ListedSteps"),
        ("refined", HYBRID, "HybridSteps"),
        ("refined", HOST, "HybridSteps"),
        ("csattention", DEVICE, CLUSTERS),
        ("csattention+dropped", DEVICE, TABLES),
        ("csattention+dropped@group=pooled", DEVICE, TABLES),
        ("csattention+dropped", HYBRID, TABLES),
        ("csattention+dropped", HOST, "threads on the host search for groups of 1 to 8"),
        ("multipole", DEVICE, CLUSTERS),
        ("multipole+dropped", HYBRID, CLUSTERS),
    ):
        for large in ((16, 128), (9, 64), (4, 256)):
            yield get_method(expression), large, placement, AS_DTYPE, expected
    for clustered, (group, expected) in product(
        ("refined+monopole", "refined+centred"), ((8, "ListedSteps"), (9, CLUSTERS))
    ):  # whatever the search beside it takes
        method = replace(get_method(clustered), partition=INDEX_SPECS["remainder_clusters"])
        yield method, (group, 64), DEVICE, AS_DTYPE, expected
    for group, head_dim in ((17, 128), (4, 96), (4, 512)):
        no_kernels = (
            f"group {group}, head dimension {head_dim}; kernels that attend take groups of 1 to 16 and dimen"
        )
        yield get_method("refined"), (group, head_dim), DEVICE, AS_DTYPE, no_kernels
    for expression, expected in (
        ("refined", "ListedSteps"),
        ("csattention+dropped@group=pooled", "ListedSteps"),
        ("full", "DenseSteps"),
        ("refined-3", "a record has room for one coarse copy"),
    ):
        yield get_method(expression), (1, 64), DEVICE, INT8, expected


def told(value: object) -> str:
    return value.name if isinstance(value, Method) else str(value)


@pytest.mark.parametrize(("method", "shape", "placement", "rows", "expected"), [*cases()], ids=told)
def test_methods_run_where_their_kernels_are(
    method: Method, shape: tuple[int, int], placement: Placement, rows: str, expected: str
) -> None:
    manifest = unstored_manifest(model_of(*shape), "float32", 4000)
    manifest = in_planes(manifest) if rows == INT8 else manifest
    found = step_attention_for(method, manifest, placement)
    assert expected in (found if isinstance(found, str) else found.__name__)
    if "kernels that attend" in expected:
        assert expected in str(DenseSteps.refusal(get_method("full"), manifest))
