"""What a method's attention on a GPU can do: one decode step of a batch, layer by layer, kernels only; and its parts.

A step that attends to lists of keys (`listed_steps`) has a search, a place where rows are read, and a remainder. A
method's kernels bring what is their own as subclasses of these; the sequence itself is written once.

Shape legend: B rows (sessions) of a batch, H KV heads, R = B * H, G query heads per KV head, d head dim, F fields of a
record, N keys of the longest context, X programs that attend to lists.
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

from decode_engine.kernels.attention.online_softmax import Partials
from decode_engine.kernels.attention.shared_attention import Seat
from decode_engine.kernels.attention.sparse_attention import KeyLists, TakeOut
from decode_engine.kernels.device_queue import DeviceQueue
from index_store.attention.attention_state import LogitForm
from index_store.errors import MethodUnsupportedError
from index_store.memory.resident import ResidentContext
from index_store.methods.method import IndexSpec, Method
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest

if TYPE_CHECKING:
    from decode_engine.layers.session import Session


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that kernels of a decode step are compiled and buffers sized for.

    model: layers, heads and head dimension. method: as it runs over the contexts (`Method.on`), without what
    differs between requests: how much the budget keeps comes with the records. size: rows B of the batch. max_keys:
    no context is longer; a power of two. dtype: of keys, values and queries, float16 or bfloat16. forms: what
    every layer does to logits, without caps, which no kernel has; nothing where there are none. queue: what the host
    writes goes to the device by it. planes: the contexts' exact rows are in two planes (`row_planes`).
    """

    model: ModelIdentity
    method: Method
    size: int
    max_keys: int
    dtype: torch.dtype
    device: torch.device
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
    """Whether a step may be launched while the one before is in flight: the host only launches it."""

    def __init__(self, plan: StepPlan) -> None:
        """Allocates the buffers."""
        self.plan = plan
        self._none_kept_B = torch.zeros(plan.size, dtype=torch.int64, device=plan.device)

    @classmethod
    @abstractmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        """Why the method cannot run this way over such a context, as a clause; None when it can."""

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """What a layer's record says about the context's indexes (field -> value).

        Arrays that kernels need in another form than the stored one are made with `context.derived` and live as long
        as the context. The keys' and the tail's fields are written by the caller.
        """
        return {}

    @abstractmethod
    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        """Attention out [B, H, G, d] of the batch's newest tokens, in the queries' dtype.

        q_BHGD: contiguous, unscaled. records_BF: [B, RECORD_FIELDS] int64, the layer's. The tails hold the newest
        tokens' own keys and values already. Rows without any key get 0. The result may be a buffer that the next call
        overwrites. Never waits for the device.
        """

    def kept_B(self) -> Tensor:
        """Selected keys that the last step attended exactly, all layers and KV heads together: [B] int64."""
        return self._none_kept_B

    def arrange(self, seats: Sequence[Seat], steady: bool) -> None:  # noqa: B027 - most work row by row
        """Called before a step of other rows than those of the last one, on its stream: who shares a context.

        steady: what a row's attention is must not depend on the others, bit for bit (`RowGroups.arrange`).
        """


