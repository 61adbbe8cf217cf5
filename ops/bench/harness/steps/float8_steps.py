"""Whole steps whose attention is FlashInfer's, to all keys of a cache in 8 bits: what a step of other servers costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decode_engine.steps.attention.step_attention import StepAttention, StepPlan
from harness.flashinfer_baseline import Float8Cache
from harness.timing import graph_us
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.store.description.manifest import Manifest


def float8_steps(contexts: Sequence[ResidentContext]) -> type[StepAttention]:
    """Steps of sessions on these contexts, all on one or each on its own, by the faster way, without their tails.

    Layers of one content share a copy. Raises CheckFailedError for a wrong output of any layer's attention, and
    ValueError where some sessions share a context.
    """
    own = list({id(context): context for context in contexts}.values())
    if len(own) not in (1, len(contexts)):
        raise ValueError(f"{len(contexts)} sessions are on {len(own)} contexts, expected one or as many")
    copies: dict[int, Float8Cache] = {}
    caches = []
    for layer in range(contexts[0].manifest.model.layers):
        stored = [context.stored_rows(layer) for context in own]
        content = stored[0].data_ptr()
        if content not in copies:
            copies[content] = Float8Cache(torch.stack(stored))
        caches.append(copies[content])

    class Float8Steps(StepAttention):
        @classmethod
        def refusal(cls, method: Method, manifest: Manifest) -> str | None:
            return None

        @classmethod
        def fields(
            cls, context: ResidentContext, method: Method, layer: int, lane: int = 0
        ) -> Mapping[int, int]:
            return {}

        def __init__(self, plan: StepPlan) -> None:
            super().__init__(plan)
            heads, head_dim = plan.model.kv_heads, plan.model.head_dim
            q_BHGD = torch.randn(
                len(contexts), heads, plan.group, head_dim, dtype=plan.dtype, device=plan.device
            )
            ways = {id(cache): cache.ways(q_BHGD) for cache in copies.values()}
            times = {
                name: graph_us([lambda way=way: way(q_BHGD)], 8)  # type: ignore[misc]
                for name, way in next(iter(ways.values())).items()
            }
            fastest = min(times, key=lambda name: times[name])
            self._layers = [ways[id(cache)][fastest] for cache in caches]
            self._out_BHGD = torch.zeros(
                plan.size, heads, plan.group, head_dim, dtype=plan.dtype, device=plan.device
            )

        def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
            count = len(contexts)
            self._out_BHGD[:count].copy_(self._layers[layer](q_BHGD[:count]))
            return self._out_BHGD

        def kept_B(self) -> Tensor:
            return torch.zeros(self.plan.size, dtype=torch.int64, device=self.plan.device)

    return Float8Steps
