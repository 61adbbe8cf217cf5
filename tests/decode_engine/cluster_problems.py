"""Sequences on contexts of different lengths with random clusters, for kernels and their references."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels.cluster_tables import ClusterTables, DeviceClusters
from decode_engine.kernels.key_values import KeyValues
from index_store.kernels.device_clusters import list_device_members, measure_members_reference

SINKS = 3


@dataclass(frozen=True)
class Problem:
    """One layer of a batch; the keys of all contexts are finite and their sinks in no cluster."""

    q_RGD: Tensor
    kv: KeyValues
    tables: ClusterTables
    arrays: list[dict[str, Tensor]]
    budgets_R: Tensor
    scale: float


def make_problem(
    lengths: list[int],
    *,
    heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    per_cluster: int = 7,
    budget: int = 60,
    recent: int = 5,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spread: bool = True,
    sharpness: float = 1.0,
) -> Problem:
    """Keys scatter around their clusters; sharpness scales the queries."""
    generator = torch.Generator().manual_seed(sum(lengths) + group)
    tensors, contexts, arrays = [], [], []
    for length in lengths:
        clusters = max(1, length // per_cluster)
        centres = torch.randn(heads, clusters, head_dim, generator=generator)
        # One cluster stays empty where there are several.
        assignment = torch.randint(0, max(1, clusters - 1), (heads, length), generator=generator)
        keys = centres.gather(1, assignment[..., None].expand(-1, -1, head_dim))
        keys = keys + 0.5 * torch.randn(heads, length, head_dim, generator=generator)
        values = torch.randn(heads, length, head_dim, generator=generator)
        kv = torch.stack([keys, values], dim=2).to(dtype)
        # Unused rows behind every head's, as growing buffers have.
        padded = torch.full((heads, length + 3, 2, head_dim), torch.nan, dtype=dtype)
        padded[:, :length] = kv
        tensors.append(padded.to(device)[:, :length])
        assignment = assignment.to(torch.int32)
        assignment[:, :SINKS] = -1
        lists = list_device_members(assignment, clusters)
        made = measure_members_reference(kv[:, :, 0], kv[:, :, 1], *lists, spread)
        made |= {"assignment": assignment, "offsets": lists[0], "members": lists[1]}
        arrays.append(made)
        contexts.append(DeviceClusters.of(made, dtype, device))
    rows = heads * len(lengths)
    q = sharpness * torch.randn(rows, group, head_dim, generator=generator)
    ranges = [(SINKS, max(SINKS, length - recent)) for length in lengths]
    return Problem(
        q.to(device, dtype),
        KeyValues.of(tensors),
        ClusterTables.of(contexts, ranges),
        arrays,
        torch.full((rows,), budget, dtype=torch.int32, device=device),
        head_dim**-0.5,
    )


def random_lists(problem: Problem, width: int) -> tuple[Tensor, Tensor]:
    """Key ids [R, width] without repetition and counts from 0 to all of them, some entries of -1 among them."""
    generator = torch.Generator().manual_seed(width)
    rows, heads = len(problem.q_RGD), problem.kv.heads
    ids = torch.full((rows, width), -1, dtype=torch.int32)
    counts = torch.zeros(rows, dtype=torch.int32)
    for row in range(rows):
        length = problem.kv.tensors[row // heads].shape[1]
        count = min(length, width) if row else 0
        ids[row, :count] = torch.randperm(length, generator=generator)[:count].to(torch.int32)
        ids[row, count // 2 : count // 2 + 2] = -1
        counts[row] = count
    device = problem.q_RGD.device
    return ids.to(device), counts.to(device)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Of whole tensors; nan where one is not finite."""
    difference = (found.double() - expected.double().to(found.device)).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))
