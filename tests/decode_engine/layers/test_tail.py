"""The tail of one layer."""

from __future__ import annotations

import torch

from decode_engine.layers.dense_layer import Tail


def test_a_tail_tells_kernels_where_its_rows_are() -> None:
    tail = Tail(2, 4, torch.float16)
    keys, values = torch.randn(2, 2, 3, 4)
    tail.write(0, keys, values)
    assert torch.equal(tail.rows, torch.stack((keys, values), dim=2).half())
    assert tail.address == tail.rows.data_ptr()
    assert tail.head_bytes == tail.capacity * 2 * 4 * 2
