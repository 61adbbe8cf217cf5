"""The fields of a request that say how it is answered: one table for gRPC, HTTP, command lines and reference pages.

A new one is a row of `FIELDS`, and where it says how tokens are drawn a member of `Sampling`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from decode_engine.settings import request_bounds as bounds
from index_store.errors import InvalidArgumentError

_MOST_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value has to be. shown: in words. type: as msgspec reads it. holds: what types do not say."""

    shown: str
    type: Any
    holds: Callable[[Any], bool] = lambda value: True

    def fits(self, value: Any) -> bool:
        """Whether a value of JSON is one."""
        try:
            msgspec.convert(value, self.type)
        except msgspec.ValidationError:
            return False
        return self.holds(value)

    @property
    def schema(self) -> Mapping[str, Any]:
        """The same as far as JSON schema says it."""
        return {} if self.type is Any else msgspec.json.schema(self.type)


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers of least to most; with `above`, not least itself. whole: integers alone."""

    least: float
    most: float
    above: bool = False
    whole: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number is one of these; NaN is none."""
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    @property
    def words(self) -> str:
        """Of a value that is a number."""
        if self.above:
            return f"a number above {self.least:g} and at most {self.most:g}"
        return f"{self.least} to {self.most}" if self.whole else f"{self.least:g} to {self.most:g}"

    @property
    def kind(self) -> Kind:
        """Of a value that may be anything."""
        least = "exclusiveMinimum" if self.above else "minimum"
        limits = Meta(extra_json_schema={least: self.least, "maximum": self.most})
        if self.whole:
            shown = f"an integer of {self.least} to {self.most}"
        elif self.above:
            shown = f"a number above {self.least:g}, at most {self.most:g}"
        else:
            shown = f"a number of {self.least:g} to {self.most:.12g}"
        return Kind(shown, Annotated[int, limits] if self.whole else Annotated[float, limits], self.holds)


ANY = Kind("anything", Any)
TEXT = Kind("a text", str)
FLAG = Kind("true or false", bool)
OBJECT = Kind("an object", dict)
TOKENS = Kind("a list of token ids", list[Annotated[int, Meta(ge=0)]])


def shown(value: object) -> str:
    """A value as a sentence quotes it, cut where it is long."""
    if isinstance(value, list | dict) and len(value) > _MOST_SHOWN:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = json.dumps(_cut(value, 4))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _cut(value: object, depth: int) -> object:
    """The beginning of a value: to write all of a large one only to quote it would take others' time."""
    if isinstance(value, str):
        return value[:80]
    if depth == 0 and isinstance(value, list | dict):
        return "..."
    if isinstance(value, list):
        return [_cut(item, depth - 1) for item in value[:_MOST_SHOWN]]
    if isinstance(value, dict):
        return {str(name)[:80]: _cut(item, depth - 1) for name, item in islice(value.items(), _MOST_SHOWN)}
    return value


Endpoint = Literal["chat", "completions", "responses"]
MAX_METHOD_CHARACTERS = 128


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn.

    temperature: 0 takes the likeliest token. top_k: 0 keeps all tokens. top_p: 1 keeps all. seed: None draws a fresh
    one. top_logprobs: how many likeliest tokens are told beside each with its log probability; None tells none. Logits
    are changed before: presence_penalty is taken from every token of the answer so far, frequency_penalty as often as
    it came; repetition_penalty divides positive logits of all tokens of prompt and answer, and multiplies negative
    ones, where the stored context does not count; logit_bias is added, by token id; min_tokens come before an end.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = {}
    min_tokens: int = 0
    top_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn: the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def rules_logits(self) -> bool:
        """Whether logits are changed by what was said so far, or by token."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalties or self.logit_bias or self.min_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field.

    name: in protos, in errors, and for programs; member: of `Order`, where that is another. kind: what it has to be
    over HTTP. range: of numbers. zero: 0 is as good as nothing. expected: what errors say in place of the range. http:
    its names by endpoint; None: the same for all. flag: of command lines. metavar: what stands behind it. each: what
    one of several values is, where there may be several.
    """

    name: str
    says: str
    kind: Kind
    range: Range | None = None
    zero: bool = False
    expected: str = ""
    http: Mapping[Endpoint, tuple[str, ...]] | None = None
    flag: str = ""
    metavar: str | None = None
    each: type[str] | type[int] | None = None
    member: str = ""

    def names(self, endpoint: Endpoint) -> tuple[str, ...]:
        return (self.name,) if self.http is None else self.http.get(endpoint, ())

    def check(self, value: float) -> None:
        """Raises InvalidArgumentError for a number that is out of range."""
        if self.range is not None and not self.range.holds(value):
            found = f"{value:g}" if isinstance(value, float) else value
            expected = self.expected or self.range.words + (", or 0 for the default" if self.zero else "")
            raise InvalidArgumentError(f"{self.name} is {found}, expected {expected}", field=self.name)


