"""Arguments that name contexts and operations."""

from __future__ import annotations

from typing import Annotated

import typer

ReferenceArgument = Annotated[
    str,
    typer.Argument(metavar="CONTEXT", help="Id, its first 6 or more digits, contexts/<id>, or display name."),
]
RecursiveOption = Annotated[
    bool, typer.Option("--recursive", help="Remove contexts that continue these, too.")
]
ReferenceArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="CONTEXT", help="Ids, their first 6 or more digits, contexts/<id>, or display names."
    ),
]
