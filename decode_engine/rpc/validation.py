"""What requests may contain: every check of a client's input, with its bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_engine.config import MAX_MAX_TOKENS, MAX_SEARCH_PERIOD
from decode_engine.engine.sampler import SamplingParameters
from decode_engine.engine.text import StopStrings
from decode_engine.errors import PromptTooLongError
from decode_engine.rpc.defaults import default_method
from decode_engine.rpc.describe import COLLECTION
from index_store.errors import InvalidArgumentError
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.loading import Tokenizer
from index_store.store.context_id import ModelIdentity, is_context_id
from index_store.store.manifest import Manifest
from index_store.store.tuned_defaults import TunedDefault
from sparsekv.v1 import generation_pb2

DEFAULT_MAX_TOKENS = 256
MAX_METHOD_CHARACTERS = 128
MIN_APPEND_BLOCK = 16  # every move of the window costs a search and an append, however short


@dataclass(frozen=True, slots=True)
class Order:
    """A checked Generate request. None: as is usual (max_tokens: as many as fit). method "": the context's own."""

    context_id: str
    text: str | None
    question: str | None
    token_ids: Sequence[int]
    max_tokens: int | None
    sampling: SamplingParameters
    stops: tuple[str, ...]
    method: str
    keep_ratio: float | None
    target_mass: float | None
    token_budget: int | None
    search_period: int | None

    @property
    def has_budget(self) -> bool:
        """Whether the request says how much is kept."""
        return any(size is not None for size in (self.keep_ratio, self.target_mass, self.token_budget))


def parse_name(name: str, field: str = "name") -> str:
    """The id in a resource name. Raises InvalidArgumentError unless it is `contexts/` and a context id, in any case."""
    id_ = name.removeprefix(COLLECTION).lower()
    if not name.startswith(COLLECTION) or not is_context_id(id_):
        raise InvalidArgumentError(
            f"{field} is {name[:100]!r}, expected {COLLECTION} and 64 hexadecimal digits",
            field=field,
        )
    return id_


def parse_order(request: generation_pb2.GenerateRequest) -> Order:
    """Checks all that can be checked without the context. Raises InvalidArgumentError and names the field."""
    given = request.WhichOneof("prompt")
    if given is None:
        raise InvalidArgumentError(
            "the prompt is missing, expected one of text, token_ids, question", field="prompt"
        )
    content = request.token_ids.ids if given == "token_ids" else getattr(request, given)
    if not content:
        raise InvalidArgumentError(f"{given} is empty, expected at least one token", field=given)
    if given == "question" and not request.question.strip():
        raise InvalidArgumentError("the question is blank, expected words", field=given)
    if not 0 <= request.max_tokens <= MAX_MAX_TOKENS:
        raise InvalidArgumentError(
            f"max_tokens is {request.max_tokens}, expected 1 to {MAX_MAX_TOKENS}, or 0 for the default",
            field="max_tokens",
        )
    if len(request.method) > MAX_METHOD_CHARACTERS:
        raise InvalidArgumentError(
            f"method has {len(request.method)} characters, expected at most {MAX_METHOD_CHARACTERS}",
            field="method",
        )
    budget = request.WhichOneof("budget")
    if budget is not None:
        _check_budget(budget, getattr(request, budget))
    if not 0 <= request.search_period <= MAX_SEARCH_PERIOD:
        raise InvalidArgumentError(
            f"search_period is {request.search_period}, expected 1 to {MAX_SEARCH_PERIOD}, or 0 for the default",
            field="search_period",
        )
    StopStrings(request.stop)  # raises for too many or too long ones
    return Order(
        context_id=parse_name(request.context, "context"),
        text=request.text if given == "text" else None,
        question=request.question if given == "question" else None,
        token_ids=request.token_ids.ids,  # not copied: there may be millions, which the model has no positions for
        max_tokens=request.max_tokens or None,
        sampling=SamplingParameters(
            temperature=request.temperature,
            top_p=request.top_p if request.HasField("top_p") else 1.0,
            top_k=request.top_k,
            seed=request.seed if request.HasField("seed") else None,
        ),
        stops=tuple(request.stop),
        method=request.method,
        keep_ratio=request.keep_ratio if budget == "keep_ratio" else None,
        target_mass=request.target_mass if budget == "target_mass" else None,
        token_budget=request.token_budget if budget == "token_budget" else None,
        search_period=request.search_period or None,
    )


def _check_budget(field: str, size: float) -> None:
    if field == "token_budget":
        if size < 1:
            raise InvalidArgumentError(f"{field} is {size}, expected at least 1", field=field)
    elif not 0.0 < size <= 1.0:  # NaN included
        raise InvalidArgumentError(
            f"{field} is {size:g}, expected a number above 0 and at most 1", field=field
        )


def choose_method(order: Order, manifest: Manifest, tuned: TunedDefault | None = None) -> Method:
    """The method that an order means on a context. tuned: the default that the context was tuned to, if it was.

    Raises MethodUnsupportedError for an unknown one, for parts that do not go together, and for a budget or search
    period where nothing is cut; InvalidArgumentError for a value out of range.
    """
    name, sizes = order.method, (order.keep_ratio, order.target_mass, order.token_budget)
    if not name:
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


def prompt_tokens(
    order: Order,
    tokenizer: Tokenizer,
    manifest: Manifest,
    identity: ModelIdentity,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """The prompt in tokens. check: called now and then while a long text is cut; what it raises ends that.

    Raises InvalidArgumentError when there are none, or one is outside the vocabulary, and PromptTooLongError, before
    it has cost more than the model's positions are worth, for what they do not hold in any case.
    """
    room = identity.max_positions - manifest.token_count
    text = order.text if order.question is None else order.question
    least = len(order.token_ids) if text is None else tokenizer.at_least(text, room, check)
    if least > room:
        raise PromptTooLongError(
            f"the prompt has at least {least} tokens, and after the context's {manifest.token_count} there is room for "
            f"{max(room, 0)} of the {identity.max_positions} positions of model {identity.name!r}; shorten the prompt",
            context_tokens=manifest.token_count,
            prompt_tokens=least,
            max_positions=identity.max_positions,
        )
    if text is None:
        ids = list(order.token_ids)
    else:
        ids = tokenizer.encode(text if order.question is None else tokenizer.format_question(text))
    if not ids:
        raise InvalidArgumentError("the prompt has no tokens, expected at least one", field="prompt")
    if max(ids) >= identity.vocab_size:
        raise InvalidArgumentError(
            f"token_ids contains {max(ids)}, expected ids of 0 to {identity.vocab_size - 1}",
            field="token_ids",
        )
    return ids


def fit_max_tokens(order: Order, manifest: Manifest, identity: ModelIdentity, prompt: int) -> int:
    """How many tokens may be generated after a prompt of that many tokens.

    Raises PromptTooLongError when the model has no positions for them.
    """
    room = identity.max_positions - manifest.token_count - prompt
    wanted = order.max_tokens or 1
    if wanted > room:
        raise PromptTooLongError(
            f"context ({manifest.token_count} tokens), prompt ({prompt}) and completion ({wanted}) exceed the "
            f"{identity.max_positions} positions of model {identity.name!r}; shorten the prompt or lower max_tokens",
            context_tokens=manifest.token_count,
            prompt_tokens=prompt,
            max_tokens=wanted,
            max_positions=identity.max_positions,
        )
    return order.max_tokens or min(DEFAULT_MAX_TOKENS, room)
