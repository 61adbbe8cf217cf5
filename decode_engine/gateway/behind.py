"""What answers behind the gateway: the one place that knows how it is reached.

Today a server over gRPC, by the client of this package. `Behind` is all that answers ask of it, so that a door in the
engine's own process takes its place by another class with the same methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from msgspec.structs import replace

from decode_engine.orders.fields import FIELDS, Sampling
from decode_engine.orders.order import Order
from decode_engine.rpc.client import AsyncClient, AsyncGeneration, GenerateOptions, Keep, ServerStatus


@dataclass(slots=True)
class _Known:
    """What a server has told, and how often it has: what never changes is asked once."""

    status: ServerStatus | None = None


class Behind:
    """The server as one caller sees it. What it raises are the errors of the service."""

    def __init__(self, client: AsyncClient, known: _Known | None = None) -> None:
        self.client = client
        """For what is not an answer: contexts, operations, tokens, health."""
        self._known = known or _Known()

    def showing(self, metadata: Sequence[tuple[str, str]]) -> Behind:
        """The same for another caller."""
        return Behind(self.client.showing(tuple(metadata)), self._known)

    async def facts(self) -> ServerStatus:
        """The model's name and what its template reads, as they were told first; another server may be there by now."""
        if self._known.status is None:
            self._known.status = await self.client.server_status()
        return self._known.status

    async def facts_anew(self) -> ServerStatus:
        """The same as it is now: asked before anybody is told that a name is wrong."""
        self._known.status = None
        return await self.facts()

    async def find(self, order: Order) -> tuple[Order, str]:
        """The order with its context's id, and the name of the context's model. Raises ContextNotFoundError."""
        context = await self.client.find_context(order.context)
        return replace(order, context=context.name.removeprefix("contexts/")), context.model

    def answer(self, order: Order) -> AsyncGeneration:
        """Begins to answer. order: with a context's id. Pieces come in order; leaving it ends the work."""
        return self.client.generate(f"contexts/{order.context}" if order.context else "", **_options(order))


def _options(order: Order) -> GenerateOptions:
    """An order as the client takes it."""
    options: dict[str, Any] = {
        "text": order.text,
        "messages": order.turns or None,
        "token_ids": order.prompt if order.text is None and not order.turns else None,
        "tools": order.tools or None,
        "tool_choice": order.choice.mode if order.tools or order.choice.mode != "none" else None,
        "tool_name": order.choice.name or None,
        "single_call": order.choice.single or None,
    }
    for field in FIELDS:
        holder: Any = order.sampling if field.name in Sampling.__struct_fields__ else order
        options[field.name] = getattr(holder, field.member or field.name, None)
    if order.constraint is not None:
        options[order.constraint.kind] = order.constraint.said
    if (keep := order.keep) is not None:
        ttl = None if keep.ttl_s is None else timedelta(seconds=keep.ttl_s)
        options["keep"] = Keep(keep.name, ttl, keep.prompt_only, keep.moves)
    return cast("GenerateOptions", options)
