"""Documents that begin as a stored context does: its keys and values are taken, and only the rest is computed.

What is taken is what a prefill in one go would make, bit for bit: exact attention, the same chunks, whole ones only, on
the same kind of device, and rows that are stored as they were computed. The sample of queries is another: of what was
taken, the few that the store has; and so that indexes have enough to be built from, as many tokens at the end as the
sample has rows are always computed.

Shape legend: S sampled positions among the tokens that are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.family.prefixes import longest_beginning
from index_store.indexes.coarse_rows.two_planes import read_rows
from index_store.store.catalog import Store
from index_store.store.description.context_id import first_digest
from index_store.store.description.dtypes import AS_DTYPE
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import Manifest
from index_store.store.stored_context import Context
from prefill_worker.jobs.prepared_job import PreparedJob
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.query_sample import SampledPositions

_SAME = ("chunk", "attention", "device")
"""Notes of a manifest that decide how tokens were computed."""


@dataclass(frozen=True, slots=True)
class TakenBeginning:
    """The first `tokens` tokens, whole chunks, of a stored context."""

    store: Store
    manifest: Manifest
    tokens: int

    def describe(self) -> dict[str, Scalar]:
        """As the new context's manifest notes it."""
        return {"taken_tokens": self.tokens, "taken_from": self.manifest.id}

    def told(self, of: int) -> str:
        """For people. of: tokens of the document."""
        rest = of - self.tokens
        return f"{self.tokens} tokens are taken from context {self.manifest.id[:12]}, {rest} are computed"

    def sampled(self, job: PreparedJob) -> SampledPositions:
        """What the store has of the beginning, and of the rest what a document of its own would have."""
        rest = job.sampled_positions(self.tokens)
        return SampledPositions(torch.cat([self._stored_S(), rest.context_P]), rest.prompts)

    def fill(self, capture: Capture) -> None:
        """Gives keys, values and queries to a capture. Raises what `Store.open` and reading raise."""
        with self.store.open(self.manifest.id, self.manifest) as context:
            for layer in range(self.manifest.model.layers):
                self.store.bounded(lambda layer=layer: self._fill_layer(context, capture, layer))  # type: ignore[misc]
            capture.take_state(context.state(), self.manifest.dtype)

    def _fill_layer(self, context: Context, capture: Capture, layer: int) -> None:
        kv = read_rows(context, layer).to(capture.kv_dtype)
        queries = None
        if self.manifest.queries is not None and layer in self.manifest.model.full_layers:
            queries = context.queries(layer).queries_HPGD[:, : len(self._stored_S())]
        first = self.manifest.token_count - kv.shape[1]  # of those kept, in a layer with a window
        kept = kv[:, : self.tokens - first]
        capture.take(layer, kept.to(capture.device), queries)

    def _stored_S(self) -> Tensor:
        positions = torch.tensor(self.manifest.query_positions, dtype=torch.int64)
        return positions[positions < self.tokens]


def find_beginning(job: PreparedJob, store: Store, id_: str) -> TakenBeginning | None:
    """The stored context that most can be taken of; None where there is none that suits.

    id_: of the job's own, which may be there, damaged.
    """
    config, chunk = job.config, job.config.pass_tokens
    wanted = {"chunk": chunk, "attention": config.attention, "device": config.torch_device.type}
    if config.muse is not None:
        return None

    def suits(manifest: Manifest) -> bool:
        return (
            manifest.id != id_
            and manifest.rows == AS_DTYPE
            and all(manifest.prefill.get(note) == wanted[note] for note in _SAME)
        )

    first = first_digest(job.identity, job.dtype, config.salt)
    found = longest_beginning(store, first, list(job.token_ids), suits)
    if found is None:
        return None
    rest = max(1, config.query_sample // job.group)
    tokens = min(found.tokens, len(job.token_ids) - rest) // chunk * chunk
    window = job.identity.window
    if window is not None and tokens < found.manifest.token_count > window.size:
        return None  # of layers with a window the store has the last rows alone
    if job.identity.states is not None and tokens != found.manifest.token_count:
        return None  # states are there behind the last token alone
    return TakenBeginning(store, found.manifest, tokens) if tokens > 0 else None
