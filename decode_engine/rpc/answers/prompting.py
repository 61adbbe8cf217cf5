"""Prompts of orders as token ids, and what is checked of them: by the door, which has the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from decode_engine.errors import PromptTooLongError
from decode_engine.orders.order import Order
from decode_engine.rpc.prompts.stored_messages import StoredMessages
from decode_engine.rpc.prompts.turn_tokens import conversation_tokens, turn_tokens
from decode_engine.settings.request_bounds import MAX_PROMPT_LOGPROBS
from index_store.errors import InvalidArgumentError
from index_store.models.tokenizer import Tokenizer
from index_store.store.description.context_id import ModelIdentity


def whole_tokens(
    order: Order, tokenizer: Tokenizer, identity: ModelIdentity, check: Callable[[], None]
) -> list[int]:
    """All tokens of an order that names no context, as a document of them has them.

    check: called now and then while a long text is cut; what it raises ends that. Raises PromptTooLongError, before it
    has cost more than the model's positions are worth, for what they do not hold, and InvalidArgumentError.
    """
    if order.text is not None:
        check_document(tokenizer.at_least(order.text, identity.max_positions, check), identity)
        return [*tokenizer.prefix_ids, *tokenizer.encode(order.text)]
    if order.prompt:
        check_document(len(order.prompt), identity)
        check_tokens("token_ids", order.prompt, identity)
        return list(order.prompt)
    said = "\n".join(turn.content for turn in order.turns)
    check_document(tokenizer.at_least(said, identity.max_positions, check), identity)
    return conversation_tokens(order.turns, order.tools, tokenizer)


def prompt_tokens(
    order: Order,
    tokenizer: Tokenizer,
    identity: ModelIdentity,
    stored: StoredMessages,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """The tokens behind a stored context. check, raises: as `whole_tokens`; for turns that cannot follow it, too."""
    text = "".join(turn.content for turn in order.turns) if order.text is None else order.text
    context = stored.manifest.token_count
    room = identity.max_positions - context
    least = len(order.prompt) or tokenizer.at_least(text, room, check)
    if least > room:
        raise PromptTooLongError(
            f"the prompt has at least {least} tokens, and after the context's {context} there is room for "
            f"{max(room, 0)} of the {identity.max_positions} positions of model {identity.name!r}; shorten the prompt",
            context_tokens=context,
            prompt_tokens=least,
            max_positions=identity.max_positions,
        )
    if order.turns:
        return turn_tokens(order.turns, order.tools, tokenizer, stored)
    return list(order.prompt) if order.text is None else tokenizer.encode_behind(order.text)


def check_document(least: int, identity: ModelIdentity) -> None:
    """Raises PromptTooLongError for what has at least so many tokens, where the model has no positions for them."""
    if least > identity.max_positions:
        raise PromptTooLongError(
            f"the text has at least {least} tokens, model {identity.name!r} has {identity.max_positions} positions; "
            "shorten it",
            prompt_tokens=least,
            max_positions=identity.max_positions,
        )


def check_prompt(order: Order, ids: Sequence[int], identity: ModelIdentity) -> None:
    """Raises InvalidArgumentError where a prompt has no tokens, one that the model has not, or too many to tell log
    probabilities of."""
    if not ids:
        raise InvalidArgumentError("the prompt has no tokens, expected at least one", field="prompt")
    check_tokens("token_ids", ids, identity)
    if order.prompt_logprobs and len(ids) > MAX_PROMPT_LOGPROBS:
        raise InvalidArgumentError(
            f"prompt_logprobs are wanted of {len(ids)} tokens, expected a prompt of at most {MAX_PROMPT_LOGPROBS}",
            field="prompt_logprobs",
        )


def check_named_tokens(order: Order, identity: ModelIdentity) -> None:
    """Raises InvalidArgumentError where the order names tokens, apart from the prompt's, that the model has not."""
    check_tokens("logit_bias", order.sampling.logit_bias, identity)
    check_tokens("stop_token_ids", order.stop_token_ids, identity)


def check_tokens(field: str, ids: Iterable[int], identity: ModelIdentity) -> None:
    """Raises InvalidArgumentError for a token that the model has not."""
    for found in (max(ids, default=0), min(ids, default=0)):
        if 0 <= found < identity.vocab_size:
            continue
        raise InvalidArgumentError(
            f"{field} contains {found}, expected ids of 0 to {identity.vocab_size - 1}", field=field
        )
