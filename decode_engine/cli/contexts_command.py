"""The commands `contexts ...`: a server's contexts, over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from decode_engine.config import ServerConfig
from decode_engine.rpc.client import Client, ContextInfo, IndexInfo
from index_store.cli.app import new_group
from index_store.cli.console import format_bytes, format_time, on_terminal, print_json, print_table
from index_store.cli.options import FormatOption, OutputFormat, configured
from index_store.cli.report import layers_text

contexts = new_group("List a server's contexts, show, warm and remove them.")

_COLUMNS = ("ID", "NAME", "STATE", "MEMORY", "METHOD", "TOKENS", "KV", "INDEX", "MODEL", "CREATED", "EXPIRES")
_RIGHT = ("TOKENS", "KV", "INDEX")
_OPTIONAL = ("CREATED", "MODEL", "EXPIRES", "METHOD", "INDEX", "KV", "MEMORY", "STATE")

ReferenceArgument = Annotated[
    str,
    typer.Argument(metavar="CONTEXT", help="Id, its first 6 or more digits, contexts/<id>, or display name."),
]
ReferenceArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="CONTEXT", help="Ids, their first 6 or more digits, contexts/<id>, or display names."
    ),
]


@contexts.command("ls")
@configured(ServerConfig)
def list_contexts(config: ServerConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """List the server's contexts, newest first."""
    with Client(config.server) as client:
        found = list(client.list_contexts())
    if output is OutputFormat.JSON:
        print_json({"server": config.server, "contexts": [context_object(context) for context in found]})
        return
    if not found:
        typer.echo(f"The server at {config.server} has no contexts.")
        return
    id_length = 12 if on_terminal() else 64
    print_table(_COLUMNS, [_row(context, id_length) for context in found], right=_RIGHT, optional=_OPTIONAL)


@contexts.command("show")
@configured(ServerConfig)
def show_context(
    config: ServerConfig, reference: ReferenceArgument, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Show all that the server says about a context."""
    with Client(config.server) as client:
        found = client.find_context(reference)
    if output is OutputFormat.JSON:
        print_json(context_object(found))
        return
    rows = _detail_rows(found)
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:<{width}}  {value}")


@contexts.command("warm")
@configured(ServerConfig)
def warm_contexts(
    config: ServerConfig, references: ReferenceArguments, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Load contexts into the server's memory and verify them."""
    with Client(config.server) as client:
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
    config: ServerConfig, references: ReferenceArguments, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Remove contexts from the server's store; none unless all are found."""
    removed = []
    with Client(config.server) as client:
        for context in _find_all(client, references):
            client.delete_context(context.name)
            removed.append(_id(context))
            if output is OutputFormat.TEXT:
                typer.echo(f"removed {removed[-1]}")
    if output is OutputFormat.JSON:
        print_json({"removed": removed})


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
        *((f"index {index.name}", _index_text(index)) for index in context.indexes),
        ("indexes", format_bytes(context.index_bytes)),
        ("methods", ", ".join(context.methods)),
        ("default", f"{default}, tuned" if context.tuned else default),
        ("dense layers", layers_text(context.dense_layers)),
        ("created", format_time(context.create_time)),
        ("expires", format_time(context.expire_time)),
    ]


def _index_text(index: IndexInfo) -> str:
    parameters = ", ".join(f"{name}={value}" for name, value in index.parameters.items()) or "-"
    return f"{index.kind}, {index.bytes_per_token:.1f} bytes per token, {layers_text(index.layers)}, {parameters}"
