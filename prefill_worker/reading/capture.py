"""The attention that prefill gives the model: causal, and it keeps keys, values and a sample of queries.

It is exact, or attends to the past through clusters (`prefill_worker.muse.ranges`).

A `Capture` is handed to the model as a keyword argument, travels through transformers unchanged and arrives at
`capture_attention`, registered under the name ATTENTION. There is no cache object and no state outside the Capture.

Shape legend: H KV heads, G query heads per KV head, T tokens of one forward pass, N tokens of the context,
P sampled tokens, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import AttentionInterface

from index_store.indexes.interface.layer_index import ClusterStarts
from index_store.store.manifest import ModelIdentity
from index_store.store.stored_context import QuerySample
from prefill_worker.muse.ranges import RangeAttention
from prefill_worker.reading.causal_attention import attend_causally
from prefill_worker.reading.kept_layers import DeviceLayers, HostLayers, KeptLayers
from prefill_worker.reading.query_sample import SampledPositions

ATTENTION = "sparsekv_capture"


class Capture:
    """Keys, values and sampled queries of every layer while a model reads a context.

    Later tokens attend to keys and values as they are stored (rounded to `kv_dtype`), so that a session that attends
    fully sees exactly what prefill saw. Peak memory: docs/prefill.md.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        token_count: int,
        kv_dtype: torch.dtype,
        sampled: SampledPositions,
        device: torch.device | str = "cpu",
        block_tokens: int | None = None,
        approximation: RangeAttention | None = None,
    ) -> None:
        """block_tokens: keys and values are kept in host memory and read in blocks of so many tokens, at most.

        By default they stay on the device. approximation: attends to the context's past in place of exact attention;
        a pass is then one of its blocks. Raises MemoryBudgetError when the machine refuses the host memory.
        """
        self.identity = identity
        self.token_count = token_count
        self.kv_dtype = kv_dtype
        self.device = torch.device(device)
        self._sampled = sampled
        self._when_passed: Callable[[int], None] | None = None
        self._approximation = approximation
        heads, dim = identity.kv_heads, identity.head_dim
        shape = (heads, token_count, 2, dim)
        self._kept: KeptLayers = (
            DeviceLayers(identity.layers, shape, kv_dtype, self.device)
            if block_tokens is None
            else HostLayers(identity.layers, shape, kv_dtype, self.device, block_tokens)
        )
        self._sample_shape = (heads, sampled.rows, identity.query_heads // heads, dim)
        self._queries: list[Tensor | None] = [None] * identity.layers
        self._prompt_kv: list[Tensor | None] = [None] * identity.layers
        self._start = 0
        self._kept_T = torch.empty(0, dtype=torch.int64)
        self._first_row = 0

    def when_passed(self, call: Callable[[int], None]) -> None:
        """Has a layer's number told as soon as the context's last chunk has brought its keys, values and queries."""
        self._when_passed = call

    def begin_context_chunk(self, start: int, count: int) -> None:
        """The next forward pass carries the context's tokens start..start+count-1."""
        bounds = torch.tensor([start, start + count])
        first, end = torch.searchsorted(self._sampled.context_P, bounds).tolist()
        self._first_row = first
        self._kept_T = (self._sampled.context_P[first:end] - start).to(self.device)
        self._start = start

    def begin_prompt_chunk(self, prompt: int, start: int, count: int) -> None:
        """The next forward pass carries tokens start..start+count-1 of a calibration prompt, after the context.

        Its keys and values are kept apart from the context's and dropped when another prompt starts.
        """
        if start == 0:
            self.forget_prompt()
        kept = self._sampled.prompts[prompt]
        before = int((kept < start).sum())
        inside = kept[(kept >= start) & (kept < start + count)]
        earlier = sum(len(other) for other in self._sampled.prompts[:prompt])
        self._first_row = len(self._sampled.context_P) + earlier + before
        self._kept_T = (inside - start).to(self.device)
        self._start = self.token_count + start

    def forget_prompt(self) -> None:
        """Drops keys and values of the calibration prompt; the context's are as if it had never been read."""
        self._prompt_kv = [None] * self.identity.layers

    def attend(self, layer: int, query_HqTD: Tensor, key_HTD: Tensor, value_HTD: Tensor) -> Tensor:
        """Stores one layer's keys and values, samples its queries, returns its attention output [T, Hq, d]."""
        count = key_HTD.shape[1]
        query_HGTD = query_HqTD.view(self.identity.kv_heads, -1, *query_HqTD.shape[1:])
        self._sample(layer, query_HGTD)
        pasts = [self._kept.past(layer, min(self._start, self.token_count))]
        if self._start < self.token_count:
            chunk = self._kept.write(layer, self._start, key_HTD, value_HTD)
            if self._approximation is None:
                self._tell(layer, count)
        else:
            chunk = torch.stack([key_HTD, value_HTD], dim=2).to(self.kv_dtype)
            earlier = self._prompt_kv[layer]
            pasts += [] if earlier is None else [earlier]
            self._prompt_kv[layer] = chunk if earlier is None else torch.cat([earlier, chunk], dim=1)
        if self._approximation is not None and self._start < self.token_count:
            out_HGTD = self._approximation.attend(
                layer, query_HGTD, self._start, chunk, partial(self._kept.part, layer)
            )
            self._tell(layer, count)  # only now are the clusters found that indexes start from
        else:
            out_HGTD = attend_causally(query_HGTD, pasts, chunk)
        return out_HGTD.flatten(0, 1).transpose(0, 1)

    def _tell(self, layer: int, count: int) -> None:
        if self._start + count == self.token_count and self._when_passed is not None:
            self.settle()
            self._when_passed(layer)

    def kv(self, layer: int) -> Tensor:
        """Keys and values of a layer where they are kept, [H, N, 2, d] in the stored dtype.

        Raises ValueError once released.
        """
        return self._kept.kept(layer)

    def kv_on_device(self, layer: int) -> Tensor:
        """The same on the capture's device: a copy, made by the caller's stream, where they are kept elsewhere."""
        return self._kept.on_device(layer)

    def settle(self) -> None:
        """Has the caller's stream wait until what was captured is where it is kept."""
        self._kept.settle()

    @property
    def sample_positions(self) -> Tensor:
        """Positions of the sampled queries, [P] int64 ascending on the CPU; calibration prompts have positions >= N."""
        return self._positions.sort(stable=True).values

    def query_sample(self, layer: int) -> QuerySample:
        """The layer's sampled queries on the capture's device, in the order of `sample_positions`."""
        queries = self._queries[layer]
        if queries is None:
            raise ValueError(f"layer {layer} has not seen any query, or was released")
        order = self._positions.argsort(stable=True)
        return QuerySample(queries.float()[:, order.to(self.device)], self._positions[order])

    def cluster_starts(self, layer: int) -> ClusterStarts | None:
        """Clusters that approximate attention found in a layer, on the capture's device; None without it."""
        if self._approximation is None:
            return None
        return self._approximation.starts(layer, self.identity.kv_heads, self.token_count)

    @property
    def _positions(self) -> Tensor:
        prompts = (kept + self.token_count for kept in self._sampled.prompts)
        return torch.cat([self._sampled.context_P, *prompts])

    def release(self, layer: int) -> None:
        """Frees what is kept of a layer."""
        self._kept.release(layer)
        if self._approximation is not None:
            self._approximation.release(layer)
        self._queries[layer] = self._prompt_kv[layer] = None

    def close(self) -> None:
        """Frees everything."""
        self._kept.close()
        self._queries = [None] * self.identity.layers
        self.forget_prompt()

    def _sample(self, layer: int, query_HGTD: Tensor) -> None:
        queries = self._queries[layer]
        if queries is None:
            queries = torch.empty(self._sample_shape, dtype=query_HGTD.dtype, device=self.device)
            self._queries[layer] = queries
        rows = slice(self._first_row, self._first_row + len(self._kept_T))
        queries[:, rows] = query_HGTD.index_select(2, self._kept_T).transpose(1, 2)


def register_attention() -> str:
    """Makes `capture_attention` known to transformers; returns the name to load a model with."""
    AttentionInterface.register(ATTENTION, capture_attention)
    return ATTENTION


def capture_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    capture: Capture,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, d], key and value [1, H, T, d] -> ([1, T, Hq, d], None).

    Dropout and mask do not apply (inference, one sequence), and that the scale is 1/sqrt(d) and the window covers the
    context was checked when the model was loaded.
    """
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise TypeError(f"attention module has layer_idx {layer!r}, expected a number")
    return capture.attend(layer, query[0], key[0], value[0])[None], None
