"""The commands `contexts ...` and `operations ...`: a server's contexts, and those that its workers make, over gRPC."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from decode_engine.cli.shown import (
    operation_object,
    operation_progress,
    operation_rows,
    print_operations,
)
from decode_engine.rpc.client import (
    NEVER,
    Client,
    ContextChanges,
    ContextInfo,
    Keep,
    OperationInfo,
)
from decode_engine.rpc.door.options import ServerConfig
from decode_engine.settings.request_bounds import MAX_NAME_CHARACTERS
from index_store.cli.app import new_group
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
    RenewOption,
    TtlOption,
    check_bounds,
    configured,
    parse_ttl,
    seconds_of,
)
from index_store.cli.report import (
    LabelArguments,
    RecursiveOption,
    ReferenceArgument,
    ReferenceArguments,
    context_object,
    detail_rows,
    given_labels,
    id_of,
    labels_text,
    parse_labels,
    print_context,
    print_contexts,
    print_done,
    print_either,
    print_rows,
)
from index_store.errors import InvalidArgumentError, format_bytes
from index_store.methods.default import DEFAULT_METHOD
from index_store.store.description.dtypes import AS_DTYPE, ROW_CODINGS
from index_store.store.listing import STATES


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
    again: Annotated[
        str | None,
        typer.Option(
            metavar="CONTEXT",
            help="In place of text: what an expired context of that name or id was made of.",
        ),
        Filled(),
    ] = None
    label: Annotated[
        tuple[str, ...],
        typer.Option(metavar="KEY=VALUE", help="Label of the context; may be repeated."),
        Filled(),
    ] = ()
    ttl: TtlOption = None
    renew: RenewOption = None
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
        parse_ttl(self.renew)
        if self.parent is not None and self.method:
            raise InvalidArgumentError("--method does not go with --parent, whose indexes the context has")
        given_labels(self.label)


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
    if sum(map(bool, (inputs, config.messages, config.again))) != 1:
        raise InvalidArgumentError("expected one of text files, --messages with a conversation, and --again")
    given = inputs or [config.messages or STANDARD_INPUT]
    text = read_document(given, sys.stdin.buffer) if inputs else None
    said = read_messages(given[0], sys.stdin.buffer) if config.messages else None
    with Client(config.server, credentials=config.credentials()) as client:
        operation = client.create_context(
            text,
            messages=said,
            again=config.again,
            wait=False,
            display_name=config.name or ("" if config.again else document_name(given)),
            move_name=config.move_name,
            ttl_s=seconds_of(config.ttl),
            renew_s=seconds_of(config.renew),
            methods=config.method,
            rows="" if config.again and config.rows == AS_DTYPE else config.rows,
            priority=config.priority,
            request_id=config.request_id,
            parent=None if config.parent is None else client.find_context(config.parent).name,
            labels=given_labels(config.label),
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
    added = child.token_count - parent.token_count
    line = f"{id_of(child)}: {child.token_count} tokens, {added} of them new, {format_bytes(child.kv_bytes)}"
    print_either(output, context_object(child), line)
    if child.state_message and output is OutputFormat.TEXT:
        typer.echo(child.state_message, err=True)


contexts = new_group("Create, show, change, label, pin and remove contexts.")
contexts.command("create")(create_context)
contexts.command("extend")(extend_context)


@contexts.command("ls")
@configured(ServerConfig)
def list_contexts(
    config: ServerConfig,
    name_prefix: Annotated[str, Option("--name-prefix", help="Only those whose names begin so.")] = "",
    label: Annotated[
        list[str] | None,
        Option("--label", metavar="KEY=VALUE", help="Only those with this label; may be repeated."),
    ] = None,
    state: Annotated[
        str | None,
        Option("--state", help=f"Only those of this state: {', '.join(STATES)}."),
    ] = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List the server's contexts, newest first."""
    wanted = given_labels(label or ())
    with Client(config.server, credentials=config.credentials()) as client:
        found = list(client.list_contexts(name_prefix=name_prefix, labels=wanted, state=state or ""))
    if output is OutputFormat.JSON:
        print_json({"server": config.server, "contexts": [context_object(context) for context in found]})
        return
    if not found:
        typer.echo(
            f"The server at {config.server} has no contexts{' that fit' if name_prefix or wanted or state else ''}."
        )
        return
    print_contexts(found, memory=True)


@contexts.command("show")
@configured(ServerConfig)
def show_context(
    config: ServerConfig, reference: ReferenceArgument, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Show all that the server says about a context."""
    with Client(config.server, credentials=config.credentials()) as client:
        found = client.find_context(reference)
    print_context(found, output)


@contexts.command("warm")
@configured(ServerConfig)
def warm_contexts(
    config: ServerConfig, references: ReferenceArguments, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Load contexts into the server's memory and verify them."""
    with Client(config.server, credentials=config.credentials()) as client:
        results = [client.warm_context(context.name) for context in _find_all(client, references)]
    warmed = [{**asdict(result), "context": context_object(result.context)} for result in results]
    did = (
        "was in memory" if each.already_resident else f"loaded in {each.load_ns / 1e9:.2f} s"
        for each in results
    )
    lines = (f"{id_of(each.context)}: {what}" for each, what in zip(results, did, strict=True))
    print_either(output, {"warmed": warmed}, *lines)


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
            removed.append(id_of(context))
            if output is OutputFormat.TEXT:
                print_done("removed", removed[-1:], output)
    if output is OutputFormat.JSON:
        print_done("removed", removed, output)


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
            id_of(client.update_context(context.name, pinned=pinned))
            for context in _find_all(client, references)
        ]
    print_done("pinned" if pinned else "unpinned", changed, output)


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
    print_either(output, context_object(changed), f"{id_of(changed)}: {labels_text(changed.labels)}")


