"""The commands `contexts ...` and `operations ...`: a server's contexts, and those that its workers make, over gRPC."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from decode_engine.rpc.client import NEVER, Client, ContextChanges, ContextInfo, OperationInfo
from decode_engine.rpc.door.options import ServerConfig
from decode_engine.settings.request_bounds import MAX_NAME_CHARACTERS
from index_store.cli import report
from index_store.cli.app import new_group
from index_store.cli.console import Reporter, Update, format_time, print_json, print_table, reporter_for
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
from index_store.errors import InvalidArgumentError, format_bytes
from index_store.methods.default import DEFAULT_METHOD
from index_store.store.description.dtypes import AS_DTYPE, ROW_CODINGS
from index_store.store.listing import STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateConfig(ServerConfig):
    """A context to be made. name: by default the first file's."""

    name: Annotated[str | None, "Display name; by default the first file's name.", Characters(1, 500)] = None
    move_name: MoveNameOption = False
    messages: Annotated[
        Path | None,
        "In place of text: messages of a conversation (JSON); - is standard input.",
        InputFile(dash=True),
    ] = None
    method: Annotated[
        tuple[str, ...], f"Method whose indexes to build; may be repeated. Default: {DEFAULT_METHOD}."
    ] = ()
    rows: Annotated[
        str,
        "How exact keys and values are stored: in the server's dtype, or in 8 bits (int8).",
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
    priority: Annotated[int, "Contexts of a higher priority are made first.", AtLeast(0, 100)] = 0
    request_id: Annotated[
        str | None,
        "Repeats with the same id return the same operation; by default a random one.",
        Characters(1, 128),
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)
        parse_ttl(self.ttl)
        parse_ttl(self.renew)
        if self.parent is not None and self.method:
            raise InvalidArgumentError("--method does not go with --parent, whose indexes the context has")
        report.given_labels(self.label)


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
            labels=report.given_labels(config.label),
        )
        if wait:
            with _operation_progress(reporter_for(sys.stderr, quiet=quiet)) as show:
                operation = client.wait_operation(operation.name, on_progress=show)
            operation.result()
    if output is OutputFormat.JSON:
        print_json(_operation_object(operation))
    elif operation.context is None:
        typer.echo(f"{operation.name} makes {operation.context_name}")
        if operation.waiting_reason:
            typer.echo(operation.waiting_reason, err=True)
    else:
        report.print_rows(report.detail_rows(operation.context))


contexts = new_group("Create, show, change and remove contexts.")
contexts.command("create")(create_context)


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
        str | None, Option("--state", help=f"Only those of this state: {', '.join(STATES)}.")
    ] = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List the server's contexts, newest first."""
    wanted = report.given_labels(label or ())
    with Client(config.server, credentials=config.credentials()) as client:
        found = list(client.list_contexts(name_prefix=name_prefix, labels=wanted, state=state or ""))
    if output is OutputFormat.JSON:
        print_json(
            {"server": config.server, "contexts": [report.context_object(context) for context in found]}
        )
        return
    if not found:
        typer.echo(
            f"The server at {config.server} has no contexts{' that fit' if name_prefix or wanted or state else ''}."
        )
        return
    report.print_contexts(found, memory=True)


