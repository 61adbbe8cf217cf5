"""The command `ask`: a question about a stored context, its answer streamed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from decode_engine.config import (
    DEFAULT_LISTEN,
    LONGEST_WAIT_S,
    MAX_INT32,
    MAX_MAX_TOKENS,
    MAX_SEARCH_PERIOD,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    ServerOption,
)
from decode_engine.rpc.client import Client, Generation, Summary, Waiting
from index_store.cli.checks import AtLeast, Characters, Filled, InputFile, MoreThan
from index_store.cli.console import print_json
from index_store.cli.entry import INTERRUPTED
from index_store.cli.options import FormatOption, OutputFormat, check_bounds, configured
from index_store.errors import InvalidArgumentError, SparseKVError

_STANDARD_INPUT = Path("-")

_FLAGS = {
    "keep_ratio": "--keep",
    "target_mass": "--mass",
    "token_budget": "--tokens-kept",
    "search_period": "--period",
    "max_tokens": "--max-tokens",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "method is": "--method is",
}
"""What people write for fields that the server's errors name."""

_FIELDS = re.compile("|".join(rf"(?<!-)\b{field}\b" for field in _FLAGS))


@dataclass(frozen=True, slots=True)
class AskConfig:
    """`decode-engine ask`. What is None is left to the server; at most one of keep, mass and tokens_kept is given."""

    context: Annotated[
        str,
        Option("--context", help="Context: id, its first 6 or more digits, contexts/<id>, or display name."),
        Filled(),
    ]
    prompt: Annotated[
        str | None, Argument(metavar="QUESTION", help="The question; - reads it from standard input.")
    ] = None
    file: Annotated[
        Path | None,
        Option("--file", help="Read the question from this file; - is standard input."),
        InputFile(dash=True),
    ] = None
    server: ServerOption = DEFAULT_LISTEN
    raw: Annotated[
        bool, Option("--raw", help="Continue the context by the text as it is, without chat template.")
    ] = False
    method: Annotated[
        str | None,
        Option(
            "--method",  # some versions of typer would call it as the metavar is written
            metavar="METHOD",
            help="Method, as PRESET[+REMAINDER][@OPTION], for example 'pq', 'oracle+centred' or 'pq@period=4'; the "
            "context's own by default.",
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
        AtLeast(1, MAX_MAX_TOKENS),
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
            "--stop", help="End where this text would appear; repeatable. A question ends at a line break."
        ),
        Characters(1, MAX_STOP_LENGTH),
    ] = None
    timeout: Annotated[
        float | None, Option(help="Seconds to wait for the whole answer."), MoreThan(0, LONGEST_WAIT_S)
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)
        sizes = {"--keep": self.keep, "--mass": self.mass, "--tokens-kept": self.tokens_kept}
        given = [flag for flag, size in sizes.items() if size is not None]
        if len(given) > 1:
            raise InvalidArgumentError(
                f"{' and '.join(given)} are given, expected at most one of {', '.join(sizes)}"
            )
        if len(self.stop or ()) > MAX_STOP_STRINGS:
            raise InvalidArgumentError(
                f"--stop is given {len(self.stop or ())} times, expected at most {MAX_STOP_STRINGS}"
            )
        if (self.prompt is None) == (self.file is None):
            raise InvalidArgumentError(
                "expected one of a question, - for a question on standard input, and --file"
            )
        if self.file is None and self.prompt != "-":
            _check_text(self.prompt or "", raw=self.raw)

    def read_text(self) -> str:
        """The question, or with `raw` the text. Raises InvalidArgumentError for one that is not UTF-8 or is blank."""
        path = _STANDARD_INPUT if self.prompt == "-" else self.file
        if path is None:
            return self.prompt or ""
        data = sys.stdin.buffer.read() if path == _STANDARD_INPUT else path.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"{'standard input' if path == _STANDARD_INPUT else path} is not UTF-8 text: byte {error.start} "
                "cannot be decoded"
            ) from error
        _check_text(text, raw=self.raw)
        return text if self.raw else text.strip()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Those given, else the end of the line for a question: an answer is one line unless asked otherwise."""
        if self.stop is not None:
            return self.stop
        return () if self.raw else ("\n",)


def _check_text(text: str, *, raw: bool) -> None:
    """Raises InvalidArgumentError where nothing is asked. Blanks alone may be a text to continue by."""
    if not (text if raw else text.strip()):
        raise InvalidArgumentError("the question is empty, expected words")


@configured(AskConfig)
def ask(
    config: AskConfig,
    show_timings: Annotated[
        bool, Option("--show-timings", help="Tell on standard error what was touched and how long it took.")
    ] = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Ask a stored context a question and stream the answer."""
    text = config.read_text()
    write = _stream_text if output is OutputFormat.TEXT else _collect
    with _in_flags(), Client(config.server) as client:
        found = client.find_context(config.context)
        with _generate(client, found.name, text, config) as generation:
            try:
                text, token_ids = write(generation)
            except KeyboardInterrupt:
                generation.cancel()
                raise typer.Exit(INTERRUPTED) from None
    summary = generation.summary
    if output is OutputFormat.JSON:
        print_json({"context": found.name, "text": text, "token_ids": token_ids, **asdict(summary)})
    if show_timings:
        for line in summary_lines(summary):
            typer.echo(line, err=True)


