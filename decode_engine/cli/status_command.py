"""The command `status`: what a server does now, and did since it started."""

from __future__ import annotations

from dataclasses import asdict

import typer

from decode_engine.rpc.client import Client, ServerStatus
from decode_engine.rpc.door.options import ServerConfig
from index_store.cli.console import print_json
from index_store.cli.options import FormatOption, OutputFormat, configured


@configured(ServerConfig)
def status(config: ServerConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """Tell what a server does now and did so far.

    Requests that wait and run, batches, memory, and counts since it started.
    """
    with Client(config.server, credentials=config.credentials()) as client:
        found = client.server_status()
    if output is OutputFormat.JSON:
        print_json({**asdict(found), "mean_batch": found.mean_batch})
        return
    for line in status_lines(found):
        typer.echo(line)


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
    ]


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f}"
