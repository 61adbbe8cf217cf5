"""What becomes of blocks of host memory that a GPU could map in large pages, and of those that it maps."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode_engine.layers.partial_attention import copy_rows, pick_rows, stream_blocks
from index_store.memory import host_memory, mapped_memory
from index_store.memory.arena import Arena
from index_store.memory.host_memory import (
    CudaPageLocker,
    HostBlock,
    copy_source,
    default_page_locker,
    is_readable,
)
from index_store.memory.mapped_memory import device_view, is_mapped, map_memory
from index_store.memory.placement import MemoryBytes, Placement
from index_store.store.catalog import Store
from tests.support.store import KINDS, RecordingLocker, synthetic_context

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
        monkeypatch.setattr(mapped_memory, "_driver", lambda: driver)
        monkeypatch.setattr(mapped_memory, "_primary_context", lambda index: ctypes.c_void_p(1 + index))
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


def on_gpu(test: Callable[[], None]) -> Callable[[], None]:
    needed = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    marked: Callable[[], None] = pytest.mark.gpu(needed(test))
    return marked


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


@on_gpu
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


@on_gpu
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


@on_gpu
def test_memory_lives_as_long_as_tensors_refer_to_it() -> None:
    memory = map_memory(2**22, CUDA)
    part = memory[2**21 :].view(torch.int32)
    view = device_view(part, CUDA)
    part.fill_(7)
    del memory, part
    gc.collect()
    assert bool((view == 7).all())


@on_gpu
def test_memory_goes_back_to_the_system() -> None:
    before = available_bytes()
    for _ in range(8):
        memory = map_memory(2**31, CUDA)
        memory.view(-1, 4096)[:, 0] = 1  # the system hands it out
        assert available_bytes() < before - 2**30
        del memory
    assert available_bytes() > before - 2**33  # half of what was mapped: others use memory, too