class KeySelection(ABC):
    """A search whose result is lists of keys, with kernels only. Buffers are made once and shared by all layers.

    Most launch one search for all KV heads (`select`). One that others do beside the device is asked first (`ask`), and
    waited for wave by wave (`waves`, `await_heads`).
    """

    kind: ClassVar[str] = ""
    """Of the index that is searched, and in words."""
    what: ClassVar[str] = ""

    lists: KeyLists
    """Buffers for the lists, from the beginning on."""

    waves: Sequence[range | None] = (None,)
    """KV heads whose lists come at once, one wave after the other; None for all of them."""

    def __init__(self, plan: StepPlan) -> None:
        """Allocates the buffers."""
        self.plan = plan

    @property
    def attends_alone(self) -> bool:
        """Whether `attend_all` can do a step's whole attention, where keys and values are in place and in one piece."""
        return False

    @property
    def slots(self) -> int:
        """Of those partials that `attend_too` gets, what `attend_all` fills."""
        return 0

    @classmethod
    def searched(cls, method: Method) -> IndexSpec:
        """The index that the method searches. Raises MethodUnsupportedError where it is none that this searches."""
        if method.index is None or method.index.kind != cls.kind:
            raise MethodUnsupportedError(f"method {method.name!r} searches no {cls.what}", method=method.name)
        return method.index

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        """Why the method's index or search options cannot be searched this way, as a clause; None if they can.

        The remainder is not this class's business, nor are budgets that nothing here keeps (`registry`).
        """
        if method.index is None or method.index.kind != cls.kind:
            return f"it searches no {cls.what}"
        return cls.index_refusal(method.index, method, manifest)

    @classmethod
    def index_refusal(cls, spec: IndexSpec, method: Method, manifest: Manifest) -> str | None:
        """`refusal` for an index of the kind."""
        return None

    @classmethod
    @abstractmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """What a layer's record says about the searched index (field -> value)."""

    @abstractmethod
    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        """The keys of [FIRST, END) that each KV head attends to, about KEEP of them; counts of idle rows are 0.

        q_BHGD: contiguous, unscaled. The result is `lists`, or has its shape. Never waits for the device.
        """

    def ask(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        """`select`, whose lists are there once all waves were awaited."""
        return self.select(layer, q_BHGD, records_BF)

    def await_heads(  # noqa: B027 - most launches end before the next one begins
        self, layer: int, records_BF: Tensor, heads: range | None
    ) -> None:
        """What is launched next follows the lists of a wave; waves come in their order."""

    def attend_too(self, partials: Partials) -> None:  # noqa: B027 - most only search
        """From now on the search's launches attend to the remainder, into the first slots, or leave its weights."""

    def attend_all(
        self, q_BHGD: Tensor, records_BF: Tensor, kept_RX: Tensor, sink_HG: Tensor | None
    ) -> Tensor:
        """Searches and attends to everything that a row attends to: out, as `StepAttention.attend`; for some.

        kept_RX: gets how many keys each of a row's lists has.
        """
        raise NotImplementedError(f"{type(self).__name__} only searches")

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


class RowsInPlace:
    """All rows are read where the context has them."""

    in_place: bool = True

    def __init__(self, plan: StepPlan) -> None:
        """Allocates buffers, where some are needed."""

    @classmethod
    def fields(cls, context: ResidentContext, layer: int) -> Mapping[int, int]:
        """What a layer's record says of where rows are, besides the context's own address."""
        return {}

    def locate(
        self, layer: int, records_BF: Tensor, selection: KeySelection, lists: KeyLists, joined_RN: Tensor
    ) -> Tensor | None:
        """Where listed rows lie, [R, N] int32 (`slot_fetch.fetch_rows`), once all lists are there; None in place."""
        for heads in selection.waves:
            selection.await_heads(layer, records_BF, heads)
        return None

    def found_B2(self) -> Tensor | None:
        """Rows of contexts in host memory that the last step read there, and that it found in slots on the device.

        A row is the key and the value of one token for one KV head; all searching layers together: [B, 2] int64.
        None where nothing is in host memory.
        """
        return None


class Turn(Enum):
    """When a remainder is attended to."""

    IN_SEARCH = "by the search's own launches"
    BESIDE_SEARCH = "beside the search"
    AFTER_SEARCH = "beside all that follows the search"


class StepRemainder(ABC):
    """Attention to what stands for the keys that a search does not list, with kernels only.

    splits: slots of partial attention that it fills, before those of the attention to lists. turn: when; unless the
    search's launches do it, `attend` does. take_out: what listed keys are taken out of as they are attended to.
    """

    splits: int
    turn: Turn
    take_out: TakeOut | None = None

    @abstractmethod
    def __init__(self, plan: StepPlan, selection: KeySelection, in_place: bool) -> None:
        """in_place: nothing is fetched, behind which launches of its own could hide."""

    @classmethod
    @abstractmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        """Why the method's remainder cannot be computed this way beside its search, as a clause; None if it can."""

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """What a layer's record says about what it is over, besides the searched index."""
        return {}

    def slots(self, programs: int) -> int:
        """That are filled besides those of `attend_lists`, which has so many programs."""
        return self.splits

    def join(self, partials: Partials) -> None:  # noqa: B027 - most need none
        """Has the search's launches do their part of it, if they have one."""

    @abstractmethod
    def attend(self, q_BHGD: Tensor, records_BF: Tensor, partials: Partials) -> None:
        """Fills the first slots, where the search does not. Never waits for the device."""

    def correct(  # noqa: B027 - most have nothing to correct
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

    @contextmanager
    def follow(self) -> Iterator[None]:
        """What is launched inside runs here, after all that the current stream was given before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream is given next follows what this one was given."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
