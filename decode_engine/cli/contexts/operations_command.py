"""The commands `operations ...`: contexts that a server's workers make, or made."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from decode_engine.cli.asking.operation_progress import operation_progress
from decode_engine.cli.contexts.shown import operation_object, operation_rows, print_operations
from decode_engine.rpc.client import Client, OperationInfo
from decode_engine.rpc.door.options import ServerConfig
from index_store.cli.app import new_group
from index_store.cli.console import print_json, reporter_for
from index_store.cli.options import FormatOption, OutputFormat, QuietOption, configured
from index_store.cli.report import print_rows

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
    if output is OutputFormat.JSON:
        print_json({"removed": [_name(operation)]})
    else:
        typer.echo(f"removed {_name(operation)}")
