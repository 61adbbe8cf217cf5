"""The rows of a stored context, from which further indexes are built.

Shape legend: H KV heads, N tokens of the context, P sampled tokens, G query heads per KV head, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.attention.attention_state import PLAIN, LogitForm
from index_store.indexes.coarse_rows.two_planes import read_rows
from index_store.indexes.interface.layer_index import ClusterStarts
from index_store.store.description.context_id import ModelIdentity
from index_store.store.stored_context import Context, QuerySample
from prefill_worker.reading.capture import Capture

LOGIT_CAP = "logit_cap"
"""Note of a manifest: the soft cap of the model's attention logits, where it has one."""


class StoredRows:
    """Keys and values as they are stored, and queries: the few that are stored, or all that a second reading sampled.

    So what is added fits the stored keys bit for bit, whatever a second reading's rounding makes of them.
    """

    def __init__(self, context: Context, device: torch.device, read_again: Capture | None = None) -> None:
        """The context must stay open."""
        self.identity: ModelIdentity = context.manifest.model
        self.device = device
        self._context = context
        self._read_again = read_again

    def kv_on_device(self, layer: int) -> Tensor:
        """[H, N, 2, d] as `read_rows` has them."""
        return read_rows(self._context, layer).to(self.device)

    def query_sample(self, layer: int) -> QuerySample:
        """[H, P, G, d]; of a context without stored queries none."""
        if self._read_again is not None:
            return self._read_again.query_sample(layer)
        if self._context.manifest.queries is None:
            group = self.identity.query_heads // self.identity.kv_heads
            empty = torch.empty(self.identity.kv_heads, 0, group, self.identity.head_dim, device=self.device)
            return QuerySample(empty, torch.empty(0, dtype=torch.int64))
        stored = self._context.queries(layer)
        return QuerySample(stored.queries_HPGD.to(self.device), stored.positions_P)

    def form(self, layer: int) -> LogitForm:
        """What the layer does to logits, as far as indexes depend on it: its cap, which the manifest notes."""
        cap = self._context.manifest.prefill.get(LOGIT_CAP)
        return PLAIN if cap is None else LogitForm(float(cap))

    def cluster_starts(self, layer: int) -> ClusterStarts | None:
        """Those of a second reading with approximate attention."""
        return None if self._read_again is None else self._read_again.cluster_starts(layer)

    def release(self, layer: int) -> None:
        """Frees what a second reading keeps of the layer."""
        if self._read_again is not None:
            self._read_again.release(layer)
