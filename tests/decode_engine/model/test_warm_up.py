"""The warm-up runs what requests will run, and leaves out what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context, placements_of, warm_method
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import Placement
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import resolve_model
from tests.decode_engine.conftest import Library
from tests.support.models import write_model_folder


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_every_method_is_warmed_up(library: Library, dtype: str) -> None:
    runner = ModelRunner(resolve_model(str(library.model)), dtype=dtype)
    assert [name for name, method in METHODS.items() if warm_method(runner, method)] == list(METHODS)


def test_made_up_context_searches_in_every_layer(library: Library) -> None:
    runner = ModelRunner(resolve_model(str(library.model)))
    method = METHODS["csattention"]
    context = made_up_context(runner.identity, runner.kv_dtype, method)
    session = runner.start(context, method.on(context.manifest))
    runner.forward([session], [[0] * (method.recent + method.append_block + 1)])
    runner.forward([session], [[0]])
    assert session.figures.sparse_available == session.figures.available > 0
    assert session.figures.append_ns > 0


def test_methods_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    narrow = write_model_folder(tmp_path / "narrow", head_dim=8)  # fewer dimensions than subspaces
    runner = ModelRunner(resolve_model(str(narrow)))
    with pytest.raises(InvalidArgumentError):
        made_up_context(runner.identity, runner.kv_dtype, METHODS["csattention"])
    warmed = [name for name in ("csattention", "full", "oracle") if warm_method(runner, METHODS[name])]
    assert warmed == ["full", "oracle"]
    short = write_model_folder(tmp_path / "short", max_positions=256)
    assert not warm_method(ModelRunner(resolve_model(str(short))), METHODS["full"])


def test_methods_that_the_host_does_not_search_are_not_warmed_up_twice() -> None:
    every = list(Placement)
    assert placements_of(get_method("csattention"), every) == every
    assert placements_of(get_method("pq"), every) == [Placement.DEVICE, Placement.HYBRID]
    assert placements_of(get_method("full"), [Placement.HOST]) == [Placement.HOST]
