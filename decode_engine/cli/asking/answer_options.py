"""Options that say how answers are made: method, budget, sampling, ends, and what they have to be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from decode_engine.rpc.client import GenerateOptions
from decode_engine.rpc.door.options import ServerConfig
from decode_engine.settings.request_bounds import (
    LONGEST_WAIT_S,
    MAX_ANSWERS,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_INT32,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEARCH_PERIOD,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)
from index_store.cli.checks import AtLeast, Characters, Filled, InputFile, MoreThan
from index_store.cli.options import check_bounds
from index_store.errors import InvalidArgumentError, SparseKVError

_FLAGS = {
    "keep_ratio": "--keep",
    "target_mass": "--mass",
    "token_budget": "--tokens-kept",
    "search_period": "--period",
    "max_tokens": "--max-tokens",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "method is": "--method is",
    "n is": "--n is",
    "top_logprobs": "--logprobs",
    "prompt_logprobs": "--prompt-logprobs",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "repetition_penalty": "--repetition-penalty",
    "logit_bias": "--logit-bias",
    "stop_token_ids": "--stop-token",
    "min_tokens": "--min-tokens",
    "json_schema": "--json-schema",
    "regex": "--regex",
    "choices": "--choice",
}
"""What people write for fields that the server's errors name."""

_FIELDS = re.compile("|".join(rf"(?<!-)\b{field}\b" for field in _FLAGS))


