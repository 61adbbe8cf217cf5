"""A context in memory: its tensors, its indexes, and the memory that holds it."""

from __future__ import annotations

import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from decode_engine.layers.session import Session
from index_store.errors import InvalidArgumentError, MemoryBudgetError, MethodUnsupportedError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.memory.arena import Arena
from index_store.memory.host_memory import HostBlock
from index_store.memory.resident import LayerGate
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import METHODS, get_method
from index_store.store.catalog import Store
from index_store.store.description.dtypes import STORED_DTYPES
from tests.index_store.memory.hybrid_arenas import CPU, check_contents, decode, no_collector, same
from tests.support.devices import crossed
from tests.support.layers import build_index, small_spec
from tests.support.memory import resident_bytes
from tests.support.store import (
    KINDS,
    PARAMETERS,
    RecordingLocker,
    SyntheticContext,
    add_index,
    indexed_context,
    open_files,
    synthetic_context,
)

SIZE = resident_bytes(synthetic_context().manifest)


def touch(arena: Arena, store: Store, context: SyntheticContext) -> None:
    with arena.acquire(store, context.id):
        pass


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_contents(store: Store, dtype: str) -> None:
    context = synthetic_context(dtype=dtype, index_dtypes=tuple(STORED_DTYPES))
    context.write(store)
    arena = Arena(1 << 20, kinds=KINDS)
    with arena.acquire(store, context.id) as resident:
        check_contents(resident, context, CPU, CPU, padded=False)
        assert same(resident.keys(2), context.kv[2, :, :, 0])
        assert same(resident.values(2), context.kv[2, :, :, 1])
        assert resident.index("tables", 1).parameters == PARAMETERS  # type: ignore[attr-defined]
        arrays = sum(
            entry.nbytes for entry in context.manifest.arrays if entry.path not in ("tokens", "queries")
        )
        assert resident.nbytes == arrays + 37 * 8
        assert resident.nbytes <= arena.stats().used.total == resident_bytes(context.manifest)


def test_the_machine_refuses_memory() -> None:
    with pytest.raises(MemoryBudgetError, match="refused"):
        HostBlock(1 << 60)


def searched_context(method: Method) -> SyntheticContext:
    """A context of 150 tokens, 2 KV heads and groups of 2, with what the method searches."""
    kv = torch.randn(3, 2, 150, 2, 16, generator=torch.Generator().manual_seed(0))
    built = [build_index(method.index, kv[layer], group=2) for layer in (1, 2)]
    return indexed_context(method.index.name, small_spec(method.index).parameters, built, kv, group=2)


_LISTED = (
    "csattention+dropped",
    "csattention-paper",
    "multipole+dropped",
    "multipole-tree+dropped",
    "tactic",
    "quest",
    "refined+dropped",
)
_LISTED_KINDS = {method.index.kind for method in map(get_method, _LISTED) if method.index is not None}
FREED = (
    *_LISTED,
    *(
        name
        for name, method in METHODS.items()
        if method.index is not None and method.index.stored and method.index.kind not in _LISTED_KINDS
    ),
)
"""Methods over every kind of index that is stored, new ones by themselves."""


def test_a_method_of_every_stored_kind_is_freed() -> None:
    stored = {spec.kind for spec in INDEX_SPECS.values() if spec.stored}
    assert {get_method(name).index.kind for name in FREED} == stored  # type: ignore[union-attr]


@crossed(
    {
        "used": [False, True],
        "name": FREED,
    }
)
def test_memory_that_indexes_and_a_session_used_is_freed(store: Store, name: str, used: bool) -> None:
    method = get_method(name)
    assert method.index is not None
    context = searched_context(method)
    context.write(store)
    arena = Arena(1 << 24)
    with arena.acquire(store, context.id) as resident:
        # The first calls compile the kernels, and the compiler leaves cycles behind that hold their arguments.
        decode(Session(resident, method.on(resident.manifest)), 140)
    assert arena.drop(context.id)
    with no_collector():
        with arena.acquire(store, context.id) as resident:
            storage = weakref.ref(resident.kv(0).untyped_storage())
            assert type(resident.index(method.index.name, 1)) is INDEX_CLASSES[method.index.kind]
            session = Session(resident, method.on(resident.manifest))
            if used:
                decode(session, 140)
                assert session.figures.searches > 0
                assert session.figures.append_ns > 0
            session.close()
        assert storage() is not None
        assert arena.drop(context.id)
        assert storage() is None