@contextmanager
def _in_flags() -> Iterator[None]:
    """Lets errors of the server speak of flags where they name fields."""
    try:
        yield
    except SparseKVError as error:
        error.message = _FIELDS.sub(lambda field: _FLAGS[field[0]], error.message)
        raise


def _generate(client: Client, name: str, text: str, config: AskConfig) -> Generation:
    return client.generate(
        name,
        text=text if config.raw else None,
        question=None if config.raw else text,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed,
        stop=config.stop_strings,
        method=config.method,
        keep_ratio=config.keep,
        target_mass=config.mass,
        token_budget=config.tokens_kept,
        search_period=config.period,
        timeout_s=config.timeout,
        on_wait=_say_what_it_waits_for,
    )


def _say_what_it_waits_for(waiting: Waiting) -> None:
    """Tells people, on a line of its own, and no file or program."""
    if sys.stderr.isatty():
        ahead = f"{waiting.requests_ahead} requests are admitted before this one"
        typer.echo(
            ahead if waiting.cause == "session" else "the context is being brought into memory", err=True
        )


def _stream_text(generation: Generation) -> tuple[str, list[int]]:
    """Writes the answer as it arrives, without the blanks that it begins with."""
    begun = False
    try:
        for piece in generation:
            text = piece.text if begun else piece.text.lstrip()
            begun = begun or bool(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    finally:
        if begun:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return "", []


def _collect(generation: Generation) -> tuple[str, list[int]]:
    pieces = list(generation)
    return "".join(piece.text for piece in pieces), [id_ for piece in pieces for id_ in piece.token_ids]


def summary_lines(summary: Summary) -> list[str]:
    """What a generation touched and took, in a few lines."""
    times, keys = summary.timings, summary.selection
    sparse = (
        "no layer searches"
        if keys.fraction_sparse is None
        else f"{keys.fraction_sparse:.2%} of the keys in the layers that search"
    )
    budget = f" ({summary.budget}, remainder {summary.remainder})" if summary.budget else ""
    per_token = times.decode_ns / max(times.decode_steps, 1) / 1e6
    parts = {
        "load": times.load_ns,
        "queue": times.queue_ns,
        "search": times.search_ns,
        "gather": times.gather_ns,
        "attend": times.attend_ns,
        "append": times.append_ns,
    }
    rest = max(0, times.total_ns - sum(parts.values()))
    moved = []
    if times.host_bytes_read or times.rows_reused:
        moved = [
            f"keys and values: {times.host_bytes_read / 2**20:.1f} MiB read from host memory in steps, "
            f"{times.rows_reused} rows found on the device, which waited {times.device_wait_for_host_ns / 1e6:.1f} ms "
            "for the host"
        ]
    listed = ", ".join(f"{name} {spent / 1e6:.1f}" for name, spent in parts.items())
    return [
        f"method {summary.method}{budget}: {sparse}, {keys.fraction_all:.2%} over all layers",
        f"tokens: {summary.context_tokens} context, {summary.prompt_tokens} prompt, "
        f"{summary.completion_tokens} answer ({summary.finish_reason})",
        f"time: {times.total_ns / 1e6:.1f} ms, first token after {times.first_token_ns / 1e6:.1f} ms, "
        f"{per_token:.1f} ms per token",
        *moved,
        f"of it, in sum over all layers and steps: {listed}, the rest of the model and waiting {rest / 1e6:.1f} ms",
    ]
