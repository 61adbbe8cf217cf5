"""The commands `status`, `tenants` and `drain`: what a server does now and did so far, and that it is to end."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from time import sleep
from typing import Annotated, NoReturn

import typer

from decode_engine.errors import ServerUnreachableError
from decode_engine.rpc.client import Client, ServerStatus, TenantLimit, TenantList
from decode_engine.rpc.door.options import ServerConfig
from decode_engine.settings.request_bounds import LONGEST_WAIT_S
from index_store.cli.console import on_terminal, print_json, print_table
from index_store.cli.options import AtLeast, FormatOption, OutputFormat, check_bounds, configured
from index_store.errors import format_bytes

_EVERY_S, _LOOK_S = 1.0, 0.5


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
        found, known = client.server_status(), client.tenants()
    if output is OutputFormat.JSON:
        print_json({**_figures(found), **asdict(known)})
        return
    for line in status_lines(found):
        typer.echo(line)
    if any(each.name for each in known.tenants):
        _tell_tenants(known)


@dataclass(frozen=True, slots=True)
class DrainConfig(ServerConfig):
    """`decode-engine drain`. limit: None for the server's own."""

    limit: Annotated[
        float | None,
        typer.Option(
            "--limit",
            metavar="SECONDS",
            help="For running requests; by default as long as after SIGTERM (--grace).",
        ),
        AtLeast(0, LONGEST_WAIT_S),
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)


@configured(DrainConfig)
def drain(
    config: DrainConfig,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when the server has ended, or at once.")
    ] = True,
) -> None:
    """Have a server take nothing new, and end when nothing runs.

    Its health says so from then on, and running requests go on, for --limit seconds at most. It takes the right admin.
    """
    with Client(config.server, credentials=config.credentials()) as client:
        client.drain(config.limit)
        typer.echo(f"{config.server} is draining")
        while wait and _answers(client):
            sleep(_LOOK_S)
    if wait:
        typer.echo(f"{config.server} has ended")


def _answers(client: Client) -> bool:
    try:
        client.server_status()
    except ServerUnreachableError:
        return False
    return True


@configured(ServerConfig)
def tenants(config: ServerConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """Tell what tenants use of their quotas.

    One's own tenant, or with the right admin all that the quotas name, and others that asked for something lately. Of a
    limit per minute that is told which was used and has not come back yet.
    """
    with Client(config.server, credentials=config.credentials()) as client:
        known = client.tenants()
    if output is OutputFormat.JSON:
        print_json(asdict(known))
    else:
        _tell_tenants(known)


def _tell_tenants(known: TenantList) -> None:
    """A table of tenants, each limit as used/allowed."""
    if known.quotas_problem:
        typer.echo(f"older quotas are in force: {known.quotas_problem}", err=True)
    if not known.tenants:
        typer.echo("No tenant has asked for anything.")
        return
    limits = [each.name for each in known.tenants[0].limits]
    rows = [
        [
            each.name or "-",
            f"{each.weight:g}",
            *(_of_limit(limit) for limit in each.limits),
            str(each.prompt_tokens),
            str(each.generated_tokens),
            str(each.refused),
        ]
        for each in known.tenants
    ]
    heads = [name.replace("_per_minute", "/min").replace("_", " ").upper() for name in limits]
    print_table(("TENANT", "WEIGHT", *heads, "PROMPT TOKENS", "GENERATED", "REFUSED"), rows)


def _of_limit(limit: TenantLimit) -> str:
    show = format_bytes if limit.name.endswith("_bytes") else str
    if limit.allowed is None:
        return show(limit.used) if limit.used else "-"
    return f"{show(limit.used)}/{show(limit.allowed)}"


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
    if found.objects_pending or found.objects_fetching or found.objects_mended or found.objects_problem:
        objects = [
            f"object store: {found.objects_pending} contexts of {_mebibytes(found.objects_pending_bytes)} MiB to be "
            f"uploaded, {found.objects_fetching} being fetched, {found.objects_mended} mended"
            f"{'; ' if found.objects_problem else ''}"
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
        f"{found.unread_answers} answers unread"
        f"{f', {found.audit_lines_lost} missing in the audit log' if found.audit_lines_lost else ''}",
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