def _number(name: str, range_: Range, says: str, **more: Any) -> Field:
    more.setdefault("flag", "--" + name.replace("_", "-"))
    return Field(name=name, says=says, kind=more.pop("kind", range_.kind), range=range_, **more)


def _integers(least: int, most: int) -> Range:
    return Range(least, most, whole=True)


_SHARE = Range(0, 1, above=True)
_PENALTY = Range(-bounds.MAX_PENALTY, bounds.MAX_PENALTY)


def _of_choices(name: str, chat: str = "") -> Mapping[Endpoint, tuple[str, ...]]:
    """What responses do not have."""
    return {"chat": (chat or name,), "completions": (name,)}


_TEXTS = Kind(
    f"a text, or a list of at most {bounds.MAX_STOP_STRINGS} texts",
    str | Annotated[list[str], Meta(max_length=bounds.MAX_STOP_STRINGS)],
)
_TEXTS_ONLY = Kind(
    f"a list of at most {bounds.MAX_CHOICES:,} texts",
    Annotated[list[str], Meta(max_length=bounds.MAX_CHOICES)],
)
_BIAS = Kind(
    f"numbers by token id, at most {bounds.MAX_BIASED_TOKENS}",
    Annotated[dict[str, float], Meta(max_length=bounds.MAX_BIASED_TOKENS)],
)
_MOST_TOKENS = Kind(
    "an integer of 1 or more; -1 for as many as fit",
    Annotated[int, Meta(extra_json_schema={"anyOf": [{"minimum": 1}, {"const": -1}]})],
    lambda value: value >= 1 or value == -1,
)

FIELDS = (
    Field(
        name="method",
        kind=TEXT,
        says="How keys are found, as PRESET[+REMAINDER][@OPTION], for example `refined` or `oracle+centred`; `auto`: "
        "full attention or the context's own, whichever takes less time; by default what the server is set to.",
        flag="--method",
        metavar="METHOD",
    ),
    _number("keep_ratio", _SHARE, "Fraction of the keys to keep, for example 0.02.", flag="--keep"),
    _number(
        "target_mass",
        _SHARE,
        "Share of the attention weight that the kept keys hold, for example 0.99.",
        flag="--mass",
    ),
    _number(
        "token_budget",
        _integers(1, bounds.MAX_INT32),
        "Number of keys to keep, whatever the context's length.",
        expected="at least 1",
        flag="--tokens-kept",
    ),
    _number(
        "search_period",
        _integers(1, bounds.MAX_SEARCH_PERIOD),
        "Decode steps that one search serves; by default what the method says, else 1.",
        zero=True,
        flag="--period",
    ),
    _number(
        "max_tokens",
        _integers(1, bounds.MAX_INT32),
        "Most tokens to generate, or as many as the model has positions for; 256 by default.",
        kind=_MOST_TOKENS,
        zero=True,
        expected="1 or more, or 0 for the default",
        http={
            "chat": ("max_completion_tokens", "max_tokens"),
            "completions": ("max_tokens",),
            "responses": ("max_output_tokens",),
        },
    ),
    _number(
        "temperature",
        Range(0, bounds.MAX_TEMPERATURE),
        "Divides the scores before sampling; 0 takes the likeliest token. By default 1 over HTTP, else 0.",
        expected=f"0 (greedy) to {bounds.MAX_TEMPERATURE:g}",
    ),
    _number("top_p", _SHARE, "Sample from the smallest set of tokens that reaches this probability."),
    _number(
        "top_k",
        _integers(0, bounds.MAX_INT32),
        "Sample from this many likeliest tokens; 0 means all.",
        expected="0 (all tokens) or more",
    ),
    _number(
        "seed",
        _integers(0, bounds.MAX_SEED),
        "The same seed gives the same tokens.",
        expected="0 to 2^64 - 1",
        http=_of_choices("seed"),
    ),
    Field(
        name="stop",
        member="stops",
        kind=_TEXTS,
        says=f"Up to {bounds.MAX_STOP_STRINGS} texts of at most {bounds.MAX_STOP_LENGTH} characters; the answer ends "
        "before one appears.",
        http=_of_choices("stop"),
        flag="--stop",
        each=str,
    ),
    _number(
        "n",
        _integers(1, bounds.MAX_ANSWERS),
        "Answers to give, each sampled by a seed of its own.",
        zero=True,
        http=_of_choices("n"),
        member="answers",
    ),
    _number(
        "frequency_penalty",
        _PENALTY,
        "Taken from tokens' scores for every time that the answer has them.",
        http=_of_choices("frequency_penalty"),
    ),
    _number(
        "presence_penalty",
        _PENALTY,
        "Taken from the scores of tokens that the answer has.",
        http=_of_choices("presence_penalty"),
    ),
    _number(
        "repetition_penalty",
        Range(bounds.MIN_REPETITION_PENALTY, bounds.MAX_REPETITION_PENALTY),
        "Divides positive scores of tokens that prompt or answer contain, multiplies negative ones; 1 changes nothing.",
        zero=True,
        expected=f"{bounds.MIN_REPETITION_PENALTY:g} to {bounds.MAX_REPETITION_PENALTY:g} (1 changes nothing)",
    ),
    Field(
        name="logit_bias",
        kind=_BIAS,
        says=f"Added to tokens' scores, by their ids: -{bounds.MAX_LOGIT_BIAS:g} to {bounds.MAX_LOGIT_BIAS:g}.",
        http=_of_choices("logit_bias"),
        flag="--logit-bias",
        each=str,
        metavar="TOKEN=BIAS",
    ),
    _number("min_tokens", _integers(0, bounds.MAX_INT32), "Tokens before which the answer does not end."),
    Field(
        name="ignore_eos",
        kind=FLAG,
        says="Go on behind the model's own end tokens, up to the most tokens, as load generators ask.",
        flag="--ignore-eos",
    ),
    Field(
        name="stop_token_ids",
        kind=TOKENS,
        says=f"Up to {bounds.MAX_STOP_TOKENS} tokens that end the answer.",
        flag="--stop-token",
        each=int,
    ),
    _number(
        "top_logprobs",
        _integers(0, bounds.MAX_TOP_LOGPROBS),
        "Tell log probabilities of the answer's tokens, and of this many likeliest ones in each place.",
        http=_of_choices("logprobs", "top_logprobs"),
        flag="--logprobs",
    ),
    Field(
        name="prompt_logprobs",
        kind=FLAG,
        says="Tell them of the prompt's tokens, too.",
        http={},
        flag="--prompt-logprobs",
    ),
    Field(
        name="explain",
        kind=FLAG,
        says="Tell which stored beginning was used, why no longer one, and what took how long.",
        flag="--explain",
    ),
    _number(
        "map_every",
        _integers(1, bounds.MAX_MAP_EVERY),
        "Tell of one in so many tokens of the answer where in the context it was looked for.",
        zero=True,
        http=_of_choices("map_every"),
        flag="",
    ),
    _number(
        "priority",
        _integers(-bounds.MAX_PRIORITY, bounds.MAX_PRIORITY),
        "Among its tenant's requests that wait, those of higher ones are first.",
        zero=True,
        expected=f"-{bounds.MAX_PRIORITY} to {bounds.MAX_PRIORITY}",
    ),
    Field(
        name="regex",
        kind=TEXT,
        says="The answer matches this regular expression as a whole (Rust's syntax).",
        flag="--regex",
        metavar="REGEX",
    ),
    Field(
        name="choices",
        kind=_TEXTS_ONLY,
        says=f"The answer is one of these texts, at most {bounds.MAX_CHOICES:,}.",
        flag="--choice",
        each=str,
    ),
)
"""All of them; `json_schema` is spelled in its own way everywhere."""

