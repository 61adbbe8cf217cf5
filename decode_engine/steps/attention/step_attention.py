"""What a method's attention on a GPU can do: one decode step of a batch, layer by layer, kernels only.

Shape legend: B rows (sessions) of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from decode_engine.host_search.turns_triton import Lane
from decode_engine.host_search.workers import SearchThreads
from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.attention.partials import Partials
from decode_engine.kernels.attention.row_groups import Seat
from decode_engine.kernels.attention.sparse_attention import TakeOut
from decode_engine.kernels.device_queue import DeviceQueue
from index_store.attention.logit_form import LogitForm
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
    no context is longer; a power of two. dtype: of keys, values and queries, float16 or bfloat16. searching: threads of
    the host that search for this batch, where it is searched there. lane: steps of different lanes run at once. forms:
    what every layer does to logits, without caps, which no kernel has; nothing where there are none. queue: what the
    host writes goes to the device by it. planes: the contexts' exact rows are in two planes (`row_planes`).
    """

    model: ModelIdentity
    method: Method
    size: int
    max_keys: int
    dtype: torch.dtype
    device: torch.device
    searching: SearchThreads | None = None
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

    def __init__(self, plan: StepPlan) -> None:
        """Allocates the buffers."""
        self.plan = plan

    @classmethod
    @abstractmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        """Why the method cannot run this way over such a context, as a clause; None when it can."""

    @classmethod
    @abstractmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """What a layer's record says about the context's indexes (field -> value).

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

    def own_fields(self, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """What besides `fields` a layer's record says, and depends on the plan."""
        return {}

    def fetched_B2(self) -> Tensor | None:
        """Rows of contexts in host memory that the last step read there, and that it found in slots on the device.

        A row is the key and the value of one token for one KV head; all searching layers together: [B, 2] int64.
        None where nothing is in host memory.
        """
        return None


class KeySelection(ABC):
    """A search whose result is lists of keys, with kernels only. Buffers are made once and shared by all layers."""

    lists: KeyLists
    """Buffers for the lists, from the beginning on."""

    def __init__(self, plan: StepPlan) -> None:
        """Allocates the buffers."""
        self.plan = plan

    @classmethod
    @abstractmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        """Why the method's index or search options cannot be searched this way, as a clause; None if they can.

        The remainder is not this class's business, nor are budgets that nothing here keeps (`registry`).
        """

    @classmethod
    @abstractmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """What a layer's record says about the searched index (field -> value)."""

    @abstractmethod
    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        """The keys of [FIRST, END) that each KV head attends to, about KEEP of them; counts of idle rows are 0.

        q_BHGD: contiguous, unscaled. The result is `lists`, or has its shape. Never waits for the device.
        """


class Turn(Enum):
    """When a remainder is attended to."""

    IN_SEARCH = "by the search's own launches"
    BESIDE_SEARCH = "beside the search"
    AFTER_SEARCH = "beside all that follows the search"


class StepRemainder:
    """Attention to what stands for the keys that a search does not list, with kernels only.

    splits: slots of partial attention that it fills, before those of the attention to lists. turn: when; unless the
    search's launches do it, `attend` does. take_out: what listed keys are taken out of as they are attended to.
    """

    splits: int
    turn: Turn
    take_out: TakeOut | None = None

    def slots(self, programs: int) -> int:
        """That are filled besides those of `attend_lists`, which has so many programs."""
        return self.splits

    def attend(self, q_BHGD: Tensor, records_BF: Tensor, partials: Partials) -> None:
        """Fills the first slots, where the search does not. Never waits for the device."""

    def correct(
        self,
        q_BHGD: Tensor,
        records_BF: Tensor,
        lists: KeyLists,
        joined_RN: Tensor,
        partials: Partials,
        locations_RN: Tensor | None,
    ) -> None:
        """Fills slots behind those of `attend_lists`, after it: its arguments."""


class SideStream:
    """A stream for launches beside those of the current one. Without streams, as on a CPU, all run in place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def beside(self) -> bool:
        """Whether launches here run beside those of the current stream.

        Torch hands out few streams, one after another: this one may be the current one.
        """
        current = None if self._stream is None else torch.cuda.current_stream(self._device)
        return (
            current is not None
            and self._stream is not None
            and current.cuda_stream != self._stream.cuda_stream
        )

    @contextmanager
    def follow(self) -> Iterator[None]:
        """What is launched inside runs here, after all that the current stream was given before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """What this stream has been given until now."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: torch.cuda.Event | None = None) -> None:
        """What the current stream is given next follows what this one was given, or what it was until the mark."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        if mark is None:
            current.wait_stream(self._stream)
        else:
            current.wait_event(mark)
