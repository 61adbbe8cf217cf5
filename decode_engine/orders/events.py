"""What the engine says of a request: `Waits` now and then, `Begins`, `Says` for its answers, `Ends` for each of them.

`Fails` ends the whole request. Structs are arrays on the wire: a step sends one message with the events of all
requests. `Core` is the engine as doors see it: the same in their own process and behind a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from decode_engine.errors import InternalError, error_by_reason
from decode_engine.orders.order import Order
from index_store.errors import SparseKVError
from index_store.family.parents import Missed
from index_store.store.description.context_id import ModelIdentity
from sparsekv.v1.values import TenantUse

Cause = Literal["", "context", "method", "session"]
Lookup = Literal["named", "found", "none"]
Tier = Literal["", "device", "host", "disk", "objects"]
FinishReason = Literal["stop", "length", "end_of_sequence"]


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token's natural log probability, and the likeliest tokens in its place with theirs, the likeliest first."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


class Waits(Struct, frozen=True, array_like=True, tag="w"):
    """The request waits: for its context's memory, for its method to be prepared, or for a session behind `ahead`
    others; or, with no cause, it waits no longer, and its prompt is read. Said at every change."""

    cause: Cause
    ahead: int = 0


class Begins(Struct, frozen=True, array_like=True, tag="b"):
    """What the request means on its context; said before anything else, and again where that context went before it was
    in use.

    context: id of what was continued, "" where nothing was. cached: tokens that are not read. prompt: those that are.
    max_tokens: that may be generated. budget, remainder: the method's, "" where it has none. reason: why it is this
    method, where the server chose it. lookup: how the context was found. missed: why no longer one was, of a request
    that names none. tier: where the context lay when the request came; "disk" also while it is being loaded.
    """

    context: str
    method: str
    cached: int
    prompt: int
    max_tokens: int
    budget: str = ""
    remainder: str = ""
    reason: str = ""
    lookup: Lookup = "named"
    missed: Missed | None = None
    tier: Tier = ""


class PromptRead(Struct, frozen=True, array_like=True, tag="p"):
    """The prompt was read, and log probabilities of its tokens but the first one are wanted."""

    logprobs: Sequence[TokenLogprob]


class Says(Struct, frozen=True, array_like=True, tag="s"):
    """Tokens of an answer. logprobs: one for each, where they are wanted.

    last: nothing follows by itself, of a request that is kept and has stop strings: only the door knows whether one of
    them was completed, and the engine waits for it to say how many tokens the answer has (`Handle.stop`).
    """

    answer: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()
    last: bool = False


class LayersLooked(Struct, frozen=True, array_like=True):
    """Where layers first..last that search looked: positions of the context, the most looked at first, and the share of
    these layers' attention to all keys that they attend to exactly that went there, a mean over their heads."""

    first: int
    last: int
    positions: Sequence[int]
    weights: Sequence[float]


class Looks(Struct, frozen=True, array_like=True, tag="l"):
    """Where in its context a token of an answer was looked for; said before it. token: its place in the answer."""

    answer: int
    token: int
    layers: Sequence[LayersLooked]


class Times(Struct, frozen=True, array_like=True):
    """Wall-clock times of a request in nanoseconds, from its arrival at the engine; `decode_ns` sums its decode steps.

    load_ns: until its context was in memory, or the request began to run behind the loading. queue_ns: from then on
    until its admission.
    """

    load_ns: int
    queue_ns: int
    prompt_ns: int
    first_token_ns: int
    total_ns: int
    decode_steps: int
    decode_ns: int

    @property
    def after_prompt_ns(self) -> int:
        """From the end of the prompt until that of the answer, turns of others among it."""
        return max(self.total_ns - self.load_ns - self.queue_ns - self.prompt_ns, 0)


class Ends(Struct, frozen=True, array_like=True, tag="e"):
    """The end of an answer. figures: the session's `Figures` by name. kept: id of what the session was kept as.
    written: tokens that were stored with it, which were not stored before.

    reason: the engine's own; a door that has found a stop string knows better, should the answer have ended meanwhile.
    """

    answer: int
    reason: FinishReason
    completion_tokens: int
    seed: int
    times: Times
    figures: Mapping[str, int]
    kept: str = ""
    written: int = 0


