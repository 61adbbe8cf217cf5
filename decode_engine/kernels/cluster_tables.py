"""Where the clusters of a batch of sequences lie, and what one step makes of them.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, N keys, C clusters (the most of any sequence), S
splits, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from index_store.errors import InvalidArgumentError

BINS = 1024
"""Of the histogram that a token budget is cut by."""


@dataclass(frozen=True, slots=True)
class DeviceClusters:
    """Clusters of one context's layer as the kernels read them.

    means_HCD, value_means_HCD: [H, C, d], means of the raw keys and of the values, in one dtype.
    sizes_HC: [H, C] int32. offsets_HC: [H, C + 1] and members_HN: [H, N] int32, the keys of each cluster.
    assignment_HN: [H, N] int32, the cluster of every key, -1 for keys in none. variances_HCD: [H, C, d] in the dtype of
    the means, of the keys, or None.
    """

    means_HCD: Tensor
    value_means_HCD: Tensor
    sizes_HC: Tensor
    offsets_HC: Tensor
    members_HN: Tensor
    assignment_HN: Tensor
    variances_HCD: Tensor | None = None

    @staticmethod
    def of(arrays: dict[str, Tensor], dtype: torch.dtype, device: torch.device | str) -> DeviceClusters:
        """Of the arrays of an index of kind `key_clusters`; vectors are rounded to `dtype`."""
        counts = arrays["counts"].to(device)
        variances = arrays.get("variances")
        return DeviceClusters(
            arrays["means"].to(device, dtype).contiguous(),
            (arrays["value_sums"].to(device) / counts.clamp(min=1.0)[..., None]).to(dtype).contiguous(),
            counts.to(torch.int32).contiguous(),
            arrays["offsets"].to(device).contiguous(),
            arrays["members"].to(device).contiguous(),
            arrays["assignment"].to(device).contiguous(),
            None if variances is None else variances.to(device, dtype).contiguous(),
        )

    def addresses(self) -> list[int]:
        """In the order in which kernels look them up."""
        variances = 0 if self.variances_HCD is None else self.variances_HCD.data_ptr()
        arrays = (
            self.means_HCD,
            self.value_means_HCD,
            self.sizes_HC,
            self.offsets_HC,
            self.members_HN,
            self.assignment_HN,
        )
        return [*(array.data_ptr() for array in arrays), variances]


@dataclass(frozen=True, slots=True)
class ClusterTables:
    """Clusters of every sequence of a batch.

    addresses_BA: [B, 7] int64. shapes_BX: [B, 2] int32, clusters and keys. ranges_BX: [B, 2] int32, the searched keys
    first..end-1; all other keys of a context (sinks, recent window) are attended exactly. width: clusters of the
    largest context that a launch must serve. contexts: what the addresses were taken from, kept alive by this.
    """

    addresses_BA: Tensor
    shapes_BX: Tensor
    ranges_BX: Tensor
    width: int
    contexts: tuple[DeviceClusters, ...]

    @staticmethod
    def of(contexts: Sequence[DeviceClusters], ranges: Sequence[tuple[int, int]]) -> ClusterTables:
        """Of one context and one searched range per sequence. Raises InvalidArgumentError where they do not fit."""
        if not contexts:
            raise InvalidArgumentError("a lookup needs the clusters of at least one sequence")
        means = contexts[0].means_HCD
        kinds = {
            (c.means_HCD.shape[0], c.means_HCD.shape[2], c.means_HCD.dtype, c.variances_HCD is None)
            for c in contexts
        }
        if len(ranges) != len(contexts):
            raise InvalidArgumentError(f"{len(contexts)} contexts, but {len(ranges)} searched ranges")
        if len(kinds) > 1:
            raise InvalidArgumentError("all contexts of a batch need the same heads, dtype and moments")
        shapes = [[c.means_HCD.shape[1], c.assignment_HN.shape[1]] for c in contexts]
        return ClusterTables(
            torch.tensor([c.addresses() for c in contexts], dtype=torch.int64, device=means.device),
            torch.tensor(shapes, dtype=torch.int32, device=means.device),
            torch.tensor(ranges, dtype=torch.int32, device=means.device),
            max(clusters for clusters, _ in shapes),
            tuple(contexts),
        )

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.contexts[0].means_HCD.shape[0]

    @property
    def head_dim(self) -> int:
        return self.contexts[0].means_HCD.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of means and values."""
        return self.contexts[0].means_HCD.dtype

    def of_row(self, row: int) -> tuple[DeviceClusters, int]:
        """The clusters of a row and its KV head, for the eager references."""
        return self.contexts[row // self.heads], row % self.heads


@dataclass(frozen=True, slots=True)
class Scores:
    """What one step found about the clusters; written by the lookup, used up by selection and remainder.

    logits_RGC: [R, G, C] float32, natural, q . mean key; -inf for clusters without keys or beyond a context's.
    spreads_RGC: [R, G, C] float32, log2(1 + v / 2) with the logits' variance v; None without variances.
    left_RC: [R, C] int32, keys of a cluster that are not attended exactly; not above 0 for none.
    taken_RGC: [R, G, C] float32, sum of the logits of keys that were taken out; None without variances.
    peaks_RSG, totals_RSG: the softmax normaliser in `splits` parts, the first slots: sum of N exp2(logit - peak), in
    units of log2.
    bins_RC: [R, C] int16, bin of a cluster's weight, higher is heavier; -1 for none. histogram_RB: [R, BINS] int32,
    keys per bin. counts_R: [R] int32, keys listed so far: those outside the searched range.
    """

    logits_RGC: Tensor
    spreads_RGC: Tensor | None
    left_RC: Tensor
    taken_RGC: Tensor | None
    peaks_RSG: Tensor
    totals_RSG: Tensor
    bins_RC: Tensor
    histogram_RB: Tensor
    counts_R: Tensor
    splits: int

    @staticmethod
    def allocate(
        rows: int, group: int, width: int, splits: int, spread: bool, device: torch.device, slots: int = 0
    ) -> Scores:
        """Uninitialised, for a lookup to fill; with `slots` there is room for parts of later launches."""
        options: dict[str, Any] = {"device": device}
        wide = (rows, group, width)
        return Scores(
            torch.empty(wide, **options),
            torch.empty(wide, **options) if spread else None,
            torch.empty(rows, width, dtype=torch.int32, **options),
            torch.empty(wide, **options) if spread else None,
            torch.empty(rows, max(splits, slots), group, **options),
            torch.empty(rows, max(splits, slots), group, **options),
            torch.empty(rows, width, dtype=torch.int16, **options),
            torch.empty(rows, BINS, dtype=torch.int32, **options),
            torch.empty(rows, dtype=torch.int32, **options),
            splits,
        )


@triton.jit
def always_listed(shapes_ptr: tl.tensor, ranges_ptr: tl.tensor, sequence: tl.tensor) -> tl.tensor:
    """How many keys of a sequence's context lie outside its searched range."""
    keys = tl.load(shapes_ptr + sequence * 2 + 1)
    first = tl.load(ranges_ptr + sequence * 2)
    end = tl.load(ranges_ptr + sequence * 2 + 1)
    return first + tl.maximum(keys - end, 0)


@triton.jit
def table(
    addresses_ptr: tl.tensor, sequence: tl.tensor, number: tl.constexpr, ELEMENT: tl.constexpr
) -> tl.tensor:
    """Pointer to the `number`-th array of a sequence's context."""
    address = tl.load(addresses_ptr + sequence * 7 + number).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(address, 16)
