"""A kernel that comes to memory of no tensor is told so by the interpreter under watch, also through records."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from decode_engine.kernels import records
from decode_engine.kernels.attention.shared_attention import write_tails
from tests.support.interpreter.addresses import AddressError, HeldMemory, watched_addresses

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="needs the interpreter")


def write(tail_HT2D: torch.Tensor, address: int, count: int) -> None:
    """A token's key and value, of ones, at the end of a tail of so many rows that begins at an address."""
    heads, capacity, _, head_dim = tail_HT2D.shape
    records_BF = torch.zeros(2, records.RECORD_FIELDS, dtype=torch.int64)  # the other row is idle
    records_BF[0, records.TAIL] = address
    records_BF[0, records.TAIL_HEAD] = capacity * 2 * head_dim * tail_HT2D.element_size()
    records_BF[0, records.TAIL_KEYS] = count
    ones_BHD = torch.ones(2, heads, head_dim, dtype=tail_HT2D.dtype)
    write_tails(ones_BHD, ones_BHD, records_BF)


def test_addresses_of_records_have_to_be_of_tensors() -> None:
    tail_HT2D = torch.zeros(2, 2**14, 2, 64)
    with watched_addresses():
        write(tail_HT2D, tail_HT2D.data_ptr(), 2)
        assert tail_HT2D.sum() == 2 * 2 * 64
        with pytest.raises(Exception, match=r"AddressError.*writes 4 bytes at 0x100, .*where no tensor is"):
            write(tail_HT2D, 0x100, 1)
        with pytest.raises(Exception, match=r"AddressError.*writes 4 bytes"):
            write(tail_HT2D, tail_HT2D.data_ptr(), 2**40)
    assert tail_HT2D.sum() == 2 * 2 * 64
    write(tail_HT2D, tail_HT2D.data_ptr(), 3)  # nobody watches any more


def test_memory_is_held_to_its_last_byte_and_no_longer() -> None:
    tensor = torch.zeros(100, dtype=torch.int16)
    held = HeldMemory()
    begin, end = tensor.data_ptr(), tensor.data_ptr() + 200
    held.check("reads", np.array([begin, end - 4], dtype=np.uint64), 4)
    held.check("reads", np.array([], dtype=np.uint64), 4)
    for outside in (0, begin - 2, end - 2):
        with pytest.raises(AddressError, match="and at 0 other addresses of 2"):
            held.check("reads", np.array([begin, outside], dtype=np.uint64), 4)


def test_what_was_let_go_of_is_held_no_longer() -> None:
    """Whether it was there when watching began, or came later."""
    kept = torch.zeros(2, 8, 2, 64)
    before = torch.empty(2, 2**16, 2, 64)  # so large that its memory goes back to the system
    with watched_addresses():
        later = torch.empty(2, 2**16, 2, 64)
        addresses = before.data_ptr(), later.data_ptr()
        for address in addresses:
            write(kept, address, 1)
        del before, later
        for address in addresses:
            with pytest.raises(Exception, match=r"AddressError.*writes 4 bytes"):
                write(kept, address, 1)
