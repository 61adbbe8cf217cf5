"""The commands `contexts ...`: a server's contexts, over gRPC."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from decode_engine.cli.asking.operation_progress import operation_progress
from decode_engine.config import MAX_NAME_CHARACTERS
from decode_engine.rpc.client import Client, ContextInfo, IndexInfo, Keep, OperationInfo
from decode_engine.rpc.door.options import ServerConfig
from index_store.cli.app import new_group
from index_store.cli.checks import AtLeast, Characters, InputFile
from index_store.cli.console import format_bytes, format_time, on_terminal, print_json, print_table
from index_store.cli.documents import STANDARD_INPUT, document_name, read_document, read_messages
from index_store.cli.labels import LabelArguments, labels_text, parse_labels
from index_store.cli.options import (
    FormatOption,
    OutputFormat,
    QuietOption,
    TtlOption,
    check_bounds,
    configured,
    parse_ttl,
)
from index_store.cli.progress import reporter_for
from index_store.cli.report import error_object, expiry_text, layers_text
from index_store.errors import InvalidArgumentError

contexts = new_group("Create, continue, show, label, pin and remove contexts.")

_COLUMNS = ("ID", "NAME", "STATE", "MEMORY", "METHOD", "TOKENS", "KV", "INDEX", "MODEL", "CREATED", "EXPIRES")
_RIGHT = ("TOKENS", "KV", "INDEX")
_OPTIONAL = ("CREATED", "MODEL", "EXPIRES", "METHOD", "INDEX", "KV", "MEMORY", "STATE")

ReferenceArgument = Annotated[
    str,
    typer.Argument(metavar="CONTEXT", help="Id, its first 6 or more digits, contexts/<id>, or display name."),
]
RecursiveOption = Annotated[
    bool, typer.Option("--recursive", help="Remove contexts that continue these, too.")
]
ReferenceArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="CONTEXT", help="Ids, their first 6 or more digits, contexts/<id>, or display names."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateConfig(ServerConfig):
    """A context to be made. name: by default the first file's."""

    name: Annotated[
        str | None, typer.Option(help="Display name; by default the first file's name."), Characters(1, 500)
    ] = None
    messages: Annotated[
        Path | None,
        typer.Option(help="In place of text: messages of a conversation (JSON); - is standard input."),
        InputFile(dash=True),
    ] = None
    method: Annotated[
        tuple[str, ...],
        typer.Option(help="Method whose indexes to build; may be repeated. Default: csattention."),
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

    @property
    def ttl_s(self) -> float | None:
        """The time to live in seconds."""
        ttl = parse_ttl(self.ttl)
        return None if ttl is None else ttl.total_seconds()


@contexts.command("ls")
@configured(ServerConfig)
def list_contexts(
    config: ServerConfig,
    wanted: Annotated[
        str,
        Option(
            "--filter", help="Only those that fit, for example 'labels.team = law AND token_count > 32000'."
        ),
    ] = "",
    order_by: Annotated[
        str, Option("--order-by", help="Fields to order by, for example 'token_count desc, display_name'.")
    ] = "",
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List the server's contexts, newest first unless told otherwise."""
    with Client(config.server, credentials=config.credentials()) as client:
        found = list(client.list_contexts(filter=wanted, order_by=order_by))
    if output is OutputFormat.JSON:
        print_json({"server": config.server, "contexts": [context_object(context) for context in found]})
        return
    if not found:
        typer.echo(f"The server at {config.server} has no contexts{' that fit' if wanted else ''}.")
        return
    id_length = 12 if on_terminal() else 64
    print_table(_COLUMNS, [_row(context, id_length) for context in found], right=_RIGHT, optional=_OPTIONAL)


@contexts.command("show")
@configured(ServerConfig)
def show_context(
    config: ServerConfig, reference: ReferenceArgument, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Show all that the server says about a context."""
    with Client(config.server, credentials=config.credentials()) as client:
        found = client.find_context(reference)
    if output is OutputFormat.JSON:
        print_json(context_object(found))
        return
    _print_rows(_detail_rows(found))


@contexts.command("create")
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

    The work is done by the server's workers, and goes on when this command is interrupted. The same text again costs
    nothing.
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
            ttl_s=config.ttl_s,
            methods=config.method,
            priority=config.priority,
            request_id=config.request_id,
        )
        if wait:
            with operation_progress(reporter_for(sys.stderr, quiet=quiet)) as show:
                operation = client.wait_operation(operation.name, on_progress=show)
            operation.result()
    if output is OutputFormat.JSON:
        print_json(operation_object(operation))
    elif operation.context is None:
        typer.echo(f"{operation.name} makes {operation.context_name}")
    else:
        _print_rows(_detail_rows(operation.context))


@dataclass(frozen=True, slots=True)
class ExtendConfig(ServerConfig):
    """`decode-engine contexts extend`. name: by default that of the context."""

    name: Annotated[
        str | None,
        Option("--name", help="Name of the new context; that of the one it continues by default."),
        Characters(1, MAX_NAME_CHARACTERS),
    ] = None
    ttl: TtlOption = None

    def __post_init__(self) -> None:
        check_bounds(self)
        parse_ttl(self.ttl)


@contexts.command("extend")
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
    keep = Keep(config.name or "", parse_ttl(config.ttl), prompt_only=True)
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
        f"{_id(child)}: {child.token_count} tokens, {added} of them new, {format_bytes(child.kv_bytes)}"
    )
    if child.state_message:
        typer.echo(child.state_message, err=True)


@contexts.command("warm")
@configured(ServerConfig)
def warm_contexts(
    config: ServerConfig, references: ReferenceArguments, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Load contexts into the server's memory and verify them."""
    with Client(config.server, credentials=config.credentials()) as client:
        results = [client.warm_context(context.name) for context in _find_all(client, references)]
    if output is OutputFormat.JSON:
        warmed = [{**asdict(result), "context": context_object(result.context)} for result in results]
        print_json({"warmed": warmed})
        return
    for result in results:
        did = "was in memory" if result.already_resident else f"loaded in {result.load_ns / 1e9:.2f} s"
        typer.echo(f"{_id(result.context)}: {did}")


@contexts.command("rm")
@configured(ServerConfig)
def remove_contexts(
    config: ServerConfig,
    references: ReferenceArguments,
    recursive: RecursiveOption = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Remove contexts from the server; none unless all are found.

    A context that others continue, its children, stays unless they are removed with it.
    """
    removed = []
    with Client(config.server, credentials=config.credentials()) as client:
        for context in _find_all(client, references):
            client.delete_context(context.name, allow_missing=recursive, force=recursive)
            removed.append(_id(context))
            if output is OutputFormat.TEXT:
                typer.echo(f"removed {removed[-1]}")
    if output is OutputFormat.JSON:
        print_json({"removed": removed})


@contexts.command("pin")
@configured(ServerConfig)
def pin_contexts(
    config: ServerConfig, references: ReferenceArguments, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Keep contexts: they do not expire, and leave memory last."""
    _set_pinned(config, references, output, pinned=True)


@contexts.command("unpin")
@configured(ServerConfig)
def unpin_contexts(
    config: ServerConfig, references: ReferenceArguments, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Let contexts expire and leave memory like others."""
    _set_pinned(config, references, output, pinned=False)


def _set_pinned(
    config: ServerConfig, references: Sequence[str], output: OutputFormat, *, pinned: bool
) -> None:
    with Client(config.server, credentials=config.credentials()) as client:
        changed = [
            _id(client.update_context(context.name, pinned=pinned))
            for context in _find_all(client, references)
        ]
    if output is OutputFormat.JSON:
        print_json({"pinned" if pinned else "unpinned": changed})
        return
    for id_ in changed:
        typer.echo(f"{'pinned' if pinned else 'unpinned'} {id_}")


@contexts.command("label")
@configured(ServerConfig)
def label_context(
    config: ServerConfig,
    reference: ReferenceArgument,
    labels: LabelArguments,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Set and remove labels of a context."""
    changes = parse_labels(labels)
    with Client(config.server, credentials=config.credentials()) as client:
        changed = client.update_context(client.find_context(reference).name, labels=changes)
    if output is OutputFormat.JSON:
        print_json(context_object(changed))
        return
    typer.echo(f"{_id(changed)}: {labels_text(changed.labels)}")


def _find_all(client: Client, references: Sequence[str]) -> list[ContextInfo]:
    """The contexts that are meant, each once."""
    found = [client.find_context(reference) for reference in references]
    return list({context.name: context for context in found}.values())


def context_object(context: ContextInfo) -> dict[str, Any]:
    """A context as JSON: the fields of the API's message."""
    times = {
        name: value.isoformat() for name, value in asdict(context).items() if isinstance(value, datetime)
    }
    return {**asdict(context), **times}


def operation_object(operation: OperationInfo) -> dict[str, Any]:
    """An operation as JSON."""
    plain = replace(operation, context=None, error=None)
    times = {"create_time": operation.create_time and operation.create_time.isoformat()}
    context = None if operation.context is None else context_object(operation.context)
    error = None if operation.error is None else error_object(operation.error)
    return {**asdict(plain), **times, "context": context, "error": error}


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:<{width}}  {value}")


def _id(context: ContextInfo) -> str:
    return context.name.removeprefix("contexts/")


def _memory(context: ContextInfo) -> str:
    return (context.placement or "loaded") if context.resident else "-"


def _row(context: ContextInfo, id_length: int) -> list[str]:
    return [
        _id(context)[:id_length],
        context.display_name or "-",
        context.state,
        _memory(context),
        context.default_method or "-",
        str(context.token_count),
        format_bytes(context.kv_bytes),
        format_bytes(context.index_bytes),
        context.model or "-",
        format_time(context.create_time),
        format_time(context.expire_time),
    ]


def _detail_rows(context: ContextInfo) -> list[tuple[str, str]]:
    default = f"{context.default_method or '-'} {context.default_budget}".strip()
    return [
        ("id", _id(context)),
        ("name", context.display_name),
        ("state", f"{context.state}: {context.state_message}" if context.state_message else context.state),
        ("in memory", _memory(context)),
        ("model", f"{context.model} ({context.architecture})"),
        ("tokens", str(context.token_count)),
        ("kv", f"{format_bytes(context.kv_bytes)}, {context.dtype}"),
        *_family(context),
        *((f"index {index.name}", _index_text(index)) for index in context.indexes),
        ("indexes", format_bytes(context.index_bytes)),
        ("methods", ", ".join(context.methods)),
        ("default", f"{default}, tuned" if context.tuned else default),
        ("dense layers", layers_text(context.dense_layers)),
        ("created", format_time(context.create_time)),
        ("expires", expiry_text(context.expire_time, context.pinned)),
        ("labels", labels_text(context.labels)),
        *([("owner", context.owner)] if context.owner else []),
        ("made of", "messages" if context.is_conversation else "text or tokens"),
    ]


def _family(context: ContextInfo) -> list[tuple[str, str]]:
    parent = [
        ("continues", f"{context.parent.removeprefix('contexts/')}, {context.parent_token_count} tokens")
    ]
    return [
        *(parent if context.parent else []),
        *([("children", str(context.children))] if context.children else []),
    ]


def _index_text(index: IndexInfo) -> str:
    parameters = ", ".join(f"{name}={value}" for name, value in index.parameters.items()) or "-"
    return f"{index.kind}, {index.bytes_per_token:.1f} bytes per token, {layers_text(index.layers)}, {parameters}"
