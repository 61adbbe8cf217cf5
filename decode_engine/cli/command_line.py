"""`decode-engine`: serve stored contexts, ask them, watch the server, list, evaluate and tune methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from decode_engine.cli.ask_command import ask
from decode_engine.cli.methods_command import methods
from decode_engine.cli.serve_command import serve
from decode_engine.cli.status_command import status


def _evaluate() -> Callable[..., None]:
    from decode_engine.cli.evaluate_command import evaluate_command

    return evaluate_command


def _evaluate_merge() -> Callable[..., None]:
    from decode_engine.cli.evaluate_command import evaluate_merge_command

    return evaluate_merge_command


def _make_document() -> Callable[..., None]:
    from decode_engine.cli.make_document_command import make_document_command

    return make_document_command


def _tune() -> Callable[..., None]:
    from decode_engine.cli.tune_command import tune_command

    return tune_command


# Commands whose modules are imported only when they are used: they take seconds, an answer takes milliseconds.
_LAZY: Mapping[str, Callable[[], Callable[..., None]]] = {
    "evaluate": _evaluate,
    "evaluate-merge": _evaluate_merge,
    "make-document": _make_document,
    "tune": _tune,
}


class _Commands(TyperGroup):
    """The commands, those of _LAZY included."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_LAZY]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _LAZY:
            return super().get_command(ctx, cmd_name)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name)(_LAZY[cmd_name]())
        return get_command(alone)


app = typer.Typer(
    cls=_Commands,
    help="Serve stored contexts over gRPC, ask them questions, watch the server, list, evaluate and tune methods.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve)
app.command("ask")(ask)
app.command("methods")(methods)
app.command("status")(status)