def test_tensors_are_refused_after_release(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    arena = Arena(SIZE)
    with arena.acquire(store, contexts[0].id) as resident:
        resident.kv(0)
    arena.drop(contexts[0].id)
    with pytest.raises(InvalidArgumentError, match="released"):
        resident.kv(0)
    with pytest.raises(InvalidArgumentError, match="released"):
        resident.tokens()


def test_index_is_made_once(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    arena = Arena(SIZE, kinds=KINDS)
    with arena.acquire(store, contexts[0].id) as resident, ThreadPoolExecutor(8) as pool:
        found = {id(index) for index in pool.map(lambda _: resident.index("tables", 1), range(32))}
        assert len(found) == 1
        assert resident.index("tables", 2) is not resident.index("tables", 1)


def test_index_that_is_not_there(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    with Arena(SIZE, kinds=KINDS).acquire(store, contexts[0].id) as resident:
        with pytest.raises(MethodUnsupportedError, match=r"no index 'clusters' \(it has: tables\)"):
            resident.index("clusters", 1)
        with pytest.raises(
            MethodUnsupportedError, match=r"covers layers \[1, 2\], not layer 0; dense layers \[0\]"
        ):
            resident.index("tables", 0)
    with (
        Arena(SIZE).acquire(store, contexts[0].id) as resident,
        pytest.raises(MethodUnsupportedError, match=r"of kind 'recorded', this program reads .*query"),
    ):
        resident.index("tables", 1)
    with (
        Arena(SIZE).acquire(store, contexts[0].id) as resident,
        pytest.raises(InvalidArgumentError, match="layer 3"),
    ):
        resident.kv(3)


@no_collector()
def test_memory_is_unlocked_when_an_arena_is_forgotten(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    locker = RecordingLocker()
    arena = Arena(SIZE, locker)
    touch(arena, store, contexts[0])
    assert len(locker.locked) == 1
    del arena
    assert locker.locked == []


def test_failing_page_lock_falls_back_and_says_why(
    many: tuple[Store, list[SyntheticContext]], caplog: pytest.LogCaptureFixture
) -> None:
    store, contexts = many
    arena = Arena(SIZE, RecordingLocker(error="no more locked memory"))
    with caplog.at_level(logging.WARNING), arena.acquire(store, contexts[0].id) as resident:
        assert same(resident.kv(0), contexts[0].kv[0])
    assert "stay pageable" in caplog.text
    assert "no more locked memory" in caplog.text
    assert arena.stats().page_locked_bytes == 0
    assert arena.drop(contexts[0].id)


def test_no_files_stay_open(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many

    arena = Arena(len(contexts) * SIZE)
    touch(arena, store, contexts[0])
    before = open_files(store.path)
    for context in contexts:
        touch(arena, store, context)
    assert open_files(store.path) == before


def test_layers_are_waited_for_while_others_are_loaded() -> None:
    gate = LayerGate(2)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(gate.wait, layer) for layer in (0, 1, 1)]
        gate.open_next()
        waiting[0].result(60.0)
        assert not gate.complete
        gate.fail(ValueError("first"))
        gate.fail(ValueError("second"))
        errors = [future.exception(60.0) for future in waiting[1:]]
    assert [str(error) for error in errors] == ["first", "first"]
    assert errors[0] is not errors[1]
    gate.wait(0)
    with pytest.raises(ValueError, match="first"):
        gate.wait_for_all()


def test_the_next_lease_has_the_index(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(1 << 22, kinds=KINDS)
    size = resident_bytes(context.manifest)
    with arena.acquire(stored, context.id) as before:
        added, arrays = add_index(stored, context.manifest)
        larger = resident_bytes(added)
        with arena.acquire(stored, context.id) as after, arena.acquire(stored, context.id) as again:
            assert after is again
            assert before.manifest == context.manifest
            assert after.manifest == added
            index = after.index("more", 2)
            assert torch.equal(index.stored["a"], arrays["index/more/a"][2])  # type: ignore[attr-defined]
            assert torch.equal(before.kv(1), after.kv(1))
            assert arena.stats().used.total == size + larger
            assert arena.ids() == [context.id]
        assert arena.stats().leases == 1
    stats = arena.stats()
    assert (stats.contexts, stats.loads, stats.used.total) == (1, 2, larger)


def test_what_is_not_in_use_goes_first(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(1 << 22, kinds=KINDS)
    with arena.acquire(stored, context.id):
        pass
    added, _ = add_index(stored, context.manifest)
    with arena.acquire(stored, context.id) as resident:
        assert resident.manifest == added
    assert arena.stats().used.total == resident_bytes(added)


def test_another_name_loads_nothing(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(1 << 22, kinds=KINDS)
    with arena.acquire(stored, context.id) as before:
        with stored.writer(context.id) as writer:
            writer.publish_into(context.manifest, replace(context.manifest, name="renamed"))
        with arena.acquire(stored, context.id) as after:
            assert after is before
    assert arena.stats().loads == 1


def test_where_both_do_not_fit_the_new_one_waits_for_the_old_one(
    stored: Store, context: SyntheticContext
) -> None:
    size = resident_bytes(context.manifest)
    arena = Arena(2 * size, kinds=KINDS)
    came, looks = threading.Event(), threading.Semaphore(0)

    def acquire() -> None:
        with arena.acquire(stored, context.id, wait_for_memory=True, check=looks.release) as resident:
            if resident.manifest != context.manifest:
                came.set()

    with arena.acquire(stored, context.id):
        added, _ = add_index(stored, context.manifest)
        assert size < resident_bytes(added) <= 2 * size
        with pytest.raises(MemoryBudgetError, match="try again later"), arena.acquire(stored, context.id):
            pass
        waiting = threading.Thread(target=acquire)
        waiting.start()
        for _ in range(3):  # it has looked, and waits on
            assert looks.acquire(timeout=60)
        assert not came.is_set()
    assert came.wait(60)
    waiting.join()
    assert arena.stats().used.total == resident_bytes(added)


def test_dropping_frees_every_place_of_a_context(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(1 << 22, kinds=KINDS)
    with arena.acquire(stored, context.id):
        add_index(stored, context.manifest)
        with arena.acquire(stored, context.id):
            assert not arena.drop(context.id)
    assert arena.stats().used.total == 0
    with arena.acquire(stored, context.id):
        pass
    assert arena.drop(context.id)
    assert arena.stats().used.total == 0
