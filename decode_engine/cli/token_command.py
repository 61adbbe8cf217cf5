"""The commands `token ...`: who may call a server."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from decode_engine.rpc.door.access import TokenFile
from index_store.cli.app import new_group
from index_store.cli.console import format_time, print_json, print_table
from index_store.cli.options import (
    Filled,
    FormatOption,
    OutputFile,
    OutputFormat,
    comma_separated,
    configured,
    parse_ttl,
)
from index_store.store.description.callers import RIGHTS
from index_store.store.description.json_fields import plain

tokens = new_group("Make, list and revoke the tokens of `--tokens`.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenConfig:
    """`decode-engine token`: where the tokens are kept."""

    tokens: Annotated[
        Path,
        Option("--tokens", metavar="FILE", help="The file of tokens, which has their hashes only."),
        Filled(),
        OutputFile(),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokenConfig(TokenConfig):
    """`decode-engine token create`: for whom."""

    tenant: Annotated[
        str, "Whose contexts are there for the token; without it, those of a server that knows no tenants."
    ] = ""
    rights: Annotated[
        tuple[str, ...],
        Option(
            metavar="NAMES",
            help=f"What it may, some of {', '.join(RIGHTS)}, separated by commas; admin: all tenants' contexts, pins, "
            "and the server's status. By default all, with --tenant all but admin.",
        ),
        comma_separated(""),
    ] = ()
    ttl: Annotated[
        str | None,
        Option(
            metavar="TIME",
            help="How long it opens anything, for example 30m, 12h or 90d; for ever by default.",
        ),
    ] = None


@tokens.command("create")
@configured(NewTokenConfig)
def create_token(
    config: NewTokenConfig, name: NameArgument, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Make a token and show it, which happens only once.

    Servers that use the file take it within a second or two. The file is made where there is none.
    """
    ttl = parse_ttl(config.ttl)
    expires_at = None if ttl is None else datetime.now(UTC).replace(microsecond=0) + ttl
    secret = TokenFile(config.tokens).create(name, config.tenant, config.rights, expires_at)
    if output is OutputFormat.JSON:
        print_json({"name": name, "token": secret})
    else:
        typer.echo(secret)


@tokens.command("list")
@configured(TokenConfig)
def list_tokens(config: TokenConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """List the tokens by their names."""
    found = TokenFile(config.tokens).read()
    if output is OutputFormat.JSON:
        names = ("name", "tenant", "rights", "created_at", "expires_at")
        print_json({"tokens": [{name: plain(getattr(token, name)) for name in names} for token in found]})
    elif not found:
        typer.echo(f"{config.tokens} has no tokens: nobody is let in.")
    else:
        rows = [
            [
                token.name,
                token.tenant or "-",
                ",".join(token.rights),
                format_time(token.created_at),
                "never" if token.expires_at is None else format_time(token.expires_at),
            ]
            for token in found
        ]
        print_table(("NAME", "TENANT", "RIGHTS", "CREATED", "EXPIRES"), rows)


@tokens.command("revoke")
@configured(TokenConfig)
def revoke_token(config: TokenConfig, name: NameArgument, output: FormatOption = OutputFormat.TEXT) -> None:
    """Let in no longer who shows a token.

    Servers that use the file know within a second or two.
    """
    TokenFile(config.tokens).revoke(name)
    if output is OutputFormat.JSON:
        print_json({"revoked": name})
    else:
        typer.echo(f"revoked {name}")