_BIAS = re.compile(r"(\d{1,10})=([+-]?\d{1,3}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConfig(ServerConfig):
    """How answers are made. What is None is left to the server; at most one of keep, mass and tokens_kept is given, and
    at most one of json_schema, regex and choice.
    """

    method: Annotated[
        str | None,
        Option(
            "--method",  # some versions of typer would call it as the metavar is written
            metavar="METHOD",
            help="Method, as PRESET[+REMAINDER][@OPTION], for example 'pq', 'oracle+centred' or 'pq@period=4'. auto: "
            "full attention or the context's own, whichever takes less time; by default what the server is set to.",
        ),
        Filled(),
    ] = None
    keep: Annotated[
        float | None, Option("--keep", help="Fraction of the keys to keep, for example 0.02."), MoreThan(0, 1)
    ] = None
    mass: Annotated[
        float | None,
        Option("--mass", help="Share of the attention weight that the kept keys hold, for example 0.99."),
        MoreThan(0, 1),
    ] = None
    tokens_kept: Annotated[
        int | None,
        Option("--tokens-kept", help="Number of keys to keep, whatever the context's length."),
        AtLeast(1, MAX_INT32),
    ] = None
    period: Annotated[
        int,
        Option("--period", help="Decode steps that one search serves; 0 means what the method says, else 1."),
        AtLeast(0, MAX_SEARCH_PERIOD),
    ] = 0
    max_tokens: Annotated[
        int | None,
        Option(help="Most tokens to generate; 256 by default."),
        AtLeast(1, MAX_INT32),
    ] = None
    temperature: Annotated[
        float, Option(help="0 takes the likeliest token."), AtLeast(0, MAX_TEMPERATURE)
    ] = 0.0
    top_p: Annotated[float | None, Option(help="Sample from this much probability."), MoreThan(0, 1)] = None
    top_k: Annotated[
        int, Option(help="Sample from this many tokens; 0 means all."), AtLeast(0, MAX_INT32)
    ] = 0
    seed: Annotated[int | None, Option(help="Same seed, same answer."), AtLeast(0, MAX_SEED)] = None
    stop: Annotated[
        tuple[str, ...] | None,
        Option(
            "--stop",
            help="End where this text would appear; repeatable. A question ends at a line break, unless it says what "
            "its answer has to be.",
        ),
        Characters(1, MAX_STOP_LENGTH),
    ] = None
    timeout: Annotated[
        float | None, Option(help="Seconds to wait for the whole answer."), MoreThan(0, LONGEST_WAIT_S)
    ] = None
    n: Annotated[
        int,
        Option("--n", help="Answers to generate, each by a seed of its own."),
        AtLeast(1, MAX_ANSWERS),
    ] = 1
    logprobs: Annotated[
        int | None,
        Option("--logprobs", help="Tell the log probability of every token, and so many likeliest ones."),
        AtLeast(0, MAX_TOP_LOGPROBS),
    ] = None
    prompt_logprobs: Annotated[
        bool, Option("--prompt-logprobs", help="Tell them of the prompt's tokens, too.")
    ] = False
    presence_penalty: Annotated[
        float,
        Option(help="Taken from logits of tokens that the answer contains."),
        AtLeast(-MAX_PENALTY, MAX_PENALTY),
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option(help="The same, once for every time that it does."), AtLeast(-MAX_PENALTY, MAX_PENALTY)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(help="Divides logits of tokens that question or answer contain; 1 changes nothing."),
        AtLeast(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    ] = 1.0
    logit_bias: Annotated[
        tuple[str, ...],
        Option("--logit-bias", metavar="TOKEN=BIAS", help="Added to a token's logit; repeatable."),
    ] = ()
    stop_token: Annotated[
        tuple[int, ...],
        Option("--stop-token", help="End with this token; repeatable."),
        AtLeast(0, 2**32 - 1),
    ] = ()
    min_tokens: Annotated[
        int, Option(help="Tokens before which nothing ends the answer."), AtLeast(0, MAX_INT32)
    ] = 0
    json_schema: Annotated[
        Path | None,
        Option("--json-schema", help="The answer has to be JSON that the schema in this file describes."),
        InputFile(),
    ] = None
    regex: Annotated[
        str | None,
        Option("--regex", help="The answer has to match this regular expression as a whole."),
        Filled(),
    ] = None
    choice: Annotated[
        tuple[str, ...], Option("--choice", help="The answer has to be one of these texts; repeatable.")
    ] = ()

    def __post_init__(self) -> None:
        check_bounds(self)
        budgets = {"--keep": self.keep, "--mass": self.mass, "--tokens-kept": self.tokens_kept}
        kinds = {"--json-schema": self.json_schema, "--regex": self.regex, "--choice": self.choice or None}
        for group in (budgets, kinds):
            given = [flag for flag, value in group.items() if value is not None]
            if len(given) > 1:
                raise InvalidArgumentError(
                    f"{' and '.join(given)} are given, expected at most one of {', '.join(group)}"
                )
        for flag, values, most in (
            ("--stop", self.stop or (), MAX_STOP_STRINGS),
            ("--stop-token", self.stop_token, MAX_STOP_TOKENS),
            ("--logit-bias", self.logit_bias, MAX_BIASED_TOKENS),
            ("--choice", self.choice, MAX_CHOICES),
        ):
            if len(values) > most:
                raise InvalidArgumentError(f"{flag} is given {len(values)} times, expected at most {most}")
        self.biases()

    @property
    def constrained(self) -> bool:
        """Whether it is said what answers have to be."""
        return self.json_schema is not None or self.regex is not None or bool(self.choice)

    def biases(self) -> dict[int, float]:
        """By token. Raises InvalidArgumentError for what is none."""
        found: dict[int, float] = {}
        for text in self.logit_bias:
            match = _BIAS.fullmatch(text)
            if match is None or abs(float(match[2])) > MAX_LOGIT_BIAS:
                raise InvalidArgumentError(
                    f"--logit-bias is {text[:100]!r}, expected TOKEN=BIAS with a token's id and a bias of "
                    f"-{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, for example 42=-100"
                )
            found[int(match[1])] = float(match[2])
        return found

    def generate_options(self, text: str, *, raw: bool) -> GenerateOptions:
        """The request of a question, or with `raw` of a text that continues the context word for word."""
        usual = () if raw or self.constrained else ("\n",)
        options = GenerateOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=usual if self.stop is None else self.stop,
            method=self.method,
            keep_ratio=self.keep,
            target_mass=self.mass,
            token_budget=self.tokens_kept,
            search_period=self.period,
            n=self.n,
            top_logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.biases(),
            stop_token_ids=self.stop_token,
            min_tokens=self.min_tokens,
            json_schema=None if self.json_schema is None else read_utf8(self.json_schema),
            regex=self.regex,
            choices=self.choice or None,
        )
        options["text" if raw else "question"] = text
        return options


def read_utf8(path: Path) -> str:
    """A file's text. Raises InvalidArgumentError where it is none."""
    return decoded(path.read_bytes(), str(path))


def decoded(data: bytes, name: str) -> str:
    """Bytes as text. Raises InvalidArgumentError, with the name of where they come from, where they are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{name} is not UTF-8 text: byte {error.start} cannot be decoded"
        ) from error


@contextmanager
def in_flags() -> Iterator[None]:
    """Lets errors of the server speak of flags where they name fields."""
    try:
        yield
    except SparseKVError as error:
        error.message = as_flags(error.message)
        raise


def as_flags(message: str) -> str:
    """A message of the server with flags for the fields that it names."""
    return _FIELDS.sub(lambda field: _FLAGS[field[0]], message)
