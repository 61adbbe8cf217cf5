"""The registry of methods and what it refuses."""

from dataclasses import replace

import pytest

from index_store.budgets import Ratio
from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.methods import METHODS, IndexSpec, get_method, index_spec


def test_names_and_defaults() -> None:
    assert set(METHODS) == {"full", "oracle", "csattention", "csattention-paper"}
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary.endswith(".")
    parameters = METHODS["csattention"].index
    assert parameters is not None
    assert (parameters.parameters["subspaces"], parameters.parameters["centroids"]) == (16, 32)


def test_keep_ratio_replaces_the_budget() -> None:
    assert get_method("csattention", 0.02).budget == Ratio(0.02)
    assert get_method("csattention") is METHODS["csattention"]
    with pytest.raises(InvalidArgumentError, match="keep ratio"):
        get_method("csattention", 1.5)
    with pytest.raises(MethodUnsupportedError, match="no keep ratio"):
        get_method("full", 0.5)
    with pytest.raises(MethodUnsupportedError, match="no search period"):
        get_method("full", period=2)
    assert get_method("csattention-paper", 0.15, period=4).period == 4
    with pytest.raises(MethodUnsupportedError, match="expected one of"):
        get_method("quickest")


def test_pairs_that_cannot_work_are_refused() -> None:
    with pytest.raises(MethodUnsupportedError, match="both or neither"):
        replace(METHODS["csattention"], budget=None)
    with pytest.raises(MethodUnsupportedError, match="both or neither"):
        replace(METHODS["full"], budget=Ratio(0.1))
    with pytest.raises(InvalidArgumentError, match="period"):
        replace(METHODS["csattention"], period=0)
    with pytest.raises(InvalidArgumentError, match="backoff"):
        replace(METHODS["csattention"], search={**METHODS["csattention"].search, "backoff_centroids": 2})
    with pytest.raises(InvalidArgumentError, match="no list holds"):
        replace(METHODS["csattention-paper"], search={"group": "softmax_sum", "weights": "uniform"})
    with pytest.raises(InvalidArgumentError, match="index kind"):
        IndexSpec("x", "ball_tree")


def test_index_spec_takes_overrides() -> None:
    spec = index_spec(METHODS["csattention"], layout="lists", subspaces=None)
    assert spec is not None
    assert spec.parameters["layout"] == "lists"
    assert spec.parameters["subspaces"] == 16
    assert index_spec(METHODS["full"]) is None
    assert index_spec(METHODS["oracle"]) is None
    with pytest.raises(InvalidArgumentError, match="no parameter"):
        index_spec(METHODS["csattention"], colour="red")