def _find_all(client: Client, references: Sequence[str]) -> list[ContextInfo]:
    """The contexts that are meant, each once."""
    found = [client.find_context(reference) for reference in references]
    return list({context.name: context for context in found}.values())


@dataclass(frozen=True, slots=True)
class UpdateConfig(ServerConfig):
    """`decode-engine contexts update`. What is None stays."""

    name: Annotated[
        str | None, Option("--name", help="Display name."), Characters(1, MAX_NAME_CHARACTERS)
    ] = None
    move_name: MoveNameOption = False
    ttl: Annotated[
        str | None, Option("--ttl", help="Time to live from now, for example 30m, 1.5h, 7d; never: for good.")
    ] = None
    renew: Annotated[
        str | None,
        Option(
            "--renew", help="Time to live that every use begins anew, likewise; never: uses change nothing."
        ),
    ] = None
    readers: Annotated[
        str | None,
        Option(
            metavar="TENANTS",
            help="Other tenants that may read it, separated by commas, instead of those that there are; '*': all; '': "
            "none.",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)
        for text in (self.ttl, self.renew):
            if text != NEVER.value:
                parse_ttl(text)
        if self.name is None and self.ttl is None and self.renew is None and self.readers is None:
            raise InvalidArgumentError(
                "expected --name, --ttl, --renew or --readers, which say what is to change"
            )

    def changes(self) -> ContextChanges:
        """For the server."""
        changes: ContextChanges = {"display_name": self.name, "move_name": self.move_name}
        if self.readers is not None:
            changes["readers"] = [name.strip() for name in self.readers.split(",") if name.strip()]
        if self.ttl == NEVER.value:
            changes["expire_time"] = NEVER
        elif (ttl := parse_ttl(self.ttl)) is not None:
            changes["expire_time"] = datetime.now(UTC) + ttl
        if self.renew == NEVER.value:
            changes["renew_s"] = 0
        else:
            changes["renew_s"] = seconds_of(self.renew)
        return changes


@contexts.command("update")
@configured(UpdateConfig)
def update_context(
    config: UpdateConfig, reference: ReferenceArgument, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Change the name of a context, when it expires, and who reads it."""
    with Client(config.server, credentials=config.credentials()) as client:
        changed = client.update_context(client.find_context(reference).name, **config.changes())
    print_context(changed, output)


operations = new_group("Show, await, cancel and forget the making of contexts.")

OperationArgument = Annotated[
    str, typer.Argument(metavar="OPERATION", help="As `contexts create --no-wait` tells it: operations/<id>.")
]


def _name(operation: str) -> str:
    return f"operations/{operation.removeprefix('operations/')}"


def _print(operation: OperationInfo, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json(operation_object(operation))
    else:
        print_rows(operation_rows(operation))


@operations.command("ls")
@configured(ServerConfig)
def list_operations(config: ServerConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """List the server's operations, newest first."""
    with Client(config.server, credentials=config.credentials()) as client:
        found = list(client.list_operations())
    if output is OutputFormat.JSON:
        print_json({"operations": [operation_object(operation) for operation in found]})
    elif found:
        print_operations(found)
    else:
        typer.echo(f"The server at {config.server} has no operations.")


@operations.command("show")
@configured(ServerConfig)
def show_operation(
    config: ServerConfig, operation: OperationArgument, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Show how far an operation has come, or how it ended."""
    with Client(config.server, credentials=config.credentials()) as client:
        _print(client.get_operation(_name(operation)), output)


@operations.command("wait")
@configured(ServerConfig)
def wait_for_operation(
    config: ServerConfig,
    operation: OperationArgument,
    quiet: QuietOption = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Wait for the end of an operation, and fail as it did."""
    with (
        Client(config.server, credentials=config.credentials()) as client,
        operation_progress(reporter_for(sys.stderr, quiet=quiet)) as show,
    ):
        ended = client.wait_operation(_name(operation), on_progress=show)
    ended.result()
    _print(ended, output)


@operations.command("cancel")
@configured(ServerConfig)
def cancel_operation(
    config: ServerConfig, operation: OperationArgument, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Have an operation end; its context is not made."""
    with Client(config.server, credentials=config.credentials()) as client:
        client.cancel_operation(_name(operation))
        _print(client.get_operation(_name(operation)), output)


@operations.command("rm")
@configured(ServerConfig)
def remove_operation(
    config: ServerConfig, operation: OperationArgument, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Forget an operation that has ended; its context stays."""
    with Client(config.server, credentials=config.credentials()) as client:
        client.delete_operation(_name(operation))
    print_done("removed", [_name(operation)], output)
