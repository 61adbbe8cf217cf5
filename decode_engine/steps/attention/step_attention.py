"""What a method's attention on a GPU can do: one decode step of a batch, layer by layer, kernels only.

Shape legend: B rows (sessions) of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from decode_engine.kernels.attention.row_groups import Seat
from decode_engine.kernels.device_queue import DeviceQueue
from decode_engine.steps.attention.turns_triton import Lane
from index_store.attention.attention_state import LogitForm
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest

if TYPE_CHECKING:
    from decode_engine.layers.session import Session


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that kernels of a decode step are compiled and buffers sized for.

    model: layers, heads and head dimension. method: as it runs over the contexts (`Method.on`), without what
    differs between requests: how much the budget keeps comes with the records. size: rows B of the batch. max_keys:
    no context is longer; a power of two. dtype: of keys, values and queries, float16 or bfloat16. lane: steps of
    different lanes run at once. forms: what every layer does to logits, without caps, which no kernel has; nothing
    where there are none. queue: what the host writes goes to the device by it. planes: the contexts' exact rows are in
    two planes (`row_planes`).
    """

    model: ModelIdentity
    method: Method
    size: int
    max_keys: int
    dtype: torch.dtype
    device: torch.device
    lane: Lane = field(default_factory=Lane)
    forms: Sequence[LogitForm] = ()
    queue: DeviceQueue = field(default_factory=DeviceQueue)
    planes: bool = False

    @property
    def row_bytes(self) -> int:
        """Of a key and its value where a context has its keys and values: of two planes the low one."""
        return self.model.head_dim * (1 if self.planes else 2 * self.dtype.itemsize)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.model.query_heads // self.model.kv_heads

    def sink_HG(self, layer: int) -> Tensor | None:
        """The layer's learnt sinks, where it has some."""
        return self.forms[layer].sink_HG if self.forms else None

    @property
    def rows(self) -> int:
        """KV heads of all rows together."""
        return self.size * self.model.kv_heads


class StepAttention(ABC):
    """Attention of one method to contexts and tails in device memory.

    Everything is found through records (`kernels.records`): addresses per layer, and counts that change from step to
    step. Buffers are made once and shared by the layers, which run one after another on one stream; so a CUDA graph
    may capture any number of calls.
    """

    flies: ClassVar[bool] = True
    """Whether a step may be launched while the one before is in flight: the host only launches it, so that `begin` and
    `end` do nothing."""

    laned: ClassVar[bool] = False
    """Whether batches are split into lanes: while rows of one are on their way, the device computes for another."""

    def __init__(self, plan: StepPlan) -> None:
        """Allocates the buffers."""
        self.plan = plan

    @classmethod
    @abstractmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        """Why the method cannot run this way over such a context, as a clause; None when it can."""

    @classmethod
    @abstractmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int, lane: int = 0) -> Mapping[int, int]:
        """What a layer's record says about the context's indexes (field -> value), in steps of a lane.

        Arrays that kernels need in another form than the stored one are made with `context.derived` and live as long
        as the context. The keys' and the tail's fields are written by the caller.
        """

    @abstractmethod
    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        """Attention out [B, H, G, d] of the batch's newest tokens, in the queries' dtype.

        q_BHGD: contiguous, unscaled. records_BF: [B, RECORD_FIELDS] int64, the layer's. The tails hold the newest
        tokens' own keys and values already. Rows without any key get 0. The result may be a buffer that the next call
        overwrites. Never waits for the device.
        """

    @abstractmethod
    def kept_B(self) -> Tensor:
        """Selected keys that the last step attended exactly, all layers and KV heads together: [B] int64."""

    def arrange(self, seats: Sequence[Seat], steady: bool) -> None:  # noqa: B027 - most work row by row
        """Called before a step of other rows than those of the last one, on its stream: who shares a context.

        steady: what a row's attention is must not depend on the others, bit for bit (`RowGroups.arrange`).
        """

    def begin(self, sessions: Mapping[int, Session]) -> int:
        """Makes ready for a step of these sessions, by row, before it is launched: what their records get as STEP.

        When it raises, there is nothing to end.
        """
        return 0

    def end(self) -> int:
        """Ends the step when the device is done with it, or will not come to it any more.

        Returns the nanoseconds in which the device waited for the host. Raises SparseKVError when what it has computed
        must not be used.
        """
        return 0

    def fetched_B2(self) -> Tensor | None:
        """Rows of contexts in host memory that the last step read there, and that it found in slots on the device.

        A row is the key and the value of one token for one KV head; all searching layers together: [B, 2] int64.
        None where nothing is in host memory.
        """
        return None
