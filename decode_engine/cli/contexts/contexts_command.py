"""The commands `contexts ...`: a server's contexts, over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer
from typer import Option

from decode_engine.cli.contexts.create_command import create_context, extend_context
from decode_engine.cli.contexts.references import RecursiveOption, ReferenceArgument, ReferenceArguments
from decode_engine.cli.contexts.shown import context_object, detail_rows, id_of, listed
from decode_engine.rpc.client import NEVER, Client, ContextChanges, ContextInfo
from decode_engine.rpc.door.options import ServerConfig
from decode_engine.settings.request_bounds import MAX_NAME_CHARACTERS
from index_store.cli.app import new_group
from index_store.cli.console import print_json
from index_store.cli.options import (
    Characters,
    FormatOption,
    MoveNameOption,
    OutputFormat,
    check_bounds,
    configured,
    parse_ttl,
)
from index_store.cli.report import LabelArguments, labels_text, parse_labels, print_contexts, print_rows
from index_store.errors import InvalidArgumentError

contexts = new_group("Create, show, change, label, pin and remove contexts.")
contexts.command("create")(create_context)
contexts.command("extend")(extend_context)


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
    print_contexts([listed(context) for context in found])


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
    print_rows(detail_rows(found))


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
        typer.echo(f"{id_of(result.context)}: {did}")


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
            id_of(client.update_context(context.name, pinned=pinned))
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
    typer.echo(f"{id_of(changed)}: {labels_text(changed.labels)}")


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

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.ttl != NEVER.value:
            parse_ttl(self.ttl)
        if self.name is None and self.ttl is None:
            raise InvalidArgumentError("expected --name or --ttl, which say what is to change")

    def changes(self) -> ContextChanges:
        """For the server."""
        changes: ContextChanges = {"display_name": self.name, "move_name": self.move_name}
        if self.ttl == NEVER.value:
            changes["expire_time"] = NEVER
        elif (ttl := parse_ttl(self.ttl)) is not None:
            changes["expire_time"] = datetime.now(UTC) + ttl
        return changes


@contexts.command("update")
@configured(UpdateConfig)
def update_context(
    config: UpdateConfig, reference: ReferenceArgument, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Change the name of a context, and when it expires."""
    with Client(config.server, credentials=config.credentials()) as client:
        changed = client.update_context(client.find_context(reference).name, **config.changes())
    if output is OutputFormat.JSON:
        print_json(context_object(changed))
        return
    print_rows(detail_rows(changed))
