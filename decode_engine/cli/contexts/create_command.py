"""The commands `contexts create` and `contexts extend`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from decode_engine.cli.asking.operation_progress import operation_progress
from decode_engine.cli.contexts.references import ReferenceArgument
from decode_engine.cli.contexts.shown import context_object, detail_rows, id_of, operation_object
from decode_engine.rpc.client import Client, Keep
from decode_engine.rpc.door.options import ServerConfig
from decode_engine.settings.request_bounds import MAX_NAME_CHARACTERS
from index_store.cli.console import print_json, reporter_for
from index_store.cli.documents import STANDARD_INPUT, document_name, read_document, read_messages
from index_store.cli.options import (
    AtLeast,
    Characters,
    Filled,
    FormatOption,
    InputFile,
    MoveNameOption,
    OneOf,
    OutputFormat,
    QuietOption,
    TtlOption,
    check_bounds,
    configured,
    parse_ttl,
)
from index_store.cli.report import parse_labels, print_rows
from index_store.errors import InvalidArgumentError, format_bytes
from index_store.methods.default import DEFAULT_METHOD
from index_store.store.description.dtypes import AS_DTYPE, ROW_CODINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateConfig(ServerConfig):
    """A context to be made. name: by default the first file's."""

    name: Annotated[
        str | None, typer.Option(help="Display name; by default the first file's name."), Characters(1, 500)
    ] = None
    move_name: MoveNameOption = False
    messages: Annotated[
        Path | None,
        typer.Option(help="In place of text: messages of a conversation (JSON); - is standard input."),
        InputFile(dash=True),
    ] = None
    method: Annotated[
        tuple[str, ...],
        typer.Option(help=f"Method whose indexes to build; may be repeated. Default: {DEFAULT_METHOD}."),
    ] = ()
    rows: Annotated[
        str,
        typer.Option(
            help="How exact keys and values are stored: in the server's dtype, or in 8 bits (int8)."
        ),
        OneOf(*ROW_CODINGS),
    ] = AS_DTYPE
    parent: Annotated[
        str | None,
        typer.Option(metavar="CONTEXT", help="A context that the new one continues, by name or id."),
        Filled(),
    ] = None
    label: Annotated[
        tuple[str, ...],
        typer.Option(metavar="KEY=VALUE", help="Label of the context; may be repeated."),
        Filled(),
    ] = ()
    ttl: TtlOption = None
    priority: Annotated[
        int, typer.Option(help="Contexts of a higher priority are made first."), AtLeast(0, 100)
    ] = 0
    request_id: Annotated[
        str | None,
        typer.Option(help="Repeats with the same id return the same operation; by default a random one."),
        Characters(1, 128),
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)
        parse_ttl(self.ttl)
        if self.parent is not None and self.method:
            raise InvalidArgumentError("--method does not go with --parent, whose indexes the context has")
        if None in parse_labels(self.label).values():
            raise InvalidArgumentError("--label: expected KEY=VALUE; a new context has no labels to remove")

    @property
    def labels(self) -> dict[str, str]:
        """Values by key."""
        return {key: value for key, value in parse_labels(self.label).items() if value is not None}

    @property
    def ttl_s(self) -> float | None:
        """The time to live in seconds."""
        ttl = parse_ttl(self.ttl)
        return None if ttl is None else ttl.total_seconds()


@configured(CreateConfig)
def create_context(
    config: CreateConfig,
    inputs: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="Text files; - is standard input.")
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Wait for the context, or only say which operation makes it."),
    ] = True,
    quiet: QuietOption = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Have the server make a context of a text, or of messages.

    The work is done by the server's workers, and goes on when this command is interrupted (`operations` follows it).
    The same text again costs nothing.
    """
    for path in inputs or ():
        InputFile(dash=True).check("FILE", path)
    if bool(inputs) == (config.messages is not None):
        raise InvalidArgumentError("expected text files, or --messages with a conversation, and not both")
    given = inputs or [config.messages or STANDARD_INPUT]
    text = read_document(given, sys.stdin.buffer) if inputs else None
    said = None if text is not None else read_messages(given[0], sys.stdin.buffer)
    with Client(config.server, credentials=config.credentials()) as client:
        operation = client.create_context(
            text,
            messages=said,
            wait=False,
            display_name=config.name or document_name(given),
            move_name=config.move_name,
            ttl_s=config.ttl_s,
            methods=config.method,
            rows=config.rows,
            priority=config.priority,
            request_id=config.request_id,
            parent=None if config.parent is None else client.find_context(config.parent).name,
            labels=config.labels,
        )
        if wait:
            with operation_progress(reporter_for(sys.stderr, quiet=quiet)) as show:
                operation = client.wait_operation(operation.name, on_progress=show)
            operation.result()
    if output is OutputFormat.JSON:
        print_json(operation_object(operation))
    elif operation.context is None:
        typer.echo(f"{operation.name} makes {operation.context_name}")
        if operation.waiting_reason:
            typer.echo(operation.waiting_reason, err=True)
    else:
        print_rows(detail_rows(operation.context))


@dataclass(frozen=True, slots=True)
class ExtendConfig(ServerConfig):
    """`decode-engine contexts extend`. name: by default the first file's: that of the context means the context."""

    name: Annotated[
        str | None,
        Option("--name", help="Name of the new context; by default the first file's name."),
        Characters(1, MAX_NAME_CHARACTERS),
    ] = None
    move_name: MoveNameOption = False
    ttl: TtlOption = None

    def __post_init__(self) -> None:
        check_bounds(self)
        parse_ttl(self.ttl)


@configured(ExtendConfig)
def extend_context(
    config: ExtendConfig,
    reference: ReferenceArgument,
    inputs: Annotated[list[Path], typer.Argument(metavar="FILE", help="Text files; - is standard input.")],
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Continue a context by a text, as a new context.

    It stores what the text adds. The text is read with full attention.
    """
    for path in inputs:
        InputFile(dash=True).check("FILE", path)
    text = read_document(inputs, sys.stdin.buffer)
    name, ttl = config.name or document_name(inputs), parse_ttl(config.ttl)
    keep = Keep(name, ttl, prompt_only=True, move_name=config.move_name)
    with Client(config.server, credentials=config.credentials()) as client:
        parent = client.find_context(reference)
        with client.generate(parent.name, text=text, method="full", keep=keep) as generation:
            generation.read()
        child = client.get_context(generation.summary.kept_context)
    if output is OutputFormat.JSON:
        print_json(context_object(child))
        return
    added = child.token_count - parent.token_count
    typer.echo(
        f"{id_of(child)}: {child.token_count} tokens, {added} of them new, {format_bytes(child.kv_bytes)}"
    )
    if child.state_message:
        typer.echo(child.state_message, err=True)
