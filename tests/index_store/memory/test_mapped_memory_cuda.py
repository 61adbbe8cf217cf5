"""Host memory that a GPU maps in large pages: written by cores, read by kernels and copies."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode_engine.layers.host_rows import copy_rows, pick_rows, stream_blocks
from index_store.memory.host_memory import HostBlock, copy_source, default_page_locker, is_readable
from index_store.memory.mapped_memory import device_view, is_mapped, map_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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


def test_memory_lives_as_long_as_tensors_refer_to_it() -> None:
    memory = map_memory(2**22, CUDA)
    part = memory[2**21 :].view(torch.int32)
    view = device_view(part, CUDA)
    part.fill_(7)
    del memory, part
    gc.collect()
    assert bool((view == 7).all())


def test_memory_goes_back_to_the_system() -> None:
    before = available_bytes()
    for _ in range(8):
        memory = map_memory(2**31, CUDA)
        memory.view(-1, 4096)[:, 0] = 1  # the system hands it out
        assert available_bytes() < before - 2**30
        del memory
    assert available_bytes() > before - 2**30
