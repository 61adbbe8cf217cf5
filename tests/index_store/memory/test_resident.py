"""A context in memory: its tensors, indexes, and the memory that holds it, a device's, too (the CPU stands for one)."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode_engine.layers.partial_attention import copy_rows, pick_rows, stream_blocks
from decode_engine.layers.session import Session
from index_store.errors import InvalidArgumentError, MemoryBudgetError, MethodUnsupportedError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.memory import context_loading, host_memory
from index_store.memory.arena import Arena
from index_store.memory.context_loading import DeviceBlock, StagedArray, StagingBuffers, device_bytes
from index_store.memory.host_memory import (
    CudaPageLocker,
    HostBlock,
    copy_source,
    default_page_locker,
    device_view,
    is_mapped,
    is_readable,
    map_memory,
)
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import LayerGate, ResidentContext
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import METHODS, get_method
from index_store.store.catalog import Store
from index_store.store.description.dtypes import STORED_DTYPES
from tests.index_store.memory.hybrid_arenas import CPU, DEVICES, check_contents, decode, no_collector, same
from tests.support.devices import crossed
from tests.support.layers import build_index, small_spec
from tests.support.memory import copy_padded, resident_bytes
from tests.support.store import (
    KINDS,
    PARAMETERS,
    RecordingLocker,
    SyntheticContext,
    add_index,
    indexed_context,
    open_files,
    raising,
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
    *("csattention+dropped", "csattention-paper", "multipole+dropped", "multipole-tree+dropped", "tactic"),
    *("quest", "refined+dropped"),
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece", [97, 1000, 2**20])
@pytest.mark.parametrize("tokens", [37, 256, 300])
def test_contents_on_a_device(
    store: Store, device: torch.device, piece: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_loading, "PIECE_BYTES", piece)
    context = synthetic_context(tokens=tokens, index_dtypes=tuple(STORED_DTYPES))
    context.write(store)
    needed = resident_bytes(context.manifest, device)
    arena = Arena(needed, kinds=KINDS, device=device)
    with arena.acquire(store, context.id) as resident:
        assert arena.stats().used.total == needed
        assert arena.stats().page_locked_bytes == 0
        assert resident.device.type == device.type
        check_contents(resident, context, device, device)
        stored = resident.index("tables", 1).stored.values()  # type: ignore[attr-defined]
        assert all((each.data_ptr() - resident.kv(0).data_ptr()) % 256 == 0 for each in stored)


def test_padding_counts() -> None:
    shape = (2, 4, 8, 37)
    assert device_bytes(shape, torch.int8) == 2 * 4 * 8 * 256
    assert device_bytes(shape, torch.uint8) == 2 * 4 * 8 * 37
    assert device_bytes((2, 37), torch.int8) == 2 * 37
    assert device_bytes(shape, torch.float16) == 2 * 2 * 4 * 8 * 37
    manifest = synthetic_context(index_dtypes=("int8",)).manifest
    # Two layers of an array [2, 4, 37].
    assert resident_bytes(manifest, CPU) - resident_bytes(manifest) == 2 * (2 * 4 * 256 - 512)


@pytest.mark.parametrize("piece", [1, 5, 16, 40, 41, 120])
def test_every_piece_finds_its_place(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_loading, "PIECE_BYTES", piece)
    contents = torch.randint(-128, 128, (3, 8, 40), dtype=torch.int8)
    out = copy_padded(torch.zeros(2, 3, 8, 40, dtype=torch.int8), CPU)[1]
    pieces = StagedArray(out, StagingBuffers(CPU))
    raw = contents.flatten().view(torch.uint8).numpy()
    done = 0
    while done < raw.size:
        buffer = pieces.buffer(done, raw.size - done)
        assert 1 <= buffer.size <= piece
        buffer[:] = raw[done : done + buffer.size]
        pieces.filled(done, buffer.size)
        done += buffer.size
    assert torch.equal(out, contents)


def test_a_context_too_large_for_the_budget_is_refused(stored: Store, context: SyntheticContext) -> None:
    unpadded = resident_bytes(context.manifest)
    with (
        pytest.raises(MemoryBudgetError, match="do not fit"),
        Arena(unpadded, kinds=KINDS, device=CPU).acquire(stored, context.id),
    ):
        pass
    with pytest.raises(MemoryBudgetError, match="refused"):
        DeviceBlock(1 << 60, CPU)


@pytest.mark.parametrize("device", [None, CPU])
def test_memory_is_freed(many: tuple[Store, list[SyntheticContext]], device: torch.device | None) -> None:
    store, contexts = many
    arena = Arena(resident_bytes(contexts[0].manifest, device), device=device)
    with no_collector():
        with arena.acquire(store, contexts[0].id) as resident:
            storage = weakref.ref(resident.kv(0).untyped_storage())
            kept = resident.derived("twice", partial(torch.mul, resident.kv(0), 2))
            derived = weakref.ref(kept)
        del resident, kept
        assert storage() is not None
        with arena.acquire(store, contexts[1].id):
            assert storage() is None
            assert derived() is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["csattention+dropped", "csattention-paper", "multipole+dropped"])
def test_padding_changes_no_answer(store: Store, name: str, device: torch.device) -> None:
    method = replace(get_method(name), recent=16, append_block=8)
    assert method.index is not None
    kv = torch.randn(3, 2, 150, 2, 16, generator=torch.Generator().manual_seed(0))
    built = [build_index(method.index, kv[layer], group=2) for layer in (1, 2)]
    parameters = small_spec(method.index).parameters
    context = indexed_context(method.index.name, parameters, built, kv, group=2)
    context.write(store)
    outs = []
    for where in (None, device):
        with Arena(2**24, device=where).acquire(store, context.id) as resident:
            outs.append(decode(Session(resident, method.on(resident.manifest)), 40, where or CPU))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


def resident_context() -> ResidentContext:
    context = synthetic_context()
    return ResidentContext(context.manifest, context.tokens, dict(enumerate(context.kv)), {})


def test_derived_objects_are_made_once() -> None:
    resident = resident_context()
    made: list[int] = []

    def make() -> list[int]:
        made.append(len(made))
        return resident.derived("inner", lambda: made)

    threads = [threading.Thread(target=lambda: resident.derived(("outer", 1), make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [0]
    assert resident.derived(("outer", 1), list) is resident.derived("inner", list)
    assert resident.derived(("outer", 2), list) == []


def test_nothing_is_derived_after_the_release() -> None:
    resident = resident_context()
    resident.derived("kept", list)
    resident.release()
    with pytest.raises(InvalidArgumentError, match="released"):
        resident.derived("kept", list)


def test_what_could_not_be_made_is_tried_again() -> None:
    resident = resident_context()

    with pytest.raises(ValueError, match="once"):
        resident.derived("number", raising(ValueError("once")))
    assert resident.derived("number", lambda: 7) == 7


GPU = torch.device("cuda", 1)


class Driver:
    """What of CUDA's driver is called, with memory of the host. refused: a call that fails from then on."""

    def __init__(self, *, concurrent: bool = True, refused: str = "") -> None:
        self.concurrent, self.refused = concurrent, refused
        self.held: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}
        self.pushed = 0
        self.called_outside: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == self.refused:
                return 700
            if name == "cuCtxPushCurrent_v2":
                self.pushed += 1
            elif not self.pushed:
                self.called_outside.append(name)
            match name:
                case "cuCtxPopCurrent_v2":
                    self.pushed -= 1
                case "cuDeviceGetAttribute":
                    arguments[0]._obj.value = int(self.concurrent)
                case "cuMemAllocManaged":
                    memory = (ctypes.c_ubyte * arguments[1].value)()
                    arguments[0]._obj.value = ctypes.addressof(memory)
                    self.held[ctypes.addressof(memory)] = memory
                case "cuMemFree_v2":
                    del self.held[arguments[0].value]
                case "cuPointerGetAttributes":
                    count, asked, into, address = arguments
                    assert (count.value, list(asked)) == (1, [8])
                    held = [range(first, first + ctypes.sizeof(each)) for first, each in self.held.items()]
                    known = any(address.value in addresses for addresses in held)
                    ctypes.cast(into[0], ctypes.POINTER(ctypes.c_uint))[0] = int(known)
            return 0

        return call


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], Driver]:
    """Puts a driver in the place of CUDA's."""

    def put(driver: Driver) -> Driver:
        monkeypatch.setattr(host_memory, "_driver", lambda: driver)
        monkeypatch.setattr(host_memory, "_primary_context", lambda index: ctypes.c_void_p(1 + index))
        return driver

    return put


