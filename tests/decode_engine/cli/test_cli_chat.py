"""`chat` through a pipe and with interruptions, conversations that are kept, and what `contexts` notes of a context."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from decode_engine.cli import chat_command
from decode_engine.rpc.client import Client, Piece, Usage
from decode_engine.rpc.server import DecodeServer
from index_store.models.conversation.messages import Message, Role
from tests.decode_engine.cli.conftest import Run
from tests.decode_engine.conftest import Library

CHAT = ("chat", "lamp", "--max-tokens", "4", "--method", "full")


@pytest.fixture(autouse=True)
def chat_server(monkeypatch: pytest.MonkeyPatch, server: DecodeServer, lamp: str) -> None:
    monkeypatch.setenv("SPARSEKV_SERVER", server.address)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def answer(client: Client, context: str, messages: list[Message]) -> str:
    with client.generate(context, messages=messages, max_tokens=4, method="full") as generation:
        return generation.read()


def test_a_conversation_goes_on_line_by_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, client: Client, lamp: str
) -> None:
    first = [Message(Role.USER, "Who lit\nit?")]
    one = answer(client, lamp, first)
    second = [*first, Message(Role.ASSISTANT, one), Message(Role.USER, "Why\n\nso?")]
    two = answer(client, lamp, second)
    type_in(monkeypatch, '/usage\nWho lit\\\nit?\n\n/help\n"""Why\n\nso?"""\n/usage\n/quit\nnever said\n')
    result = run(*CHAT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{one}\n{two}\n"
    assert "nothing was said yet" in result.stderr
    assert "Ctrl-C stops an answer" in result.stderr
    assert (
        "of conversation, 4 of the last answer, which touched 100.00% of the keys (full); 2 messages"
        in result.stderr
    )


def test_a_conversation_as_json(run: Run, monkeypatch: pytest.MonkeyPatch, client: Client, lamp: str) -> None:
    """The input may end in the middle of a text of several lines."""
    type_in(monkeypatch, 'Who?\n"""Why')
    said = json.loads(run(*CHAT, "--format", "json").stdout)
    assert said["context"] == lamp
    assert [turn["user"] for turn in said["turns"]] == ["Who?", "Why"]
    assert said["turns"][0]["assistant"] == answer(client, lamp, [Message(Role.USER, "Who?")])
    assert said["turns"][1]["summary"]["completion_tokens"] == 4


def test_an_error_ends_a_conversation_in_a_pipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "Who?\nWhy?\n")
    result = run("chat", "lamp", "--method", "nonsense")
    assert (result.returncode, result.stderr.count("error: ")) == (2, 1)
    type_in(monkeypatch, "/dance\nWho?\n")
    result = run(*CHAT)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: /dance is no command; /help lists them\n"


def test_an_interrupt_ends_the_answer_and_not_the_conversation(
    run: Run, monkeypatch: pytest.MonkeyPatch, client: Client, lamp: str
) -> None:
    """What was said of the stopped answer is part of the conversation."""
    asked: list[list[Message]] = []

    class Interrupted(Client):
        def generate(self, context: str, **given: Any) -> Any:
            asked.append(list(given["messages"]))
            generation = super().generate(context, **given)
            return _Stopped(generation) if len(asked) == 1 else generation

    monkeypatch.setattr(chat_command, "Client", Interrupted)
    type_in(monkeypatch, "Who?\n/usage\nWhy?\n")
    result = run(*CHAT)
    assert result.returncode == 0, result.stderr
    assert "(stopped)" in result.stderr
    assert "of the last answer, which was stopped; 1 messages" in result.stderr
    begun = asked[1][1]
    assert begun.role is Role.ASSISTANT
    assert answer(client, lamp, asked[0]).startswith(begun.content)
    assert result.stdout == f"{begun.content}\n{answer(client, lamp, asked[1])}\n"


class _Stopped:
    """A generation in whose middle somebody presses Ctrl-C."""

    def __init__(self, generation: Any) -> None:
        self._generation = generation

    def __enter__(self) -> _Stopped:
        return self

    def __exit__(self, *error: object) -> None:
        self._generation.cancel()

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._generation:
            yield piece
            if piece.text.strip():
                raise KeyboardInterrupt

    def cancel(self) -> None:
        self._generation.cancel()

    @property
    def usage(self) -> Usage | None:
        return self._generation.usage  # type: ignore[no-any-return]


def test_contexts_are_pinned_labelled_and_chosen(run: Run, library: Library, client: Client) -> None:
    ids = {name: library.prefill(name) for name in ("shown", "hidden")}
    assert run("contexts", "pin", "shown").stdout == f"pinned {ids['shown']}\n"
    assert (
        run("contexts", "label", "shown", "team=law", "year=2026").stdout
        == f"{ids['shown']}: team=law, year=2026\n"
    )
    changed = json.loads(run("contexts", "label", "shown", "year-", "place=x", "--format", "json").stdout)
    assert (changed["labels"], changed["pinned"]) == ({"place": "x", "team": "law"}, True)
    rows = dict(line.split("  ", 1) for line in run("contexts", "show", "shown").stdout.splitlines())
    assert (rows["labels"].strip(), rows["expires"].strip()) == (
        "place=x, team=law",
        "pinned; otherwise never",
    )
    listed = run(
        "contexts", "ls", "--filter", "pinned = true AND labels.team = law", "--order-by", "token_count"
    )
    assert [line.split()[1] for line in listed.stdout.splitlines()] == ["NAME", "shown"]
    assert "has no contexts that fit" in run("contexts", "ls", "--filter", "labels:nowhere").stdout
    refused = run("contexts", "ls", "--filter", "colour = red")
    assert (refused.returncode, refused.stderr.startswith("error: filter: at character 1 found")) == (2, True)
    assert json.loads(run("contexts", "unpin", "shown", "--format", "json").stdout) == {
        "unpinned": [ids["shown"]]
    }
    assert (
        run("contexts", "label", "shown", "law").stderr
        == "error: label 'law': expected KEY=VALUE, or KEY- to remove it\n"
    )
    for id_ in ids.values():
        client.delete_context(f"contexts/{id_}")


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
