"""The engine as doors see it: the same in their own process and behind a socket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from decode_engine.orders.events import Event
from decode_engine.orders.order import Order
from index_store.store.description.context_id import ModelIdentity


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
    """Under the names of the API's ServerStatus: of the engine, of kept beginnings, and of contexts in memory; and what
    `auto` timed and chose, in lines for people to read."""

    engine: Mapping[str, int | None]
    beginnings: Mapping[str, int]
    arena: Mapping[str, int]
    choices: Sequence[str]


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

    async def changed(self, context: str) -> None:
        """A context's manifest was changed in the store, or it was deleted: what is in memory follows."""
