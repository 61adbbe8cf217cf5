"""What an order means on its context: the method, and how many tokens fit."""

from __future__ import annotations

from decode_engine.errors import PromptTooLongError
from decode_engine.model.method_choice import AUTO
from decode_engine.orders.order import Order
from decode_engine.rpc.contexts.defaults import default_method
from decode_engine.settings.request_bounds import MAX_SEARCH_PERIOD
from index_store.errors import InvalidArgumentError
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.store.catalog import TunedDefault
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest

DEFAULT_MAX_TOKENS = 256
MIN_APPEND_BLOCK = 16  # every move of the window costs a search and an append, however short


def choose_method(order: Order, manifest: Manifest, tuned: TunedDefault | None = None) -> Method:
    """The method that an order means on a context: its own where the order leaves that open, or to the server.

    tuned: the default that the context was tuned to, if it was.

    Raises MethodUnsupportedError for an unknown one, for parts that do not go together, and for a budget or search
    period where nothing is cut; InvalidArgumentError for a value out of range.
    """
    name, sizes = order.method, (order.keep_ratio, order.target_mass, order.token_budget)
    if name in ("", AUTO):
        default = default_method(manifest, tuned)
        name = default.expression
        if not order.has_budget:
            sizes = (default.keep, default.mass, default.tokens)
    keep, mass, tokens = sizes
    method = get_method(name, keep, order.search_period, mass=mass, tokens=tokens)
    if method.schedule.period > MAX_SEARCH_PERIOD:
        raise InvalidArgumentError(
            f"method {name!r}: @period is {method.schedule.period}, expected 1 to {MAX_SEARCH_PERIOD}",
            field="method",
        )
    if method.append_block < MIN_APPEND_BLOCK:
        raise InvalidArgumentError(
            f"method {name!r}: @append_block is {method.append_block}, expected {MIN_APPEND_BLOCK} to "
            f"{manifest.model.max_positions}",
            field="method",
        )
    return method


def fit_max_tokens(order: Order, manifest: Manifest, identity: ModelIdentity, prompt: int) -> int:
    """How many tokens may be generated after a prompt of that many tokens: as many as are wanted, or as fit.

    Raises PromptTooLongError when the model has no positions for one, or `min_tokens`.
    """
    room = identity.max_positions - manifest.token_count - prompt
    least = max(1, order.sampling.min_tokens)
    if least > room:
        raise PromptTooLongError(
            f"context ({manifest.token_count} tokens), prompt ({prompt}) and completion ({least} at least) exceed the "
            f"{identity.max_positions} positions of model {identity.name!r}; shorten the prompt",
            context_tokens=manifest.token_count,
            prompt_tokens=prompt,
            max_tokens=least,
            max_positions=identity.max_positions,
        )
    if order.keep is not None and order.keep.prompt_only:
        return 1
    return min(order.max_tokens or max(DEFAULT_MAX_TOKENS, least), room)
