"""The commands `token ...`: who may call a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from decode_engine.rpc.door.access import TokenFile
from index_store.cli.app import new_group
from index_store.cli.console import format_time, print_json, print_table
from index_store.cli.options import Filled, FormatOption, OutputFile, OutputFormat, configured

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


@tokens.command("create")
@configured(TokenConfig)
def create_token(config: TokenConfig, name: NameArgument, output: FormatOption = OutputFormat.TEXT) -> None:
    """Make a token and show it, which happens only once.

    Servers that use the file take it within a second or two. The file is made where there is none.
    """
    secret = TokenFile(config.tokens).create(name)
    if output is OutputFormat.JSON:
        print_json({"name": name, "token": secret})
    else:
        typer.echo(secret)


@tokens.command("list")
@configured(TokenConfig)
def list_tokens(config: TokenConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """List the names of the tokens."""
    found = TokenFile(config.tokens).read()
    if output is OutputFormat.JSON:
        listed = [{"name": token.name, "created_at": token.created_at.isoformat()} for token in found]
        print_json({"tokens": listed})
    elif not found:
        typer.echo(f"{config.tokens} has no tokens: nobody is let in.")
    else:
        print_table(("NAME", "CREATED"), [[token.name, format_time(token.created_at)] for token in found])


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
