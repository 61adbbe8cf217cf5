"""Partial results of any number of programs merge to one attention state."""

from __future__ import annotations

import pytest
import torch

from decode_engine.kernels.attention.online_softmax import Partials, merge_partials, merge_partials_reference
from tests.decode_engine.kernels.problems.table_problems import DEVICE


@pytest.mark.parametrize(
    ("rows", "slots", "group", "head_dim"),
    [
        (2, 1, 3, 64),
        (90, 3, 3, 64),
        (3, 66, 3, 64),
        (2, 258, 3, 64),
        (2, 66, 9, 256),
        (16, 3, 16, 256),
        (16, 66, 16, 256),
    ],
)
def test_states_merge(rows: int, slots: int, group: int, head_dim: int) -> None:
    torch.manual_seed(slots)
    partials = Partials.allocate(rows, slots, group, head_dim, DEVICE)
    partials.sums_RSGD.normal_()
    partials.peaks_RSG.normal_().mul_(7)
    partials.totals_RSG.uniform_(0.5, 40.0)
    partials.peaks_RSG[0, : slots // 2] = -torch.inf
    partials.peaks_RSG[1, :, 2] = -torch.inf
    empty = torch.isneginf(partials.peaks_RSG)
    partials.sums_RSGD[empty] = torch.nan
    partials.totals_RSG[empty] = 0.0
    out, lse = merge_partials(partials)
    expected_out, expected_lse = merge_partials_reference(partials)
    torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert torch.isneginf(lse[1, 2])
    assert not out[1, 2].any()
    weights = torch.exp2(partials.peaks_RSG.double())
    totals = (weights * partials.totals_RSG).sum(1)
    sums = (weights[..., None] * partials.sums_RSGD.nan_to_num().double()).sum(1)
    torch.testing.assert_close(out[0].double(), sums[0] / totals[0, :, None], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[0].double(), totals[0].log(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots", [2, 258])
def test_slots_that_are_not_used_hold_anything(slots: int) -> None:
    torch.manual_seed(slots)
    partials = Partials.allocate(6, slots, 1, 64, DEVICE)
    partials.sums_RSGD.normal_()
    partials.peaks_RSG.normal_()
    partials.totals_RSG.uniform_(0.5, 40.0)
    used = [1, 0, slots]
    for b, count in enumerate(used):
        for buffer in (partials.sums_RSGD, partials.peaks_RSG, partials.totals_RSG):
            buffer[2 * b : 2 * b + 2, count:] = torch.nan
    slots_B = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    sink_HG = torch.randn(2, 1, device=DEVICE)
    found = merge_partials(partials, sink_HG=sink_HG, slots_B=slots_B)
    torch.testing.assert_close(found, merge_partials_reference(partials, sink_HG=sink_HG, slots_B=slots_B))
    out, lse = merge_partials(partials, slots_B=slots_B)
    expected_out, expected_lse = merge_partials_reference(partials, slots_B=slots_B)
    torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    single = partials.sums_RSGD[:2, 0] / partials.totals_RSG[:2, 0, :, None]
    torch.testing.assert_close(out[:2], single, rtol=1e-4, atol=1e-5)
    assert not out[2:4].any()
    assert torch.isneginf(lse[2:4]).all()


@pytest.mark.parametrize(("slots", "group", "head_dim"), [(1, 3, 64), (66, 3, 64), (3, 16, 256)])
def test_a_sink_takes_its_share(slots: int, group: int, head_dim: int) -> None:
    torch.manual_seed(slots)
    partials = Partials.allocate(6, slots, group, head_dim, DEVICE)
    partials.sums_RSGD.normal_()
    partials.peaks_RSG.normal_().mul_(7)
    partials.totals_RSG.uniform_(0.5, 40.0)
    partials.peaks_RSG[1, :, 2] = -torch.inf
    sink_HG = torch.randn(2, group, device=DEVICE) * 5
    out, lse = merge_partials(partials, sink_HG=sink_HG)
    expected_out, expected_lse = merge_partials_reference(partials, sink_HG=sink_HG)
    torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert lse[1, 2].item() == pytest.approx(sink_HG[1, 2].item(), rel=1e-5)
    assert not out[1, 2].any()
    plain_out, plain_lse = merge_partials_reference(partials)
    share = torch.sigmoid(plain_lse - sink_HG.repeat(3, 1))
    torch.testing.assert_close(out, plain_out * share[..., None], rtol=1e-4, atol=1e-5)


def test_weight_can_be_taken_away() -> None:
    partials = Partials.allocate(1, 2, 1, 64, DEVICE)
    partials.peaks_RSG.copy_(torch.tensor([[[1.0], [0.0]]]))
    partials.totals_RSG.copy_(torch.tensor([[[2.0], [-1.0]]]))
    partials.sums_RSGD[0, 0], partials.sums_RSGD[0, 1] = 6.0, -3.0
    out, lse = merge_partials(partials, torch.float16)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), torch.full_like(out, 3.0, dtype=torch.float32))
    assert lse.item() == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-5)
