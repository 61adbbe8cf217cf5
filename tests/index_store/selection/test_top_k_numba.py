"""The host's top-k equals a stable sort, at awkward sizes."""

from __future__ import annotations

import threading

import pytest
import torch

from index_store.selection.top_k_numba import top_k, top_k_reference


@pytest.mark.parametrize("columns", [1, 5, 63, 100, 500, 4097, 20000])
@pytest.mark.parametrize("keep", [1, 3, 50, 100_000])
@pytest.mark.parametrize("kind", ["normal", "ties", "sparse", "constant", "signed zeros"])
def test_top_k_equals_stable_sort(columns: int, keep: int, kind: str) -> None:
    scores = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(columns + keep))
    if kind == "ties":
        scores = (scores * 2).round()
    elif kind == "sparse":
        scores[:, :, ::3] = -torch.inf
        scores[0, 0] = -torch.inf
    elif kind == "constant":
        scores = torch.full_like(scores, -2.5)
    elif kind == "signed zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    ids, counts = top_k(scores, keep)
    expected_ids, expected_counts = top_k_reference(scores, keep)
    assert torch.equal(counts, expected_counts)
    valid = torch.arange(ids.shape[-1]) < counts[..., None]
    assert torch.equal(ids[valid], expected_ids[valid])


def test_top_k_of_nothing() -> None:
    ids, counts = top_k(torch.empty(2, 3, 0), 5)
    assert ids.shape == (2, 3, 0)
    assert torch.equal(counts, torch.zeros(2, 3, dtype=torch.int32))


def test_kernels_run_from_many_threads_at_once() -> None:
    scores = torch.randn(2, 2, 3000)
    expected = top_k_reference(scores, 40)[0]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            if not torch.equal(top_k(scores, 40)[0], expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
