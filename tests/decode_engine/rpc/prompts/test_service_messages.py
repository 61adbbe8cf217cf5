"""Messages over the wire: contexts that were made of them, and turns after contexts of either kind."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from index_store.cli.console import LineReporter
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Conversation, Message, Role, Tool
from index_store.models.loading import resolve_model
from index_store.models.tokenizer import Tokenizer, load_tokenizer
from index_store.store.catalog import Store
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import run_job
from tests.decode_engine.conftest import Library, make_library
from tests.support.models import END_TOKEN
from tests.support.serving.chat import WITH_TOOLS
from tests.support.serving.service import loaded

SYSTEM, USER, ASSISTANT = Role.SYSTEM, Role.USER, Role.ASSISTANT
TOOLS = [{"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": f"Be kind. {END_TOKEN}"},
    {"role": "user", "content": "The lamp of the grey harbour was lit by a keeper who counted ships. " * 6},
    {"role": "assistant", "content": "I have read it."},
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A library whose model has a chat template with tools."""
    library = make_library(tmp_path_factory.mktemp("chat"))
    settings = json.loads((library.model / "tokenizer_config.json").read_text())
    settings["chat_template"] = WITH_TOOLS
    (library.model / "tokenizer_config.json").write_text(json.dumps(settings))
    return library


def prefill(library: Library, document: object, name: str) -> str:
    """Stores a context of messages; returns its id."""
    file = library.store.parent / f"{name}.json"
    file.write_text(json.dumps(document))
    config = PrefillConfig(
        model=str(library.model), store=library.store, messages=file, dense_layers="0", device="cpu"
    )
    return run_job(config, LineReporter(io.StringIO())).manifest.id


@pytest.fixture(scope="module")
def talk(chat: Library) -> str:
    return prefill(chat, {"messages": MESSAGES, "tools": TOOLS}, "talk")


@pytest.fixture(scope="module")
def plain(chat: Library) -> str:
    return chat.prefill("plain")


@pytest.fixture(scope="module")
def chat_server(chat: Library, talk: str, plain: str) -> Iterator[DecodeServer]:
    with loaded(chat.config()) as started:
        yield started


@pytest.fixture
def chat_client(chat_server: DecodeServer) -> Iterator[Client]:
    with Client(chat_server.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def tokenizer(chat: Library) -> Tokenizer:
    return load_tokenizer(resolve_model(str(chat.model)))


def said(client: Client, id_: str, **prompt: Any) -> tuple[str, int]:
    """The answer in twelve tokens, and the tokens of the prompt."""
    with client.generate(f"contexts/{id_}", max_tokens=12, method="full", **prompt) as generation:
        text = generation.read()
    return text, generation.summary.prompt_tokens


def test_a_context_of_messages_says_so_and_keeps_them(chat: Library, talk: str, chat_client: Client) -> None:
    info = chat_client.get_context(f"contexts/{talk}")
    assert (info.is_conversation, info.display_name) == (True, "talk")
    store = Store(chat.store)
    assert store.verify(talk) == []
    with store.open(talk) as context:
        kept = json.loads(context.conversation() or b"")
    assert [message["role"] for message in kept["messages"]] == ["system", "user", "assistant"]
    assert kept["messages"][0]["content"] == MESSAGES[0]["content"]


def test_new_turns_follow_the_stored_ones(
    chat: Library, talk: str, chat_client: Client, tokenizer: Tokenizer
) -> None:
    """The same answer as to the tokens of the whole conversation; a question is one message of a user."""
    turns = (
        Message(USER, "Who lit it?"),
        Message(ASSISTANT, "A keeper."),
        Message(USER, f"Why? {END_TOKEN}"),
    )
    before = tuple(Message(Role(message["role"]), message["content"]) for message in MESSAGES)
    whole = tokenizer.encode_conversation(
        Conversation((*before, *turns), (Tool("look", "Looks.", '{"type": "object", "properties": {}}'),)),
        answer_follows=True,
    )
    with Store(chat.store).open(talk) as context:
        stored = context.tokens().tolist()
    assert whole[: len(stored)] == stored
    answer, prompt = said(chat_client, talk, messages=turns)
    assert prompt == len(whole) - len(stored)
    assert said(chat_client, talk, token_ids=whole[len(stored) :]) == (answer, prompt)
    asked = said(chat_client, talk, question="Who lit it?")
    assert asked == said(chat_client, talk, messages=turns[:1])


def test_turns_follow_a_context_of_text(plain: str, chat_client: Client, tokenizer: Tokenizer) -> None:
    turns = (Message(USER, "Who?"), Message(ASSISTANT, "He."), Message(USER, "Why?"))
    answer = said(chat_client, plain, messages=turns)
    assert answer == said(chat_client, plain, token_ids=tokenizer.encode_turns(turns))
    assert said(chat_client, plain, question="Who?") == said(chat_client, plain, messages=turns[:1])


def test_a_changed_template_is_refused_with_the_first_token_that_differs(
    chat: Library, talk: str, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in chat.model.iterdir():
        (changed / file.name).symlink_to(file)
    (changed / "tokenizer_config.json").unlink()
    text = (chat.model / "tokenizer_config.json").read_text()
    (changed / "tokenizer_config.json").write_text(text.replace("# Tools", "# Things"))
    with (
        loaded(chat.config(model=str(changed))) as server,
        Client(server.address) as client,
        pytest.raises(InvalidArgumentError) as caught,
    ):
        said(client, talk, question="Who?")
    assert "the conversation does not begin with the context's tokens: token " in caught.value.message
    assert "('h') with these messages" in caught.value.message
    assert "('o') in the context" in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "talk.json is not JSON"),
        ('{"messages": []}', "messages: found 0 messages, expected 1 to 4096"),
        ('[{"role": "user", "content": 3}]', r"messages\[0\].content: found a value of type int"),
        (
            '[{"role": "king", "content": "a"}]',
            r"messages\[0\].role: found 'king', expected one of system, developer",
        ),
        ('[{"role": "user", "content": "a", "mood": 1}]', r"messages\[0\]: found a member 'mood'"),
        ('[{"role": "user", "content": "\\ud800"}]', r"messages\[0\].content: found half a character at 0"),
    ],
)
def test_a_file_of_messages_that_cannot_be_used_is_told(
    chat: Library, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "talk.json").write_text(text)
    config = PrefillConfig(model=str(chat.model), store=chat.store, messages=tmp_path / "talk.json")
    with pytest.raises(InvalidArgumentError, match=f"--messages: .*{message}"):
        run_job(config, LineReporter(io.StringIO()))


def test_text_and_messages_are_not_given_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--input and --messages are given, expected one"):
        PrefillConfig(model="reader", store=tmp_path, input=(tmp_path,), messages=tmp_path)
