"""`decode-engine`: serve stored contexts, ask them and chat, watch the server, list, evaluate and tune methods."""

from __future__ import annotations

from decode_engine.cli.ask_command import ask
from decode_engine.cli.chat_command import chat
from decode_engine.cli.contexts.contexts_command import contexts
from decode_engine.cli.contexts.operations_command import operations
from decode_engine.cli.evaluate_command import evaluate_command, evaluate_merge_command
from decode_engine.cli.fetch_command import fetch_model_command
from decode_engine.cli.make_document_command import make_document_command
from decode_engine.cli.methods_command import methods
from decode_engine.cli.serving.gateway_command import gateway
from decode_engine.cli.serving.serve_command import serve
from decode_engine.cli.serving.token_command import tokens
from decode_engine.cli.status_command import status
from decode_engine.cli.tune_command import tune_command
from index_store.cli.app import new_app

# Modules of commands import nothing that takes seconds: what they need of it they import when they run.
app = new_app(
    "Serve stored contexts over gRPC, ask and chat, watch the server; list, evaluate and tune methods."
)
app.command("serve")(serve)
app.command("gateway")(gateway)
app.command("ask")(ask)
app.command("chat")(chat)
app.add_typer(contexts, name="contexts")
app.add_typer(operations, name="operations")
app.add_typer(tokens, name="token")
app.command("status")(status)
app.command("methods")(methods)
app.command("evaluate")(evaluate_command)
app.command("evaluate-merge")(evaluate_merge_command)
app.command("fetch-model")(fetch_model_command)
app.command("make-document")(make_document_command)
app.command("tune")(tune_command)
