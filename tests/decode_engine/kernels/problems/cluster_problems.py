"""Sequences on contexts of different lengths with random clusters, for kernels and their references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.clusters.lookup import DeviceClusters
from decode_engine.kernels.clusters.reference import ClusteredSequence
from decode_engine.kernels.records import records_of
from index_store.indexes.key_clusters.build_triton import list_device_members, measure_members_reference

SINKS = 3


@dataclass(frozen=True)
class Problem:
    """One layer of a batch; rows behind those of contexts and tails hold nan, sinks are in no cluster."""

    q_RGD: Tensor
    sequences: tuple[ClusteredSequence | None, ...]
    records_BF: Tensor
    arrays: list[dict[str, Tensor]]
    heads: int
    width: int

    @property
    def scale(self) -> float:
        return float(self.q_RGD.shape[2] ** -0.5)

    @property
    def rows(self) -> int:
        return len(self.q_RGD)


def make_problem(
    lengths: Sequence[int],
    *,
    heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    per_cluster: int = 7,
    budget: int = 60,
    recent: int = 5,
    tails: Sequence[int] = (0,),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spread: bool = True,
    sharpness: float = 1.0,
) -> Problem:
    """Keys scatter around their clusters; sharpness scales the queries. A length of 0 is an idle row.

    tails: tail keys of every sequence; the last number also of those after it.
    """
    generator = torch.Generator().manual_seed(sum(lengths) + group)
    sequences: list[ClusteredSequence | None] = []
    arrays: list[dict[str, Tensor]] = []
    for number, length in enumerate(lengths):
        if not length:
            sequences.append(None)
            arrays.append({})
            continue
        clusters = max(1, length // per_cluster)
        centres = torch.randn(heads, clusters, head_dim, generator=generator)
        # One cluster stays empty where there are several.
        assignment = torch.randint(0, max(1, clusters - 1), (heads, length), generator=generator)
        keys = centres.gather(1, assignment[..., None].expand(-1, -1, head_dim))
        keys = keys + 0.5 * torch.randn(heads, length, head_dim, generator=generator)
        values = torch.randn(heads, length, head_dim, generator=generator)
        kv = torch.stack([keys, values], dim=2).to(dtype)
        assignment = assignment.to(torch.int32)
        assignment[:, :SINKS] = -1
        lists = list_device_members(assignment, clusters)
        made = measure_members_reference(kv[:, :, 0], kv[:, :, 1], *lists, spread)
        made |= {"assignment": assignment, "offsets": lists[0], "members": lists[1]}
        arrays.append(made)
        tail = tails[min(number, len(tails) - 1)]
        tail_kv = torch.randn(heads, tail, 2, head_dim, generator=generator).to(dtype)
        sequences.append(
            ClusteredSequence(
                padded(kv, 3).to(device)[:, :length],
                padded(tail_kv, 2).to(device),
                tail,
                min(SINKS, length),
                max(min(SINKS, length), length - recent),
                budget,
                DeviceClusters.of(made, SINKS, dtype, device),
            )
        )
    q = sharpness * torch.randn(heads * len(lengths), group, head_dim, generator=generator)
    return Problem(
        q.to(device, dtype),
        tuple(sequences),
        records_of(sequences, device),
        arrays,
        heads,
        # Launches serve contexts of any length up to a limit.
        max(1, max(lengths) // per_cluster) + 9,
    )


def padded(kv_HN2D: Tensor, rows: int) -> Tensor:
    """With rows of nan behind every head's, as growing buffers have."""
    heads, _, two, head_dim = kv_HN2D.shape
    return torch.cat([kv_HN2D, torch.full((heads, rows, two, head_dim), torch.nan).to(kv_HN2D.dtype)], dim=1)


def random_lists(problem: Problem, share: float, segments: int, seed: int = 0) -> KeyLists:
    """About that share of each row's searched keys, in segments of very different lengths, and some entries of -1."""
    generator = torch.Generator().manual_seed(seed)
    width = max((s.kv_HN2D.shape[1] for s in problem.sequences if s is not None), default=1)
    lists = KeyLists.allocate(problem.rows, segments, width, "cpu")
    lists.ids_RPW.fill_(2**30)
    lists.counts_RP.zero_()
    for row in range(problem.rows):
        sequence = problem.sequences[row // problem.heads]
        if sequence is None:
            continue
        searched = torch.arange(sequence.first, sequence.end, dtype=torch.int32)
        searched = searched[torch.rand(len(searched), generator=generator) < share]
        owner = torch.randint(0, segments * segments, (len(searched),), generator=generator)
        for segment in range(segments):
            own = searched[(owner // segments) == segment] if segment else searched[owner < segments]
            own = torch.cat([own, torch.tensor([-1], dtype=torch.int32)]) if segment % 2 else own
            lists.ids_RPW[row, segment, : len(own)] = own
            lists.counts_RP[row, segment] = len(own)
    device = problem.q_RGD.device
    return KeyLists(lists.ids_RPW.to(device), lists.counts_RP.to(device))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Of whole tensors; nan where one is not finite."""
    difference = (found.double() - expected.double().to(found.device)).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))
