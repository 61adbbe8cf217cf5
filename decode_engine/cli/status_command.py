"""The command `status`: what a server does now, and did since it started."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from time import sleep
from typing import Annotated, NoReturn

import typer

from decode_engine.errors import ServerUnreachableError
from decode_engine.rpc.client import Client, ServerStatus
from decode_engine.rpc.door.options import ServerConfig
from index_store.cli.console import on_terminal, print_json
from index_store.cli.options import FormatOption, OutputFormat, configured

_EVERY_S = 1.0


@configured(ServerConfig)
def status(
    config: ServerConfig,
    output: FormatOption = OutputFormat.TEXT,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Tell it again every second, until interrupted; the server may restart."
        ),
    ] = False,
) -> None:
    """Tell what a server does now and did so far.

    Requests that wait and run, batches, memory, and counts since it started.
    """
    with Client(config.server, credentials=config.credentials()) as client:
        if watch:
            _watch(client, output)
        found = client.server_status()
    if output is OutputFormat.JSON:
        print_json(_figures(found))
        return
    for line in status_lines(found):
        typer.echo(line)


def _figures(found: ServerStatus) -> dict[str, object]:
    return {**asdict(found), "mean_batch": found.mean_batch}


def _watch(client: Client, output: OutputFormat) -> NoReturn:
    """Tells the status every second: JSON on a line each, text in place of the one before on a terminal."""
    before: ServerStatus | None = None
    while True:
        try:
            found = client.server_status()
        except ServerUnreachableError as error:
            typer.echo(error.message, err=True)
            before = None
        else:
            if output is OutputFormat.JSON:
                typer.echo(json.dumps(_figures(found)))
            else:
                lines = [*rate_lines(found, before), *status_lines(found)]
                typer.echo(("\x1b[H\x1b[J" if on_terminal() else "") + "\n".join(lines))
            sys.stdout.flush()
            before = found
        sleep(_EVERY_S)


def rate_lines(found: ServerStatus, before: ServerStatus | None) -> list[str]:
    """What was done since the status before, which was a second ago."""
    if before is None or found.steps < before.steps:  # it was started again
        return []
    decoded, read = found.decode_tokens - before.decode_tokens, found.prompt_tokens - before.prompt_tokens
    return [f"in the last second: {decoded} tokens decoded, {read} of prompts read"]


def status_lines(found: ServerStatus) -> list[str]:
    """A server's status in a few lines."""
    placed = ""
    if found.context_device_limit_bytes:
        placed = (
            f"; of these {_mebibytes(found.context_device_bytes)} of "
            f"{_mebibytes(found.context_device_limit_bytes)} MiB in device memory"
        )
    moved = []
    if found.host_bytes_read or found.rows_reused:
        moved = [
            f"of contexts in host memory: {_mebibytes(found.host_bytes_read)} MiB read by the device, "
            f"{found.rows_reused} rows found on it; requests waited {found.device_wait_for_host_ns / 1e6:.0f} ms "
            "for the host in sum, each of a batch as long as the batch"
        ]
    objects = []
    if found.objects_pending or found.objects_fetching or found.objects_problem:
        objects = [
            f"object store: {found.objects_pending} contexts of {_mebibytes(found.objects_pending_bytes)} MiB to be "
            f"uploaded, {found.objects_fetching} being fetched{'; ' if found.objects_problem else ''}"
            f"{found.objects_problem}"
        ]
    loading = found.requests - found.waiting - found.prompting - found.decoding
    return [
        f"requests: {found.decoding} decoding, {found.prompting} reading their prompts, {found.waiting} waiting, "
        f"{loading} loading their contexts",
        f"sessions: {_mebibytes(found.session_bytes)} of {_mebibytes(found.session_limit_bytes)} MiB spoken for",
        f"contexts: {found.contexts} in {_mebibytes(found.context_bytes)} of "
        f"{_mebibytes(found.context_limit_bytes)} MiB, {_mebibytes(found.context_used_bytes)} of them in use{placed}",
        f"calls: {found.open_calls} open, {found.unfinished_calls} of them without their message, "
        f"{found.unread_answers} answers unread",
        f"since the start: {found.prompt_tokens} prompt tokens, {found.decode_tokens} decoded in batches of "
        f"{found.mean_batch:.1f} (latest {found.decode_batch}), {found.steps} steps",
        f"contexts since the start: {found.context_loads} loaded, {found.context_hits} found in memory, "
        f"{found.context_evictions} dropped for others",
        f"without a context since the start: {found.plain_requests} requests, {found.found_beginnings} over a stored "
        f"beginning of {found.found_tokens} tokens in all; {found.kept_beginnings} beginnings kept, "
        f"{found.removed_beginnings} removed for others",
        *(f"methods: {line}" for line in found.method_choices),
        *moved,
        *objects,
    ]


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f}"
