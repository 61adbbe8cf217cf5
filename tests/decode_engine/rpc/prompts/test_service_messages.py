"""Messages and tools over the wire: contexts made of them, turns after contexts of either kind, children."""

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
from tests.decode_engine.conftest import TEXT, Library
from tests.support.models import END_TOKEN
from tests.support.serving.front import grpc_of
from tests.support.serving.service import loaded

SYSTEM, USER, ASSISTANT = Role.SYSTEM, Role.USER, Role.ASSISTANT
TOOLS = [{"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": f"Be kind. {END_TOKEN}"},
    {"role": "user", "content": "The lamp of the grey harbour was lit by a keeper who counted ships. " * 6},
    {"role": "assistant", "content": "I have read it."},
]


def prefill(library: Library, document: object, name: str) -> str:
    """Stores a context of messages; returns its id."""
    file = library.store.parent / f"{name}.json"
    file.write_text(json.dumps(document))
    config = PrefillConfig(
        model=str(library.model), store=library.store, messages=file, dense_layers="0", device="cpu"
    )
    return run_job(config, LineReporter(io.StringIO())).manifest.id


@pytest.fixture(scope="module")
def talk(tool_library: Library) -> str:
    return prefill(tool_library, {"messages": MESSAGES, "tools": TOOLS}, "talk")


@pytest.fixture(scope="module")
def plain(tool_library: Library) -> str:
    return tool_library.prefill("plain")


@pytest.fixture(scope="module")
def client(tool_server: DecodeServer, pytestconfig: pytest.Config) -> Iterator[Client]:
    with grpc_of(tool_server, pytestconfig) as address, Client(address) as connected:
        yield connected


@pytest.fixture(scope="module")
def tokenizer(tool_library: Library) -> Tokenizer:
    return load_tokenizer(resolve_model(str(tool_library.model)))


def said(client: Client, id_: str, **prompt: Any) -> tuple[str, int]:
    """The answer in twelve tokens, and the tokens of the prompt."""
    with client.generate(f"contexts/{id_}", max_tokens=12, method="full", **prompt) as generation:
        text = generation.read()
    return text, generation.summary.prompt_tokens


def test_a_context_of_messages_says_so_and_keeps_them(
    tool_library: Library, talk: str, client: Client
) -> None:
    info = client.get_context(f"contexts/{talk}")
    assert (info.is_conversation, info.display_name) == (True, "talk")
    store = Store(tool_library.store)
    assert store.verify(talk) == []
    with store.open(talk) as context:
        kept = json.loads(context.conversation() or b"")
    assert [message["role"] for message in kept["messages"]] == ["system", "user", "assistant"]
    assert kept["messages"][0]["content"] == MESSAGES[0]["content"]


def test_new_turns_follow_the_stored_ones(
    tool_library: Library, talk: str, client: Client, tokenizer: Tokenizer
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
    with Store(tool_library.store).open(talk) as context:
        stored = context.tokens().tolist()
    assert whole[: len(stored)] == stored
    answer, prompt = said(client, talk, messages=turns)
    assert prompt == len(whole) - len(stored)
    assert said(client, talk, token_ids=whole[len(stored) :]) == (answer, prompt)
    asked = said(client, talk, question="Who lit it?")
    assert asked == said(client, talk, messages=turns[:1])


def test_turns_follow_a_context_of_text(plain: str, client: Client, tokenizer: Tokenizer) -> None:
    turns = (Message(USER, "Who?"), Message(ASSISTANT, "He."), Message(USER, "Why?"))
    answer = said(client, plain, messages=turns)
    assert answer == said(client, plain, token_ids=tokenizer.encode_turns(turns))
    assert said(client, plain, question="Who?") == said(client, plain, messages=turns[:1])


def test_a_changed_template_is_refused_with_the_first_token_that_differs(
    tool_library: Library, talk: str, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in tool_library.model.iterdir():
        (changed / file.name).symlink_to(file)
    (changed / "tokenizer_config.json").unlink()
    text = (tool_library.model / "tokenizer_config.json").read_text()
    (changed / "tokenizer_config.json").write_text(text.replace("# Tools", "# Things"))
    with (
        loaded(tool_library.config(model=str(changed))) as server,
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
    tool_library: Library, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "talk.json").write_text(text)
    config = PrefillConfig(
        model=str(tool_library.model), store=tool_library.store, messages=tmp_path / "talk.json"
    )
    with pytest.raises(InvalidArgumentError, match=f"--messages: .*{message}"):
        run_job(config, LineReporter(io.StringIO()))


def test_text_and_messages_are_not_given_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--input and --messages are given, expected one"):
        PrefillConfig(model="reader", store=tmp_path, input=(tmp_path,), messages=tmp_path)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"deep": {"type": "boolean"}, "at": {"enum": ["ship", "lamp"]}},
    "required": ["at"],
    "additionalProperties": False,
}
STRICT_TOOLS = (Tool("look", "Looks.", json.dumps(SCHEMA), strict=True), Tool("wait"))
ASKED = (Message(Role.USER, "Who lit it?"),)
BEGUN = (
    Message(Role.SYSTEM, "Be kind."),
    Message(Role.USER, TEXT),
    Message(Role.ASSISTANT, "I have read it."),
)


@pytest.fixture(scope="module")
def told(client: Client) -> str:
    """A context of messages and tools."""
    made = client.create_context(messages=Conversation(BEGUN, STRICT_TOOLS), display_name="told")
    return made.result().name


def answered(client: Client, context: str, **options: Any) -> tuple[str, Any, str]:
    """What the model says, its calls, and why it ended."""
    with client.generate(context, **{"messages": ASKED, "max_tokens": 120, **options}) as generation:
        text = generation.read()
    return text, generation.tool_calls, generation.summary.finish_reason


def test_messages_without_a_context_continue_the_longest_that_they_begin_with(
    client: Client, told: str
) -> None:
    stored = client.get_context(told).token_count
    whole, options = (*BEGUN, *ASKED), {"method": "full", "max_tokens": 6}
    with client.generate("", messages=whole, tools=STRICT_TOOLS, tool_choice="none", **options) as generation:
        found = generation.read()
    assert generation.summary.cached_tokens == generation.summary.context_tokens == stored
    assert found == answered(client, told, **options)[0]
    for other in ((Message(Role.USER, "Who?"), *whole[1:]), ASKED):
        with client.generate(messages=other, tools=STRICT_TOOLS, tool_choice="none", **options) as generation:
            generation.read()
        assert generation.summary.context_tokens < stored


def test_a_child_of_messages_is_a_conversation(client: Client, told: str) -> None:
    """It answers as a context of all messages, and a child of the child has both."""
    first = (Message(Role.USER, "Who?"), Message(Role.ASSISTANT, "A keeper."))
    second = (Message(Role.USER, "Why?"), Message(Role.ASSISTANT, "So."))
    child = client.create_context(messages=first, parent=told, labels={"turn": "1"}).result()
    again = client.create_context(messages=first, parent=told, display_name="again", labels={"more": "x"})
    assert again.context_name == child.name
    assert again.result().labels == {"turn": "1", "more": "x"}
    last = client.create_context(messages=second, parent=child.name).result()
    assert (child.parent, last.parent, last.is_conversation) == (told, told, True)
    whole = client.create_context(messages=Conversation((*BEGUN, *first, *second), STRICT_TOOLS)).result()
    assert last.token_count == whole.token_count
    assert last.kv_bytes < whole.kv_bytes
    answers = {answered(client, name, method="full", max_tokens=8)[0] for name in (last.name, whole.name)}
    assert len(answers) == 1
