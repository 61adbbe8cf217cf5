"""Methods are prepared before requests run by them, and compiled beside the loading of a model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from numba import typeof

from decode_engine.model.packed_weights import PackedMatrix
from decode_engine.model.preparing import Preparation, compile_beside, methods_wanted
from decode_engine.model.row_products_numba import multiply_rows
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context, placements_of, warm_method
from index_store.compiled.beside import loops_of
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import Placement
from index_store.methods.method import FittedMethod
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import resolve_model
from tests.decode_engine.conftest import Library
from tests.support.devices import nightly
from tests.support.models import write_model_folder


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
    named = set(loops_of([name]))  # products of weights are called by kind, see below
    of_all = set(loops_of([]))
    assert (called - named, named - of_all - called) == (set(), set()), (
        f"{name} calls loops that _OF_METHODS of index_store/compiled/beside.py does not name, or it names others"
    )


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


@pytest.mark.parametrize(
    ("weights", "checkpoint", "kinds"),
    [
        ("auto", "float32", ["float32"]),
        *nightly(("auto", "bfloat16", ["bfloat16", "float32"]), ("int8", "float16", ["int8"])),
    ],
)
def test_loops_compiled_beside_are_found_in_the_cache(
    weights: str, checkpoint: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
    told: list[str] = []
    compile_beside(weights, checkpoint, ["full"], processes=2, told=told.append).result(timeout=300)
    count = 2 + len(kinds)
    expected = [f"compiled {number} of {count} loops" for number in range(1, count + 1)]
    assert [line.partition(" in ")[0] for line in told] == expected
    kept = {path.name.partition("-")[0] for path in tmp_path.glob("loops/*/*.nbi")}
    products = {f"row_products_numba.multiply_{kind}" for kind in kinds}
    assert kept == {"listed_keys_numba._attend", f"row_layers_numba.go_on_{kinds[0]}", *products}
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


HERE = Placement.DEVICE


class Compiler:
    """Begins to compile when asked, and is done when told."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.begun = threading.Semaphore(0)
        self.done: Future[None] = Future()

    def __call__(self, methods: Sequence[str]) -> Future[None]:
        self.asked.append(list(methods))
        self.begun.release()
        return self.done


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"), "llama", layers=2, max_positions=2048)
    runner = ModelRunner(resolve_model(str(folder)))
    yield runner
    runner.close()


def fitted(runner: ModelRunner, name: str, keep: float | None = None) -> FittedMethod:
    method = get_method(name, keep)
    return method.on(made_up_context(runner.identity, runner.kv_dtype, method, 600).manifest)


def test_a_kind_is_prepared_once_and_whoever_waits_may_leave(runner: ModelRunner) -> None:
    compiler = Compiler()
    preparation = Preparation(runner, 4, compiler)
    first = preparation.begin(fitted(runner, "oracle", 0.1), HERE)
    assert compiler.begun.acquire(timeout=60)
    assert preparation.begin(fitted(runner, "oracle", 0.5), HERE) is first
    other = preparation.begin(fitted(runner, "full"), HERE)
    assert not first.done()

    def leave() -> None:
        raise InvalidArgumentError("nobody waits")

    with pytest.raises(InvalidArgumentError, match="nobody waits"):
        preparation.wait(fitted(runner, "oracle", 0.1), HERE, leave)
    compiler.done.set_result(None)
    preparation.wait(fitted(runner, "oracle", 0.1), HERE, lambda: None)
    assert other.result(60) is None
    assert compiler.asked == [["oracle"], ["full"]]
    preparation.close()


def test_what_cannot_be_prepared_is_left_to_the_request(
    runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = Compiler()
    compiler.done.set_exception(RuntimeError("no compiler"))
    preparation = Preparation(runner, 4, compiler)
    assert preparation.begin(fitted(runner, "full"), HERE).result(60) is None
    assert "method full was not prepared: no compiler" in caplog.text
    preparation.close()


def test_closing_lets_everybody_go_and_ends_the_compiling(runner: ModelRunner) -> None:
    compiler = Compiler()
    preparation = Preparation(runner, 4, compiler)
    kinds = [preparation.begin(fitted(runner, name), HERE) for name in ("oracle", "full")]
    assert compiler.begun.acquire(timeout=60)
    preparation.close()
    assert [kind.result(60) for kind in kinds] == [None, None]
    assert compiler.done.cancelled()


def test_all_that_contexts_name_is_prepared_before_requests(runner: ModelRunner) -> None:
    compiler = Compiler()
    compiler.done.set_result(None)
    preparation = Preparation(runner, 4, compiler)
    manifest = fitted(runner, "oracle").manifest
    wanted = [(each, HERE) for each in methods_wanted(manifest, METHODS["oracle"], METHODS["csattention"])]
    said: list[str] = []
    assert preparation.prepare_all(wanted, lambda what, how_far: said.append(what)) == ["full", "oracle"]
    assert [what for what in said if what.startswith("prepare")] == [
        "prepare full (device)",
        "prepare oracle (device)",
    ]
    preparation.close()


@pytest.mark.parametrize("dtype", ["auto", *nightly("bfloat16")])
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
    assert placements_of(get_method("refined"), every) == [Placement.DEVICE, Placement.HYBRID]
    assert placements_of(get_method("full"), [Placement.HOST]) == [Placement.HOST]
