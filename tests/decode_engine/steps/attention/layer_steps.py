"""One layer's captured step, beside the general path's, and steps over lists that were there before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import HybridSteps, ListedSteps
from decode_engine.steps.attention.step_attention import KeySelection, StepAttention, StepPlan
from decode_engine.steps.attention.step_batch import STEP_COUNTS, StepBatch, step_counts
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import dtype_name
from index_store.store.description.manifest import Manifest
from tests.decode_engine.steps.sessions import DTYPE
from tests.support.devices import DEVICE

HEADS = 2


def model_of(group: int, head_dim: int, heads: int = HEADS) -> ModelIdentity:
    return ModelIdentity("test", "test", "0" * 16, "0" * 16, 2, heads * group, heads, head_dim, 2, 2**22)


class GivenLists(KeySelection):
    """Lists that were there before."""

    lists: KeyLists

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        return None

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return {}

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        return self.lists


class GivenSteps(ListedSteps):
    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = {
        "query_tables": GivenLists,
        "exact": GivenLists,
    }


class GivenHybridSteps(HybridSteps):
    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = {"query_tables": GivenLists}


@dataclass
class Run:
    """One layer's step of sessions on contexts of some lengths, and an idle row. expected: on the general path."""

    out_BHGD: Tensor
    expected_BHGD: Tensor
    batch: StepBatch
    observations: list[Observation]
    sessions: list[Session]

    @property
    def attention(self) -> ListedSteps:
        found = self.batch.attentions[0]
        assert isinstance(found, ListedSteps)
        return found

    def listed(self, b: int, head: int) -> Tensor:
        return self.attention.selection.lists.of_row(b * HEADS + head)


def run(
    method: Method,
    kind: type[StepAttention],
    lengths: tuple[int, ...],
    placement: Placement = Placement.DEVICE,
    shape: tuple[int, int] = (3, 64),
) -> Run:
    """shape: query heads of a KV head, and channels."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    (group, head_dim), identity, size = shape, model_of(*shape), len(lengths) + 1
    if issubclass(kind, GivenSteps):
        GivenLists.lists = KeyLists.allocate(size * HEADS, 2, max(lengths), DEVICE)
    batch = StepBatch(StepPlan(identity, method, size, 512, DTYPE, torch.device(DEVICE)), [kind, kind])
    made = Run(torch.empty(0), torch.empty(0), batch, [], [])
    outs: list[Tensor] = []
    counts = torch.zeros(size, STEP_COUNTS, dtype=torch.int64)
    queries = torch.zeros(size, HEADS, group, head_dim, device=DEVICE)
    for row, length in enumerate(lengths):
        context = made_up_context(
            identity, dtype_name(DTYPE), method, length, seed=row, device=DEVICE, placement=placement
        )
        session = Session(context, method.on(context.manifest))
        layer = session.layers[1]
        assert isinstance(layer, SparseLayer)
        layer.observer = made.observations.append
        for _ in range(row + 1):
            q = (
                2.0
                * torch.randn(HEADS, 1, group, head_dim, generator=generator, device=DEVICE).to(DTYPE).float()
            )
            k, v = (
                torch.randn(HEADS, 1, head_dim, generator=generator, device=DEVICE).to(DTYPE)
                for _ in range(2)
            )
            made.observations[row:] = []
            out = layer.attend(q * head_dim**-0.5, k, v, session.position)
            session.position += 1
        session.position -= 1
        batch.place(row, session)
        for field, value in step_counts(session).items():
            counts[row, field - records.STEP_FIELDS[0]] = value
        queries[row] = q[:, 0]
        outs.append(out[:, 0])
        made.sessions.append(session)
    batch.send()
    batch.refresh(counts.to(DEVICE))
    if issubclass(kind, GivenSteps):
        fill(GivenLists.lists, made.observations)
    made.out_BHGD = batch.attentions[0].attend(1, queries.to(DTYPE), batch._records_LBF[1]).float()
    made.expected_BHGD = torch.stack(outs)
    return made


def fill(lists: KeyLists, observations: list[Observation]) -> None:
    """With what sessions' layers have selected, in two segments."""
    lists.counts_RP.zero_()
    for b, observed in enumerate(observations):
        for head in range(HEADS):
            count = int(observed.selection.counts_HT[head, 0])
            ids, row = observed.selection.ids_HTK[head, 0, :count], b * HEADS + head
            lists.counts_RP[row, 0], lists.counts_RP[row, 1] = count // 3, count - count // 3
            lists.ids_RPW[row, 0, : count // 3] = ids[: count // 3]
            lists.ids_RPW[row, 1, : count - count // 3] = ids[count // 3 :]
