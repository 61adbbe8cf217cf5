"""`decode-engine`: serve stored contexts, ask them, watch the server, list, evaluate and tune methods."""

from __future__ import annotations

from decode_engine.cli.ask_command import ask
from decode_engine.cli.contexts_command import contexts
from decode_engine.cli.evaluate_command import evaluate_command, evaluate_merge_command
from decode_engine.cli.make_document_command import make_document_command
from decode_engine.cli.methods_command import methods
from decode_engine.cli.serve_command import serve
from decode_engine.cli.status_command import status
from decode_engine.cli.tune_command import tune_command
from index_store.cli.app import new_app

# Modules of commands import nothing that takes seconds: what they need of it they import when they run.
app = new_app(
    "Serve stored contexts over gRPC, ask them questions, watch the server; list, evaluate and tune methods."
)
app.command("serve")(serve)
app.command("ask")(ask)
app.add_typer(contexts, name="contexts")
app.command("status")(status)
app.command("methods")(methods)
app.command("evaluate")(evaluate_command)
app.command("evaluate-merge")(evaluate_merge_command)
app.command("make-document")(make_document_command)
app.command("tune")(tune_command)