def test_memory_is_freed_when_no_tensor_refers_to_it(use: Callable[[Driver], Driver]) -> None:
    driver = use(Driver())
    memory = map_memory(8192, GPU)
    (address,) = driver.held
    assert (memory.data_ptr(), memory.numel(), memory.dtype) == (address, 8192, torch.uint8)
    part = memory[100:].view(torch.int16)[3:]
    del memory
    gc.collect()
    assert len(driver.held) == 1
    part.fill_(7)
    del part
    gc.collect()
    assert not driver.held
    assert (driver.pushed, driver.called_outside) == (0, [])


def test_a_thread_that_has_called_nothing_yet_knows_what_is_mapped(
    use: Callable[[Driver], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA says nothing of a pointer to threads without a context."""
    driver = use(Driver())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    memory = map_memory(8192, GPU)
    assert is_mapped(memory[100:].view(torch.int16))
    assert not is_mapped(torch.zeros(3))
    assert not is_mapped(memory[:0])
    assert (driver.pushed, driver.called_outside) == (0, [])


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (Driver(concurrent=False), "at the same time"),
        (Driver(refused="cuMemAllocManaged"), "cuMemAllocManaged returned CUDA error 700"),
        (Driver(refused="cuMemAdvise"), "cuMemAdvise returned CUDA error 700"),
    ],
)
def test_nothing_is_held_where_mapping_fails(
    use: Callable[[Driver], Driver], driver: Driver, message: str
) -> None:
    use(driver)
    with pytest.raises(RuntimeError, match=message):
        map_memory(8192, GPU)
    assert (driver.held, driver.pushed, driver.called_outside) == ({}, 0, [])


def test_memory_that_cannot_be_freed_is_told(
    use: Callable[[Driver], Driver], caplog: pytest.LogCaptureFixture
) -> None:
    driver = use(Driver())
    memory = map_memory(8192, GPU)
    driver.refused = "cuMemFree_v2"
    with caplog.at_level(logging.WARNING):
        del memory
        gc.collect()
    assert "could not be freed: cuMemFree_v2 returned CUDA error 700" in caplog.text
    assert driver.pushed == 0


def test_memory_of_the_host_is_copied_from_as_it_is() -> None:
    plain = torch.zeros(3)
    assert not is_mapped(plain)
    assert not is_readable(plain)
    assert copy_source(plain, torch.device("cpu")) is plain


def test_refused_memory_is_page_locked_instead_and_the_log_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int, device: torch.device) -> Tensor:
        raise RuntimeError(f"no {nbytes} bytes on {device}")

    monkeypatch.setattr(host_memory, "map_memory", refuse)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    locker = CudaPageLocker(torch.device("cuda", 1))
    with caplog.at_level(logging.WARNING):
        blocks = [HostBlock(5000, locker, gathered=True) for _ in range(2)]
    assert caplog.text.count("no 8192 bytes on cuda:1") == 1
    for block in blocks:
        assert not block.locked
        assert block.take((5000,), torch.uint8).numel() == 5000


def test_other_blocks_are_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(host_memory, "map_memory", lambda nbytes, device: asked.append(nbytes))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    HostBlock(5000, CudaPageLocker(), huge_pages=True)
    assert asked == []


def test_keys_and_values_of_contexts_are_mapped(store: Store) -> None:
    context = synthetic_context()
    context.write(store)
    locker = RecordingLocker(error="nothing is left to be locked", maps=True)
    arena = Arena(MemoryBytes(2**30, 2**30), locker, KINDS, torch.device("cpu"), Placement.HYBRID)
    with arena.acquire(store, context.id) as resident:
        layers = [resident.kv(layer) for layer in range(3)]
        assert all(torch.equal(kv, given) for kv, given in zip(layers, context.kv, strict=True))
        assert {kv.untyped_storage().data_ptr() for kv in layers} == set(locker.mapped)
        assert arena.stats().page_locked_bytes >= 3 * context.kv[0].nbytes
    arena.clear()
    assert arena.stats().page_locked_bytes == 0


CUDA = torch.device("cuda")
SHAPE = (3, 1000, 2, 64)


def mapped_kv() -> tuple[Tensor, Tensor]:
    """Keys and values [H, N, 2, d] in mapped memory, behind an odd offset, and the same elsewhere."""
    block = HostBlock(2**22, default_page_locker(), gathered=True)
    assert block.locked
    assert block.locked_bytes == 2**22
    block.take((5,), torch.int64)
    kv = block.take(SHAPE, torch.bfloat16)
    expected = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    kv.copy_(expected)
    return kv, expected


def available_bytes() -> int:
    line = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")
    )
    return int(line.split()[1]) * 1024


@pytest.mark.gpu
def test_a_device_reads_what_cores_have_written() -> None:
    kv, expected = mapped_kv()
    assert is_mapped(kv)
    assert is_readable(kv)
    assert not is_mapped(expected.pin_memory())
    assert not is_mapped(expected.cuda())
    view = device_view(kv[1:, 3:900:7], CUDA)
    assert view.device.type == "cuda"
    assert torch.equal(view.cpu(), expected[1:, 3:900:7])
    kv[2, 10] = 1.0  # cores write while the view lives
    assert torch.equal(view[1, 1].cpu(), torch.ones(2, 64).bfloat16())


@pytest.mark.gpu
def test_copies_and_picked_rows_are_those_of_other_memory() -> None:
    kv, expected = mapped_kv()
    assert torch.equal(copy_source(kv, CUDA).clone().cpu(), expected)
    assert torch.equal(copy_rows(kv, 17, 600, CUDA).cpu(), expected[:, 17:600])
    ids = torch.randint(0, SHAPE[1], (3, 2, 50), generator=torch.Generator().manual_seed(1))
    picked = pick_rows(kv, ids.cuda())
    assert picked.device.type == "cuda"
    assert torch.equal(picked.cpu(), pick_rows(expected, ids))
    blocks = [block.cpu() for block in stream_blocks(kv, CUDA)]
    assert torch.equal(torch.cat(blocks, dim=1), expected)


@pytest.mark.gpu
def test_memory_lives_as_long_as_tensors_refer_to_it() -> None:
    memory = map_memory(2**22, CUDA)
    part = memory[2**21 :].view(torch.int32)
    view = device_view(part, CUDA)
    part.fill_(7)
    del memory, part
    gc.collect()
    assert bool((view == 7).all())


@pytest.mark.gpu
def test_memory_goes_back_to_the_system() -> None:
    before = available_bytes()
    for _ in range(8):
        memory = map_memory(2**31, CUDA)
        memory.view(-1, 4096)[:, 0] = 1  # the system hands it out
        assert available_bytes() < before - 2**30
        del memory
    assert available_bytes() > before - 2**33  # half of what was mapped: others use memory, too
