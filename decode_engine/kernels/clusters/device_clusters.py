"""Clusters of keys as kernels read them, and what one step makes of them.

Shape legend: H KV heads, R rows (sequence x KV head), G group heads, N keys, C clusters, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels import records

_STEPS = 127
"""Variances are stored as multiples of 1/127 of the largest of their cluster."""


@dataclass(frozen=True, slots=True)
class DeviceClusters:
    """Clusters of one context's layer.

    means_HCD, value_means_HCD: [H, C, d], means of the raw keys and of the values, in the dtype of the keys.
    sizes_HC: [H, C] int32. offsets_HC: [H, C + 1] and members_HN: [H, N] int32, the keys of each cluster.
    assignment_HN: [H, N] int32, the cluster of every key, -1 for keys in none. variances: bytes, [H, C, d] int8
    followed by the units [H, C] float32 that they count; None without. A byte per number is enough, since the sum over
    the dimensions weighs large variances most and these are the most precise: it is off by about 1e-3. unclustered: so
    many of the first keys are in no cluster.
    """

    means_HCD: Tensor
    value_means_HCD: Tensor
    sizes_HC: Tensor
    offsets_HC: Tensor
    members_HN: Tensor
    assignment_HN: Tensor
    variances: Tensor | None
    unclustered: int

    @staticmethod
    def of(
        arrays: Mapping[str, Tensor], sinks: int, dtype: torch.dtype, device: torch.device | str
    ) -> DeviceClusters:
        """Of the arrays of an index of kind `key_clusters`, which left so many sinks out.

        Vectors are rounded to `dtype`.
        """
        counts = arrays["counts"].to(device)
        variances = arrays.get("variances")
        return DeviceClusters(
            arrays["means"].to(device, dtype).contiguous(),
            (arrays["value_sums"].to(device) / counts.clamp(min=1.0)[..., None]).to(dtype).contiguous(),
            counts.to(torch.int32).contiguous(),
            arrays["offsets"].to(device).contiguous(),
            arrays["members"].to(device).contiguous(),
            arrays["assignment"].to(device).contiguous(),
            None if variances is None else _in_bytes(variances.to(device)),
            sinks,
        )

    def fields(self) -> dict[int, int]:
        """Of a record."""
        return {
            records.MEANS: self.means_HCD.data_ptr(),
            records.VALUE_MEANS: self.value_means_HCD.data_ptr(),
            records.SIZES: self.sizes_HC.data_ptr(),
            records.OFFSETS: self.offsets_HC.data_ptr(),
            records.MEMBERS: self.members_HN.data_ptr(),
            records.ASSIGNMENT: self.assignment_HN.data_ptr(),
            records.VARIANCES: 0 if self.variances is None else self.variances.data_ptr(),
            records.CLUSTERS: self.sizes_HC.shape[1],
            records.UNCLUSTERED: self.unclustered,
        }

    def variances_HCD(self) -> Tensor | None:
        """The variances as kernels see them, float32."""
        if self.variances is None:
            return None
        shape = self.means_HCD.shape
        count = shape.numel()
        units_HC = self.variances[count:].view(torch.float32).view(shape[:2])
        return self.variances[:count].view(shape).float() * units_HC[..., None]


def _in_bytes(variances_HCD: Tensor) -> Tensor:
    units_HC = variances_HCD.float().amax(-1).clamp(min=torch.finfo(torch.float32).tiny * 1024) / _STEPS
    numbers = (variances_HCD.float() / units_HC[..., None]).round().clamp(max=_STEPS).to(torch.int8)
    return torch.cat([numbers.flatten(), units_HC.flatten().view(torch.int8)])


def most_clusters(max_keys: int, keys_per_cluster: int, block: int) -> int:
    """Clusters per head of contexts of up to max_keys, as `divide_keys` makes them."""
    whole = -(-max_keys // keys_per_cluster)
    # A block of another size may end in a cluster that is not full.
    return whole + (max_keys // block + 1 if block % keys_per_cluster else 0) if block else whole
