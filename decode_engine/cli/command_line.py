"""`decode-engine`: serve stored contexts, ask them and chat, watch the server, list, evaluate and tune methods."""

from __future__ import annotations

from importlib import import_module

from typer import Typer

from index_store.cli.app import GroupedCommand, new_app

_COMMANDS = {
    "serve": "serve_command:serve",
    "ask": "ask_command:ask",
    "chat": "chat_command:chat",
    "contexts": "contexts_command:contexts",
    "operations": "contexts_command:operations",
    "token": "token_command:tokens",
    "status": "status_command:status",
    "tenants": "status_command:tenants",
    "methods": "methods_command:methods",
    "evaluate": "evaluate_command:evaluate_command",
    "make-document": "evaluate_command:make_document_command",
    "tune": "evaluate_command:tune_command",
    "fetch-model": "fetch_model_command:fetch_model",
}
"""By name: the module in this package, and what of it is the command, or the group of commands."""


def commands(word: str = "") -> Typer:
    """The command line. word: the first of what was typed; where it names a command, no other one is imported.

    Modules of commands import nothing that takes seconds: what they need of it they import when they run.
    """
    app = new_app(
        "Serve stored contexts over gRPC, ask and chat, watch the server; list, evaluate and tune methods."
    )
    for name in [word] if word in _COMMANDS else _COMMANDS:
        module, _, what = _COMMANDS[name].partition(":")
        command = getattr(import_module(f"decode_engine.cli.{module}"), what)
        if isinstance(command, Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=GroupedCommand if name == "serve" else None)(command)
    return app
