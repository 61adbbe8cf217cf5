"""Kernels without a search equal their eager references: attention to a window, and writing into tails.

Without a CUDA device they run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.online_softmax import Partials, merge_partials
from decode_engine.kernels.attention.shared_attention import (
    attend_dense_reference,
    attend_window,
    write_tails,
    write_tails_reference,
)
from tests.decode_engine.kernels.problems.cluster_problems import make_problem, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "tails", "heads", "group", "head_dim", "splits"),
    [
        ([63, 0, 100], (1, 0, 130), 2, 1, 64, 3),
        ([500], (64,), 1, 4, 128, 1),
        ([1, 129], (0, 3), 1, 5, 64, 2),
        ([100], (0,), 3, 8, 64, 5),
        ([70, 0, 33], (1, 0, 40), 1, 16, 128, 2),
        ([40, 100], (70, 0), 2, 9, 256, 3),
    ],
)
def test_attention_to_a_window_over_everything(
    dtype: torch.dtype,
    lengths: list[int],
    tails: tuple[int, ...],
    heads: int,
    group: int,
    head_dim: int,
    splits: int,
) -> None:
    problem = make_problem(
        lengths, heads=heads, group=group, head_dim=head_dim, tails=tails, dtype=dtype, device=DEVICE
    )
    partials = Partials.allocate(problem.rows, splits, group, head_dim, problem.q_RGD.device)
    for buffer in (partials.sums_RSGD, partials.peaks_RSG, partials.totals_RSG):
        buffer.fill_(torch.nan)
    q_BHGD = problem.q_RGD.view(len(lengths), heads, group, head_dim)
    records_BF = problem.records_BF.clone()
    records_BF[:, records.WINDOW] = 1000
    attend_window(q_BHGD, records_BF, partials, problem.scale)
    out, lse = (found.view(len(lengths), heads, *found.shape[1:]) for found in merge_partials(partials))
    for b, sequence in enumerate(problem.sequences):
        if sequence is None:
            assert not out[b].any()
            assert torch.isneginf(lse[b]).all()
            continue
        kv_HN2D = torch.cat([sequence.kv_HN2D, sequence.tail_HT2D[:, : sequence.tail_keys]], dim=1)
        expected = attend_dense_reference(q_BHGD[b], kv_HN2D, problem.scale)
        assert relative_error(out[b], expected.out) < TOLERANCE[dtype]
        torch.testing.assert_close(lse[b], expected.lse, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 40, 500])
def test_attention_to_a_window(window: int) -> None:
    """Rows that no query sees are not there: what lies before the others must not be read."""
    lengths, tails = [63, 0, 100, 30], (1, 0, 130, 10)
    problem = make_problem(lengths, heads=2, group=4, tails=tails, device=DEVICE)
    records_BF = problem.records_BF.clone()
    records_BF[:, records.WINDOW] = window
    kept = []
    for b, sequence in enumerate(problem.sequences):
        if sequence is not None:
            kv = sequence.kv_HN2D[:, max(0, sequence.kv_HN2D.shape[1] - window) :].clone()
            kept.append(kv)
            row = kv.stride(1) * kv.element_size()
            records_BF[b, records.KV] = kv.data_ptr() - (sequence.kv_HN2D.shape[1] - kv.shape[1]) * row
            records_BF[b, records.KV_HEAD] = kv.stride(0) * kv.element_size()
    q_BHGD = problem.q_RGD.view(len(lengths), 2, 4, 64)
    partials = Partials.allocate(problem.rows, 3, 4, 64, problem.q_RGD.device)
    attend_window(q_BHGD, records_BF, partials, problem.scale)
    out, lse = (found.view(len(lengths), 2, *found.shape[1:]) for found in merge_partials(partials))
    for b, sequence in enumerate(problem.sequences):
        if sequence is None:
            assert not out[b].any()
            continue
        kv_HN2D = torch.cat([sequence.kv_HN2D, sequence.tail_HT2D[:, : sequence.tail_keys]], dim=1)[
            :, -window:
        ]
        expected = attend_dense_reference(q_BHGD[b], kv_HN2D, problem.scale)
        assert relative_error(out[b], expected.out) < TOLERANCE[torch.float32]
        torch.testing.assert_close(lse[b], expected.lse, rtol=2e-5, atol=2e-5)


def test_dense_attention_to_no_keys_is_nothing() -> None:
    nothing = attend_dense_reference(torch.ones(2, 3, 64), torch.ones(2, 0, 2, 64), 1.0)
    assert not nothing.out.any()
    assert torch.isneginf(nothing.lse).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 128), (3, 64), (8, 128), (16, 256)])
def test_tails_get_the_newest_token(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Nothing else of them changes. Keys and values are parts of one wider tensor, as a projection leaves them."""
    problem = make_problem(
        [63, 0, 100, 5], heads=heads, head_dim=head_dim, tails=(1, 0, 33, 0), dtype=dtype, device=DEVICE
    )
    torch.manual_seed(heads)
    qkv = torch.randn(4, 4 * heads, head_dim, dtype=dtype).to(DEVICE)
    k_BHD, v_BHD = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
    tails: list[Tensor] = []
    for sequence in problem.sequences:
        tails.append(torch.empty(heads, 0, 2, head_dim) if sequence is None else sequence.tail_HT2D)
    expected = [tail.clone() for tail in tails]
    write_tails(k_BHD, v_BHD, problem.records_BF)
    counts = [0 if sequence is None else sequence.tail_keys for sequence in problem.sequences]
    write_tails_reference(k_BHD, v_BHD, expected, counts)
    assert torch.equal(tails[0][:, 0, 0], k_BHD[0])
    for tail, wanted in zip(tails, expected, strict=True):
        assert torch.equal(tail.nan_to_num(7.0), wanted.nan_to_num(7.0))
