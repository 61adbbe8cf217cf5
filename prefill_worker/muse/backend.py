"""Which code computes MuSe's stages: kernels on a device, their eager references elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_worker.muse.kernels.clusters import BoundedClusters, find_clusters_reference
from prefill_worker.muse.kernels.reference import (
    KeyValueMoments,
    QueryGrads,
    Summaries,
    attend_summaries_backward_reference,
    attend_summaries_into_reference,
    covary_members_reference,
    finish_queries_reference,
    mix_dipoles_backward_reference,
    mix_dipoles_reference,
    summarise_keys_backward_reference,
    summarise_keys_reference,
)

KERNEL_DIMS = (16, 32, 64, 128)
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Backend:
    """The stages: eagerly, as `prefill_worker.muse.kernels.reference` and `clusters` define them, unless told."""

    find_clusters: Callable[[Tensor, int, float, int, int], BoundedClusters] = find_clusters_reference
    summarise_keys: Callable[[Tensor, Tensor, Tensor, BoundedClusters, float, int], Summaries] = (
        summarise_keys_reference
    )
    covary_members: Callable[[Tensor, Tensor, BoundedClusters], KeyValueMoments] = covary_members_reference
    mix_dipoles: Callable[[Tensor, Tensor, int, int], Tensor] = mix_dipoles_reference
    attend_summaries: Callable[
        [Tensor, BoundedClusters, Summaries, Tensor | None, float, Tensor, Tensor, bool], None
    ] = attend_summaries_into_reference
    attend_summaries_backward: Callable[
        [Tensor, BoundedClusters, Summaries, Tensor | None, float, Tensor, Tensor, Tensor], QueryGrads
    ] = attend_summaries_backward_reference
    mix_dipoles_backward: Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]] = (
        mix_dipoles_backward_reference
    )
    summarise_keys_backward: Callable[
        [
            Tensor,
            Tensor,
            Tensor,
            BoundedClusters,
            Tensor,
            QueryGrads,
            float,
            int,
            KeyValueMoments | None,
            Tensor | None,
        ],
        tuple[Tensor, Tensor, Tensor],
    ] = summarise_keys_backward_reference
    finish_queries: Callable[[Tensor, BoundedClusters, Tensor, Tensor], None] = finish_queries_reference


EAGER = Backend()


def kernels() -> Backend:
    """The stages by kernels."""
    # Imported here: what runs on a CPU does not need triton.
    from prefill_worker.muse.kernels import clustering, dipoles, refining, summarising

    return Backend(
        clustering.find_clusters,
        summarising.summarise_keys,
        dipoles.covary_members,
        dipoles.mix_dipoles,
        refining.attend_summaries,
        refining.attend_summaries_backward,
        dipoles.mix_dipoles_backward,
        summarising.summarise_keys_backward,
        refining.finish_queries,
    )


def backend_for(queries: Tensor) -> Backend:
    """Kernels for the queries' device, dtype and width where there are some."""
    fits = queries.shape[-1] in KERNEL_DIMS and queries.dtype in KERNEL_DTYPES
    return kernels() if queries.is_cuda and fits else EAGER
