"""Conversations that are kept: one context, of all turns."""

from __future__ import annotations

import io
import json
import sys

import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from tests.decode_engine.cli.conftest import Run


def test_a_conversation_is_kept_as_one_context(
    run: Run, server: DecodeServer, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who lit it?\nAnd when?\n"))
    place = ("--server", server.address)
    said = run(
        "chat", lamp, "--keep-as", "talk", "--max-tokens", "6", "--method", "full", "--format", "json", *place
    )
    assert said.returncode == 0, said.stderr
    document = json.loads(said.stdout)
    with Client(server.address) as client:
        children = [context for context in client.list_contexts() if context.parent == lamp]
        assert [(child.name, child.display_name) for child in children] == [(document["kept"], "talk")]
        summary = document["turns"][1]["summary"]
        context_tokens = summary["context_tokens"] + summary["prompt_tokens"] + summary["completion_tokens"]
        assert children[0].token_count == context_tokens
        with client.generate(document["kept"], question="Where?", max_tokens=3) as generation:
            generation.read()
        client.delete_context(document["kept"])
