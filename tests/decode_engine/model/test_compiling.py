"""What is compiled beforehand is what decode steps call, and the processes that compile it end when they should."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numba import typeof

from decode_engine.model.packed_weights import PackedMatrix
from decode_engine.model.preparing import compile_beside
from decode_engine.model.row_products_numba import multiply_rows
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from index_store.compiled.loops import loops_of
from index_store.methods.presets import METHODS
from index_store.models.loading import resolve_model
from tests.decode_engine.conftest import Library


def declared_loops() -> dict[str, Any]:
    """Every loop of an imported module that Python calls, by `module:function`."""
    return {
        f"{module}:{name}": loop
        for module, found in list(sys.modules.items())
        if module.startswith(("index_store.", "decode_engine."))
        for name, loop in vars(found).items()
        if getattr(loop, "declared", None) and loop.py_func.__module__ == module
    }


@pytest.mark.parametrize("name", METHODS)
def test_loops_that_a_method_calls_are_those_that_are_compiled_beforehand(
    name: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[str] = set()

    def noting(key: str, loop: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            called.add(key)
            return loop(*arguments)

        return call

    runner, method = ModelRunner(resolve_model(str(library.model))), METHODS[name]
    for key, loop in declared_loops().items():
        for module in list(sys.modules.values()):  # also where another one imported it
            if vars(module).get(loop.__name__) is loop:
                monkeypatch.setattr(module, loop.__name__, noting(key, loop))
    context = made_up_context(runner.identity, runner.kv_dtype, method)
    session = runner.start(context, method.on(context.manifest))
    runner.forward([session], [[0] * (method.recent + method.append_block + 1)])
    runner.forward([session], [[0]], drafts=True)
    assert called <= set(loops_of([name]))  # products of weights are called by kind, see below
    assert set(loops_of([name])) - set(loops_of([])) <= called


def test_a_loop_is_compiled_for_the_types_that_it_declares_alone(library: Library) -> None:
    before = {key: set(loop.overloads) for key, loop in declared_loops().items()}  # by tests of this process
    runner, method = ModelRunner(resolve_model(str(library.model))), METHODS["refined"]
    context = made_up_context(runner.identity, runner.kv_dtype, method)
    session = runner.start(context, method.on(context.manifest))
    runner.forward([session], [[0] * (method.recent + method.append_block + 1)])
    loops = {key: loop for key, loop in declared_loops().items() if loop.overloads}
    assert len(loops) > 10
    for key, loop in loops.items():
        assert set(loop.overloads) - before.get(key, set()) <= {loop.declared}, key


def test_options_of_a_method_change_no_loop() -> None:
    assert loops_of(["refined@sinks=4"]) == loops_of(["refined"])
    assert loops_of(["oracle+centred"]) == loops_of(["oracle"])
    assert loops_of(["refined", "full", "refined"]) == loops_of(["refined"])


@pytest.mark.parametrize(
    ("weights", "checkpoint", "kinds"),
    [
        ("auto", "bfloat16", ["bfloat16", "float32"]),
        pytest.param("auto", "float32", ["float32"], marks=pytest.mark.nightly),
        pytest.param("int8", "float16", ["int8"], marks=pytest.mark.nightly),
    ],
)
def test_loops_compiled_beside_are_found_in_the_cache(
    weights: str, checkpoint: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
    told: list[str] = []
    compile_beside(weights, checkpoint, ["full"], processes=2, told=told.append).result(timeout=300)
    count = 1 + len(kinds)
    expected = [f"compiled {number} of {count} loops" for number in range(1, count + 1)]
    assert [line.partition(" in ")[0] for line in told] == expected
    kept = {path.name.partition("-")[0] for path in tmp_path.glob("loops/*/*.nbi")}
    products = {f"row_products_numba.multiply_{kind}" for kind in kinds}
    assert kept == {"listed_keys_numba._attend", *products}
    compile_beside(weights, checkpoint, ["full"], processes=2, told=told.append).result(timeout=0)
    assert len(told) == count


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8"])
def test_products_take_the_loop_of_their_kind(kind: str) -> None:
    matrix = PackedMatrix(torch.ones(4, 64), getattr(torch, kind))
    multiply_rows(torch.ones(1, 64), *matrix.arrays)
    loop = declared_loops()[f"{multiply_rows.__module__}:multiply_{kind}"]
    assert loop.signatures == [loop.declared]
    numbers = matrix.arrays[0]
    assert loop.declared[1] == typeof(numbers)