BY_NAME: Mapping[str, Field] = {field.name: field for field in FIELDS}
CONSTRAINTS = ("json_schema", "regex", "choices")
BUDGETS = ("keep_ratio", "target_mass", "token_budget")


def split(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of fields as those of `Order`: members, with `sampling` among them."""
    drawn = {name: value for name, value in values.items() if name in Sampling.__struct_fields__}
    others = {name: value for name, value in values.items() if name not in drawn}
    members = {BY_NAME[name].member or name: value for name, value in others.items()}
    return {**members, "sampling": Sampling(**drawn)}


def check_count(name: str, values: Sequence[object], most: int, what: str) -> None:
    """Raises InvalidArgumentError for more values of a field than there may be."""
    if len(values) > most:
        raise InvalidArgumentError(f"{name} has {len(values)} {what}, expected at most {most}", field=name)


def check_drawn(drawn: object) -> None:
    """Checks those fields of `Sampling` that an object has. Raises InvalidArgumentError."""
    for name in Sampling.__struct_fields__:
        value = getattr(drawn, name, None)
        if name == "logit_bias" and value:
            _check_biases(value)
        elif value is not None:
            BY_NAME[name].check(value)


def _check_biases(biases: Mapping[int, float]) -> None:
    check_count("logit_bias", [*biases], bounds.MAX_BIASED_TOKENS, "tokens")
    for token, bias in biases.items():
        if not -bounds.MAX_LOGIT_BIAS <= bias <= bounds.MAX_LOGIT_BIAS:
            raise InvalidArgumentError(
                f"logit_bias of token {token} is {bias:g}, expected -{bounds.MAX_LOGIT_BIAS:g} to "
                f"{bounds.MAX_LOGIT_BIAS:g}",
                field="logit_bias",
            )
