"""Attention that reads the keys of a context once for all rows on it equals the eager one, row by row.

Without a CUDA device it runs in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.online_softmax import Partials, merge_partials_reference
from decode_engine.kernels.attention.shared_attention import (
    RowGroups,
    Seat,
    attend_dense_reference,
    attend_shared,
    shared_shape,
)
from tests.decode_engine.kernels.problems.cluster_problems import padded, relative_error
from tests.support.devices import DEVICE, DTYPES

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Batch:
    """Rows on contexts that some of them share; those on none are idle. Rows behind contexts and tails hold nan."""

    q_BHGD: Tensor
    kv: list[Tensor]
    context_of: Sequence[int | None]
    tails: list[Tensor]
    records_BF: Tensor

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        context_of: Sequence[int | None],
        tails: Sequence[int],
        *,
        heads: int = 1,
        group: int = 4,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
    ) -> Batch:
        generator = torch.Generator().manual_seed(sum(lengths) + len(tails) + group)

        def rows(count: int) -> Tensor:
            return torch.randn(heads, count, 2, head_dim, generator=generator).to(dtype)

        kv = [padded(rows(length), 3).to(DEVICE)[:, :length] for length in lengths]
        own = [padded(rows(tail), 2).to(DEVICE)[:, :tail] for tail in tails]
        records_BF = torch.zeros(len(tails), records.RECORD_FIELDS, dtype=torch.int64)
        for b, context in enumerate(context_of):
            if context is not None:
                for field, rows_HN2D in ((records.KV, kv[context]), (records.TAIL, own[b])):
                    records_BF[b, field] = rows_HN2D.data_ptr()
                    records_BF[b, field + 1] = rows_HN2D.stride(0) * rows_HN2D.element_size()
                records_BF[b, records.KEYS] = lengths[context]
                records_BF[b, records.TAIL_KEYS] = tails[b]
        q_BHGD = 2 * torch.randn(len(tails), heads, group, head_dim, generator=generator)
        return cls(q_BHGD.to(DEVICE, dtype), kv, context_of, own, records_BF.to(DEVICE))

    def seats(self) -> list[Seat]:
        return [
            Seat(b, context, self.kv[context].shape[1], self.tails[b].shape[1])
            for b, context in enumerate(self.context_of)
            if context is not None
        ]

    def attend(self, groups: RowGroups) -> tuple[Tensor, Tensor]:
        """Out [B, H, G, d] and lse [B, H, G], by the kernels, whose buffers hold nan before."""
        size, heads, group, head_dim = self.q_BHGD.shape
        partials = Partials.allocate(size * heads, groups.slots, group, head_dim, self.q_BHGD.device)
        for buffer in (partials.sums_RSGD, partials.peaks_RSG, partials.totals_RSG):
            buffer.fill_(torch.nan)
        attend_shared(
            self.q_BHGD,
            self.records_BF,
            groups,
            partials,
            head_dim**-0.5,
            shared_shape(group, head_dim, False),
        )
        out, lse = merge_partials_reference(partials, slots_B=groups.slots_B)
        return out.view(size, heads, group, head_dim), lse.view(size, heads, group)

    def check(self, out: Tensor, lse: Tensor) -> None:
        limit = TOLERANCE[self.q_BHGD.dtype]
        for b, context in enumerate(self.context_of):
            if context is None:
                assert not out[b].any()
                assert torch.isneginf(lse[b]).all()
                continue
            kv_HN2D = torch.cat([self.kv[context], self.tails[b]], dim=1)
            expected = attend_dense_reference(self.q_BHGD[b], kv_HN2D, self.q_BHGD.shape[3] ** -0.5)
            assert relative_error(out[b], expected.out) < limit
            torch.testing.assert_close(lse[b], expected.lse, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "context_of", "tails", "group", "head_dim", "programs"),
    [
        ([63, 100], [0, None, 1], [1, 0, 130], 1, 64, 3),
        ([500, 1], [0, 0, 1, None, 0, 0, 0], [3, 64, 0, 0, 1, 9, 65], 4, 128, 2),
        ([129], [0] * 11, [5] * 11, 7, 64, 1),
        ([130, 9], [0, 1, 0, 0, 0], [3, 0, 65, 0, 1], 16, 128, 2),
        ([129], [0] * 8, [5] * 8, 9, 128, 1),
        ([70, 5], [0, 0, None, 1, 0], [33, 0, 0, 7, 1], 9, 256, 2),
        ([40], [0, 0, 0], [1, 0, 20], 16, 256, 1),
    ],
)
def test_shared_attention(
    dtype: torch.dtype,
    lengths: list[int],
    context_of: list[int | None],
    tails: list[int],
    group: int,
    head_dim: int,
    programs: int,
) -> None:
    batch = Batch.make(lengths, context_of, tails, group=group, head_dim=head_dim, dtype=dtype)
    many_rows = shared_shape(group, head_dim, False).rows
    groups = RowGroups.allocate(len(tails), programs, group, many_rows, batch.q_BHGD.device)
    groups.arrange(batch.seats())
    batch.check(*batch.attend(groups))


@pytest.mark.parametrize(("group", "head_dim"), [(4, 64), (16, 256)])
def test_steady_attention_is_the_same_bits_beside_others(group: int, head_dim: int) -> None:
    batch = Batch.make([130, 20], [0, 1, 0, 0, 0, 0], [70, 1, 0, 5, 3, 2], group=group, head_dim=head_dim)
    many_rows = shared_shape(group, head_dim, False).rows
    groups = RowGroups.allocate(6, 2, group, many_rows, batch.q_BHGD.device)
    groups.arrange(batch.seats(), steady=True)
    out, lse = batch.attend(groups)
    batch.check(out, lse)
    for number in (0, 5):
        groups.arrange([batch.seats()[number]], steady=True)
        alone, _ = batch.attend(groups)
        assert torch.equal(alone[number], out[number])
        assert not alone[1].any()