@contexts.command("show")
@configured(ServerConfig)
def show_context(
    config: ServerConfig, reference: report.ReferenceArgument, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Show all that the server says about a context."""
    with Client(config.server, credentials=config.credentials()) as client:
        found = client.find_context(reference)
    report.print_context(found, output)


@contexts.command("warm")
@configured(ServerConfig)
def warm_contexts(
    config: ServerConfig, references: report.ReferenceArguments, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Load contexts into the server's memory and verify them."""
    with Client(config.server, credentials=config.credentials()) as client:
        results = [client.warm_context(context.name) for context in _find_all(client, references)]
    warmed = [{**asdict(result), "context": report.context_object(result.context)} for result in results]
    did = (
        "was in memory" if each.already_resident else f"loaded in {each.load_ns / 1e9:.2f} s"
        for each in results
    )
    lines = (f"{report.id_of(each.context)}: {what}" for each, what in zip(results, did, strict=True))
    report.print_either(output, {"warmed": warmed}, *lines)


@contexts.command("rm")
@configured(ServerConfig)
def remove_contexts(
    config: ServerConfig,
    references: report.ReferenceArguments,
    recursive: report.RecursiveOption = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Remove contexts from the server; none unless all are found.

    A context that others continue, its children, stays unless they are removed with it.
    """
    removed = []
    with Client(config.server, credentials=config.credentials()) as client:
        for context in _find_all(client, references):
            client.delete_context(context.name, allow_missing=recursive, force=recursive)
            removed.append(report.id_of(context))
            if output is OutputFormat.TEXT:
                report.print_done("removed", removed[-1:], output)
    if output is OutputFormat.JSON:
        report.print_done("removed", removed, output)


def _find_all(client: Client, references: Sequence[str]) -> list[ContextInfo]:
    """The contexts that are meant, each once."""
    found = [client.find_context(reference) for reference in references]
    return list({context.name: context for context in found}.values())


@dataclass(frozen=True, slots=True)
class UpdateConfig(ServerConfig):
    """`decode-engine contexts update`. What is None stays."""

    name: Annotated[str | None, "Display name.", Characters(1, MAX_NAME_CHARACTERS)] = None
    move_name: MoveNameOption = False
    ttl: Annotated[str | None, "Time to live from now, for example 30m, 1.5h, 7d; never: for good."] = None
    renew: Annotated[
        str | None, "Time to live that every use begins anew, likewise; never: uses change nothing."
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

    def changes(self) -> ContextChanges:
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
    config: UpdateConfig,
    reference: report.ReferenceArgument,
    label: report.LabelOption = None,
    pin: report.PinOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Change a context's name, labels, pin and expiry, and who reads it."""
    changes: ContextChanges = {**config.changes(), "labels": report.parse_labels(label or ()), "pinned": pin}
    if not any(value is not None and value != {} for name, value in changes.items() if name != "move_name"):
        raise InvalidArgumentError(
            "expected an option that says what is to change, such as --name, --label or --pin"
        )
    with Client(config.server, credentials=config.credentials()) as client:
        changed = client.update_context(client.find_context(reference).name, **changes)
    report.print_context(changed, output)


operations = new_group("Show, await, cancel and forget the making of contexts.")

OperationArgument = Annotated[
    str, typer.Argument(metavar="OPERATION", help="As `contexts create --no-wait` tells it: operations/<id>.")
]


def _name(operation: str) -> str:
    return f"operations/{operation.removeprefix('operations/')}"


def _print(operation: OperationInfo, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json(_operation_object(operation))
    else:
        report.print_rows(_operation_rows(operation))


@operations.command("ls")
@configured(ServerConfig)
def list_operations(config: ServerConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """List the server's operations, newest first."""
    with Client(config.server, credentials=config.credentials()) as client:
        found = list(client.list_operations())
    if output is OutputFormat.JSON:
        print_json({"operations": [_operation_object(operation) for operation in found]})
    elif found:
        _print_operations(found)
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
        _operation_progress(reporter_for(sys.stderr, quiet=quiet)) as show,
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
    report.print_done("removed", [_name(operation)], output)


def _operation_object(operation: OperationInfo) -> dict[str, Any]:
    plain = replace(operation, context=None, error=None)
    times = {"create_time": operation.create_time and operation.create_time.isoformat()}
    context = None if operation.context is None else report.context_object(operation.context)
    error = None if operation.error is None else report.error_object(operation.error)
    return {**asdict(plain), **times, "context": context, "error": error}


def _print_operations(operations: Sequence[OperationInfo]) -> None:
    rows = [
        [
            operation.name,
            _ending(operation),
            f"{operation.tokens_done}/{operation.tokens_total}",
            operation.context_name.removeprefix("contexts/")[:12] or "-",
            format_time(operation.create_time),
        ]
        for operation in operations
    ]
    print_table(
        ("OPERATION", "STATE", "TOKENS", "CONTEXT", "CREATED"), rows, right=("TOKENS",), optional=("CREATED",)
    )


def _operation_rows(operation: OperationInfo) -> list[tuple[str, str]]:
    left = operation.remaining_s
    return [
        ("name", operation.name),
        ("state", _ending(operation)),
        ("context", operation.context_name.removeprefix("contexts/") or "-"),
        ("tokens", f"{operation.tokens_done} of {operation.tokens_total}"),
        ("layers", f"{operation.layers_done} of {operation.layers_total or '-'}"),
        ("written", format_bytes(operation.bytes_written)),
        *([] if left is None else [("seconds left", f"{left:.0f}")]),
        ("created", format_time(operation.create_time)),
        *([("owner", operation.owner)] if operation.owner else []),
        *([("waits", operation.waiting_reason)] if operation.waiting_reason else []),
        *(("note", note) for note in operation.notes),
        *([] if operation.error is None else [("error", operation.error.message)]),
    ]


def _ending(operation: OperationInfo) -> str:
    if not operation.done:
        ahead = f", {operation.jobs_ahead} before it" if operation.phase == "queued" else ""
        return f"{operation.phase}{ahead}"
    if operation.error is None:
        return "done"
    return "cancelled" if operation.error.reason == "CANCELLED" else "failed"


_BARS = {"reading": ("prefill", "tokens"), "indexing": ("index", "layers")}
"""Phases with something to count, as `prefill-worker run` calls them."""


@contextmanager
def _operation_progress(reporter: Reporter) -> Iterator[Callable[[OperationInfo], None]]:
    """Yields what to call with the states of an operation, one after the other."""
    phase, ahead, told, reason = "", -1, 0, ""
    update: Update = _ignore
    with ExitStack() as bar:

        def show(operation: OperationInfo) -> None:
            nonlocal phase, ahead, told, reason, update
            for note in operation.notes[told:]:
                reporter.note(note)
            told = len(operation.notes)
            if operation.phase != phase:
                bar.close()
                phase, update = operation.phase, _ignore
                if phase in _BARS:
                    update = bar.enter_context(reporter.phase(*_BARS[phase]))
            if phase == "queued" and operation.jobs_ahead != ahead:
                ahead = operation.jobs_ahead
                reporter.note(f"{operation.name} waits for a worker, {ahead} before it")
            if operation.waiting_reason != reason:
                reason = operation.waiting_reason
                if reason:
                    reporter.note(reason)
            if phase == "reading":
                update(operation.tokens_done, operation.tokens_total)
            elif phase == "indexing":
                update(operation.layers_done, operation.layers_total)

        yield show


def _ignore(done: int, total: int) -> None:
    """Nothing is counted."""