class Fails(Struct, frozen=True, array_like=True, tag="f"):
    """The request has ended, with all of its answers, by an error of this reason (`errors_by_reason`)."""

    reason: str
    message: str
    metadata: Mapping[str, str]
    retry_after_s: float | None = None


Event = Waits | Begins | PromptRead | Looks | Says | Ends | Fails


def event_of_error(error: Exception) -> Fails:
    """An error as an event; one that is not ours as INTERNAL, whose message doors log and show no client."""
    if not isinstance(error, SparseKVError):
        error = InternalError(f"{type(error).__name__}: {error}")
    return Fails(error.reason, error.message, error.metadata, error.retry_after_s)


def error_of_event(event: Fails) -> SparseKVError:
    """The error by which a request ended at the engine, as the class of its reason."""
    return error_by_reason(event.reason, event.message, event.metadata, event.retry_after_s)


class Handle(Protocol):
    """A request that was submitted. Its methods are harmless when it has ended, and never block."""

    def cancel(self) -> None:
        """Ends the request within a step or two, without another event."""

    def stop(self, answer: int, tokens: int) -> None:
        """Ends an answer with its first `tokens` tokens, of which the last one completed a stop string.

        What was generated behind counts nowhere, and is not kept. `Ends` follows, with the reason "stop". Harmless when
        the answer has ended, but for one that waits for this (`Says.last`).
        """


class Residency(Struct, frozen=True):
    """What of the store is in memory. ids: of contexts there. placements: by id, of those that were asked for, where
    they are or would be put: device, hybrid or host."""

    ids: Sequence[str]
    placements: Mapping[str, str]


class Warmed(Struct, frozen=True):
    """A context that was brought into memory; times in nanoseconds from the beginning of the load."""

    already_resident: bool
    load_ns: int
    first_layer_ns: int
    all_layers_ns: int


class Facts(Struct, frozen=True):
    """Of the model as it is loaded. identity: as the manifest has it. kv_dtype: of what is stored. max_sessions: at
    once. max_waiting: requests beside those. device: as logs say it."""

    identity: ModelIdentity
    kv_dtype: str
    max_sessions: int
    max_waiting: int
    device: str


class Status(Struct, frozen=True):
    """Under the names of the API's ServerStatus: of the engine, of kept beginnings, of contexts in memory and of an
    object store; and what `auto` timed and chose, in lines for people to read."""

    engine: Mapping[str, int | None]
    beginnings: Mapping[str, int]
    arena: Mapping[str, int]
    choices: Sequence[str]
    objects: Mapping[str, Any] = {}


class Tenancy(Struct, frozen=True):
    """All tenants' use. problem: why the file of quotas is not used as it is now, "" where it is."""

    tenants: Sequence[TenantUse]
    problem: str


class Core(Protocol):
    """To be used on a door's event loop. Errors are those of the engine, with reason, message and metadata."""

    async def facts(self) -> Facts:
        """What never changes while the engine lives. Raises NotReadyError with the phase while it starts."""

    def submit(self, order: Order, on_events: Callable[[Sequence[Event]], None]) -> Handle:
        """Gives the engine a request.

        on_events: called on the loop with all events of one step, in order; not again after `Fails` or the last `Ends`,
        nor after `cancel`. A refusal is a `Fails`, too; where the engine dies it is one of ENGINE_CRASHED.
        """

    async def status(self) -> Status:
        """What it does now, and did."""

    async def residency(self, bases: Sequence[str] = ()) -> Residency:
        """What is in memory now. bases: ids of contexts that continue none, whose placements are wanted."""

    async def warm(self, context: str, deadline_ns: int | None) -> Warmed:
        """Brings a context into memory. Cancelling it gives that up. Raises what loading raises."""

    async def tenancy(self) -> Tenancy:
        """What tenants use of what they may."""

    async def allow(self, tenant: str, tokens: int) -> None:
        """A context of so many tokens is to be made for a tenant, which counts. Raises QuotaExceededError."""

    async def changed(self, context: str) -> None:
        """A context's manifest was changed in the store, or it was deleted: what is in memory follows."""
