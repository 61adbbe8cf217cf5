"""Recorded lists in place of those that a search finds, so that a model with random weights wants a trained one's rows.

Shape legend: S steps, B sessions, H KV heads, R = B * H, L layers, X rows of the recorded model, W listed keys at most,
F fields of a record, G query heads per KV head, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_attention import KeySelection, StepPlan
from harness.steps.recorded_lists import RecordedLists


@contextmanager
def replayed(recorded: RecordedLists) -> Iterator[None]:
    """Steps that are made inside search as ever, but attend to what was recorded.

    Session b has the lists of the recorded session b, and each KV head of each layer those of one of the recorded
    rows, which take turns; they begin anew behind the last step. What a step replays follows from the length of the
    tail, so that sessions that begin with equal tails replay the same steps in any placement.
    """
    kinds = {kind: replaying(selection, recorded) for kind, selection in ListedSteps.selection_types.items()}
    with patch.object(ListedSteps, "selection_types", kinds):
        yield


def replaying(selection: type[KeySelection], recorded: RecordedLists) -> type[KeySelection]:
    """The search with other results."""

    class Replayed(selection):  # type: ignore[misc, valid-type]
        lists: KeyLists

        def __init__(self, plan: StepPlan) -> None:
            super().__init__(plan)
            self._searched = self.lists
            self.lists = KeyLists.allocate(plan.rows, 1, plan.max_keys, plan.device)
            self._ids_LSRW = rows_of_layers(recorded, plan).to(plan.device)
            self._step_1 = torch.zeros(1, dtype=torch.int64, device=plan.device)
            self._first_layer: int | None = None

        def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
            replayed_lists, self.lists = self.lists, self._searched
            super().select(layer, q_BHGD, records_BF)
            self.lists = replayed_lists
            if self._first_layer in (None, layer):
                self._first_layer = layer
                longest = records_BF[:, records.TAIL_KEYS].amax(0, keepdim=True)
                torch.remainder(longest, self._ids_LSRW.shape[1], out=self._step_1)
                # Entries of -1 do not count. Idle rows, as all are before a graph is captured, list nothing: they have
                # no addresses to read keys from.
                searching_B = records_BF[:, records.END] > records_BF[:, records.FIRST]
                counts_BH = self.lists.counts_RP.view(len(records_BF), -1)
                counts_BH.copy_(searching_B[:, None] * self._ids_LSRW.shape[3])
            ids_1RW = self._ids_LSRW[layer].index_select(0, self._step_1)
            self.lists.ids_RPW[:, 0, : ids_1RW.shape[2]].copy_(ids_1RW[0])
            return self.lists

    return Replayed


def rows_of_layers(recorded: RecordedLists, plan: StepPlan) -> Tensor:
    """What each KV head of each session lists in each layer of the plan's model, [L, S, R, W] int32."""
    ids_SBXW = torch.from_numpy(recorded.ids_SBRW)
    steps, sessions, rows, width = ids_SBXW.shape
    heads = plan.model.kv_heads
    row_LH = torch.arange(plan.model.layers * heads).view(-1, heads) % rows
    session_B = torch.arange(plan.size) % sessions
    found = [ids_SBXW[:, session_B][:, :, row_H].reshape(steps, -1, width) for row_H in row_LH]
    return torch.stack(found)
