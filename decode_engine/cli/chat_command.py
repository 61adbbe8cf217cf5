"""The command `chat`: a conversation, about a stored context or without, in a terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from typer import Argument, Option

from decode_engine.cli.answer_options import asking
from decode_engine.rpc.client import Client, ContextInfo, Keep, Summary, Usage
from decode_engine.rpc.door.options import ServerConfig
from decode_engine.settings.request_bounds import MAX_NAME_CHARACTERS
from index_store.cli.console import print_json
from index_store.cli.options import Characters, Filled, FormatOption, OutputFormat, check_bounds, configured
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.models.conversation.messages import Message, Role

_BLOCK = '"""'

_HELP = """\
Write a message and press Enter; a line that ends with \\ goes on in the next one, and \"\"\" begins and ends a text of
several lines. Ctrl-C stops an answer, Ctrl-D ends the conversation.
  /help   this text
  /usage  tokens so far, and how much of the context the last answer touched
  /quit   end the conversation"""


_FIELDS = ("method", "keep_ratio", "max_tokens", "temperature", "top_p", "seed", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
@asking(*_FIELDS)
class ChatConfig(ServerConfig):
    """`decode-engine chat`. What is None is left to the server."""

    context: Annotated[
        str | None,
        Argument(
            metavar="[CONTEXT]",
            help="Id, its first 6 or more digits, contexts/<id>, or display name; by default none.",
        ),
        Filled(),
    ] = None
    keep_as: Annotated[
        str | None,
        Option("--keep-as", metavar="NAME", help="Keep the conversation as a context of this name."),
        Characters(1, MAX_NAME_CHARACTERS),
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)


@configured(ChatConfig)
def chat(config: ChatConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """Converse, about a context or without. In a pipe, every line is a message, and an error ends the conversation."""
    with Client(config.server, credentials=config.credentials()) as client:
        found = None if config.context is None else client.find_context(config.context)
        conversation = _Conversation(config, client, found, output)
        for text in _Input(sys.stdin.isatty()):
            if text in ("/quit", "/exit"):
                break
            if text == "/help":
                typer.echo(_HELP, err=True)
            elif text == "/usage":
                typer.echo(conversation.usage(), err=True)
            else:
                _say(conversation, text, forgiving=sys.stdin.isatty())
    if output is OutputFormat.JSON:
        kept = conversation.kept or None
        print_json({"context": conversation.name, "turns": conversation.turns, "kept": kept})
    elif conversation.kept:
        typer.echo(f"kept as {config.keep_as}: {conversation.kept}", err=True)


def _say(conversation: _Conversation, text: str, *, forgiving: bool) -> None:
    try:
        if text.startswith("/"):
            raise InvalidArgumentError(f"{text.split(maxsplit=1)[0]} is no command; /help lists them")
        conversation.say(text)
    except SparseKVError as error:
        if not forgiving:
            raise
        typer.echo(f"error: {error.message}", err=True)


@dataclass
class _Conversation:
    """What was said, after the context if there is one. A message that got no answer is not part of it."""

    config: ChatConfig
    client: Client
    context: ContextInfo | None
    output: OutputFormat
    messages: list[Message] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    kept: str = ""
    used: Usage | None = None
    summary: Summary | None = None
    """Of the last answer; none where it was stopped."""

    @property
    def name(self) -> str:
        """The context's resource name, "" for none."""
        return "" if self.context is None else self.context.name

    def say(self, text: str) -> None:
        """Sends a message and writes the answer as it comes. Ctrl-C ends the answer; what was said of it stays."""
        asked = [*self.messages, Message(Role.USER, text)]
        answer, self.summary = "", None
        config = self.config
        with self.client.generate(
            self.name,
            messages=asked,
            **{name: getattr(config, name) for name in _FIELDS},
            keep=None if config.keep_as is None else Keep(config.keep_as, move_name=bool(self.kept)),
        ) as generation:
            try:
                for piece in generation:
                    answer += piece.text
                    self._write(piece.text)
                self.summary = generation.summary
            except KeyboardInterrupt:
                generation.cancel()
                typer.echo(" (stopped)", err=True)
            finally:
                self._write("\n")
                self.used = generation.usage or self.used
        self._replace_kept(self.summary)
        if answer.strip():
            self.messages = [*asked, Message(Role.ASSISTANT, answer)]
        figures = None if self.summary is None else asdict(self.summary)
        self.turns.append({"user": text, "assistant": answer, "summary": figures})

    def _replace_kept(self, summary: Summary | None) -> None:
        """What was kept after the turn before is the beginning of what was kept now."""
        if summary is None or not summary.kept_context or summary.kept_context == self.kept:
            return
        if self.kept:
            self.client.delete_context(self.kept, allow_missing=True)
        self.kept = summary.kept_context

    def _write(self, text: str) -> None:
        if self.output is OutputFormat.TEXT:
            sys.stdout.write(text)
            sys.stdout.flush()

    def usage(self) -> str:
        stored = 0 if self.context is None else self.context.token_count
        if self.used is not None:
            stored = self.used.context_tokens
        context = f"{stored:,} tokens of context"
        if self.used is None:
            return f"{context}; nothing was said yet"
        touched = ", which was stopped"
        if self.summary is not None:
            share = self.summary.selection.fraction_all
            touched = f", which touched {share:.2%} of the keys ({self.summary.method})"
        return (
            f"{context}, {self.used.prompt_tokens:,} of conversation, {self.used.completion_tokens:,} of the last "
            f"answer{touched}; {len(self.turns)} messages"
        )


class _Input:
    """Messages as they are typed: one a line, or several lines where they say so."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        if terminal:
            # Importing it gives `input` editing of lines, and their history.
            import readline  # noqa: F401

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                text = self._message()
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                typer.echo("", err=True)  # the line is given up, as shells do
                continue
            except EOFError:
                if self._terminal:
                    typer.echo("", err=True)
                return
            if text.strip():
                yield text.strip()

    def _message(self) -> str:
        """The lines of one message. Where the input ends in the middle of one, it ends there."""
        line = self._line("> ")
        if block := line.strip().startswith(_BLOCK):
            line = line.strip().removeprefix(_BLOCK)
        lines = [line]
        with suppress(EOFError):
            while not lines[-1].rstrip().endswith(_BLOCK) if block else lines[-1].endswith("\\"):
                lines[-1] = lines[-1] if block else lines[-1][:-1]
                lines.append(self._line(". "))
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK) if block else lines[-1]
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if self._terminal:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")
