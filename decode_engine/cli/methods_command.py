"""The command `methods`: how keys can be found, with parameters and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Annotated

import typer

from decode_engine.rpc.client import Client, MethodInfo, MethodList
from decode_engine.rpc.door.options import CredentialOptions
from index_store.cli.console import print_json, print_table
from index_store.cli.options import MODELS, Address, Filled, FormatOption, OutputFormat, configured
from index_store.errors import InvalidArgumentError

_USUAL_HEAD_DIM, _USUAL_DTYPE = 128, "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodsConfig(CredentialOptions):
    """`decode-engine methods`: whose sizes are shown; at most one of the two is given."""

    server: Annotated[str | None, "List the methods of this server, with sizes for its model.", Address()] = (
        None
    )
    model: Annotated[str | None, f"Sizes for this model: {MODELS}.", Filled()] = None

    def __post_init__(self) -> None:
        if self.server is not None and self.model is not None:
            raise InvalidArgumentError("--server and --model are given, expected at most one of them")


@configured(MethodsConfig)
def methods(config: MethodsConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """List methods, their parameters, the size of their indexes.

    Sizes are for the model that --model or --server name, otherwise for heads of 128 dimensions in bfloat16.
    """
    from index_store.methods.default import DEFAULT_METHOD
    from index_store.methods.presets import METHODS

    listed = _local_methods(config.model) if config.server is None else _server_methods(config)
    if output is OutputFormat.JSON:
        print_json(asdict(listed))
        return
    columns = ("method", "index", "keeps", "remainder", "bytes")
    print_table(columns, [_row(method) for method in listed.methods], right=("bytes",))
    typer.echo(
        f"\nBytes of the indexes per token, KV head and layer, for heads of {listed.head_dim} dimensions. "
        f"Keys and values in {listed.dtype} take {listed.kv_bytes_per_token:g}."
    )
    typer.echo(
        f"{DEFAULT_METHOD} is the default of contexts; requests that name no method get it, or full where that takes "
        "less time. oracle is for evaluation alone: its search costs more than full."
    )
    for method in listed.methods:
        typer.echo(f"\n{method.name}: {method.summary}")
        typer.echo(f"  source: {method.source}")
        for line in _parameter_lines(method):
            typer.echo(f"  {line}")
        known = METHODS.get(method.name)
        if known is not None and (reason := known.misfit(listed.head_dim)):
            typer.echo(f"  does not fit: {reason}")


def _row(method: MethodInfo) -> list[str]:
    remainder = method.remainder or "-"
    if method.partition not in ("", method.index):
        remainder += f" over {method.partition}" + (", if stored" if method.remainder_optional else "")
    return [
        method.name,
        method.index or "-",
        method.budget or "every key",
        remainder,
        f"{method.bytes_per_token:.1f}",
    ]


def _parameter_lines(method: MethodInfo) -> Iterator[str]:
    """One line for every owner of parameters: an index, the search, the budget, the method itself."""

    def owner(name: str) -> str:
        return name.rpartition(".")[0]

    for group, names in groupby(sorted(method.parameters, key=lambda name: (not owner(name), name)), owner):
        values = [f"{name.rpartition('.')[2]} {method.parameters[name]}" for name in names]
        yield f"{group or 'attended'}: {', '.join(values)}"


def _local_methods(model: str | None) -> MethodList:
    from decode_engine.rpc.client.replies import read_reply
    from decode_engine.rpc.describe import describe_methods

    if model is None:
        return read_reply(MethodList, describe_methods(_USUAL_HEAD_DIM, _USUAL_DTYPE))
    from index_store.models.loading import checkpoint_dtype, identify, resolve_model

    folder = resolve_model(model)
    return read_reply(MethodList, describe_methods(identify(folder).head_dim, checkpoint_dtype(folder)))


def _server_methods(config: MethodsConfig) -> MethodList:
    with Client(config.server or "", credentials=config.credentials()) as client:
        return client.list_methods()
