"""Made-up attention problems for tests of budgets: keys, values, queries, and rankings of clusters or single keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.selection.ranking import Items, Members, Ranking, Selection, Step


@dataclass(frozen=True)
class Problem:
    """keys, values: [H, N, d]; queries: [H, T, G, d], scaled. Keys [first, end) are searched, others always read."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    first: int
    end: int

    @property
    def logits(self) -> Tensor:
        """[H, T, G, N]."""
        return torch.einsum("htgd,hnd->htgn", self.queries, self.keys)

    @property
    def weights(self) -> Tensor:
        """[H, T, G, N] float64, full attention's."""
        return self.logits.double().softmax(-1)

    def step(self, thresholds: Callable[[float], float] | None = None) -> Step:
        logits = self.logits
        outside = logits.clone()
        outside[..., self.first : self.end] = -torch.inf

        def read_logits(ids: Tensor) -> Tensor:
            assert ids.numel() == 0 or (int(ids.min()) >= self.first and int(ids.max()) < self.end)
            return logits.gather(-1, ids.long())

        return Step(self.keys.shape[1], thresholds, read_logits, outside.logsumexp(-1))

    def single_keys(self) -> Ranking:
        """An exact ranking."""
        return Ranking(self.logits[..., self.first : self.end], Items(self.first, self.end))

    def clusters(self, size: int, groups: int = 1, seed: int = 0) -> Ranking:
        """Clusters of about `size` similar keys, in one or two groups; they list keys outside of the range as well."""
        generator = torch.Generator().manual_seed(seed)
        count = self.keys.shape[1]
        bounds = [0, count] if groups == 1 else [0, count - count // 4, count]
        members, logits = [], []
        for begin, end in itertools.pairwise(bounds):
            keys = self.keys[:, begin:end]
            seeds = torch.randperm(end - begin, generator=generator)[: max(1, (end - begin) // size)]
            owners = torch.cdist(keys, keys[:, seeds]).argmin(-1)
            one_hot = torch.nn.functional.one_hot(owners, len(seeds)).float()
            sizes = one_hot.sum(1)
            means = torch.einsum("hnc,hnd->hcd", one_hot, keys) / sizes.clamp_min(1.0)[..., None]
            offsets = torch.nn.functional.pad(sizes.cumsum(1), (1, 0)).to(torch.int32)
            members.append(Members(offsets, (owners.argsort(dim=1, stable=True) + begin).to(torch.int32)))
            scores = torch.einsum("htgd,hcd->htgc", self.queries, means)
            logits.append(scores.masked_fill((sizes == 0)[:, None, None], -torch.inf))
        return Ranking(torch.cat(logits, dim=-1), Items(self.first, self.end, tuple(members)))

    def attended(self, selection: Selection) -> Tensor:
        """Which keys are attended: the selection and all keys outside of the searched range, [H, T, N]."""
        heads, positions, _, count = self.logits.shape
        kept = torch.zeros(heads, positions, count, dtype=torch.bool)
        kept[..., : self.first] = kept[..., self.end :] = True
        for head in range(heads):
            for position in range(positions):
                row = selected(selection, head, position)
                assert all(self.first <= key < self.end for key in row)
                kept[head, position, row] = True
        return kept


def selected(selection: Selection, head: int, position: int) -> list[int]:
    """The keys of one row, which must be ascending and unique."""
    row: list[int] = selection.ids_HTK[head, position, : int(selection.counts_HT[head, position])].tolist()
    assert row == sorted(set(row))
    return row


def make_problem(
    keys: int,
    heads: int = 2,
    positions: int = 1,
    group: int = 2,
    dim: int = 16,
    first: int = 4,
    recent: int = 8,
    sharpness: float = 1.0,
    seed: int = 0,
) -> Problem:
    """Heavy-tailed keys around a few centres; a larger `sharpness` makes attention more peaked."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(heads, max(2, keys // 40), dim, generator=generator)
    owner = torch.randint(0, centres.shape[1], (heads, keys, 1), generator=generator)
    noise = torch.randn(heads, keys, dim, generator=generator)
    tails = torch.rand(heads, keys, 1, generator=generator).clamp_min(0.05) ** -0.5
    located = centres.gather(1, owner.expand(-1, -1, dim)) + 0.3 * noise * tails
    values = torch.randn(heads, keys, dim, generator=generator)
    near = torch.randint(0, centres.shape[1], (heads, positions * group, 1), generator=generator)
    towards = centres.gather(1, near.expand(-1, -1, dim)).view(heads, positions, group, dim)
    towards = towards + 0.5 * torch.randn(towards.shape, generator=generator)
    return Problem(located, values, sharpness * towards * dim**-0.5, first, max(first, keys - recent))
