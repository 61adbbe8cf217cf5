"""The Python client: references, errors, retries and its connection to nobody."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from typing import Any

import pytest
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message as ProtoMessage
from google.protobuf.message_factory import GetMessageClass

from decode_engine.errors import DeadlineExceededError, InternalError, ServerUnreachableError
from decode_engine.rpc.client import AsyncClient, Client, Keep, verbs
from decode_engine.rpc.client.replies import read_reply
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Message, Role, Tool, ToolCall
from sparsekv.v1 import values
from sparsekv.v1.values import OperationState
from tests.decode_engine.rpc.client.conftest import IDS, Scripted


def test_references_are_resolved_by_the_server_in_one_call(scripted: tuple[Scripted, Client]) -> None:
    servicer, client = scripted
    servicer.calls += ["started"] * 2
    found = client.find_context("the book of c")
    assert (found.name, found.display_name) == ("contexts/" + IDS[2], "the book of c")
    assert servicer.calls[2:] == ["GetContext"]


def test_calls_that_change_nothing_are_repeated(scripted: tuple[Scripted, Client]) -> None:
    servicer, client = scripted
    assert client.get_context("contexts/x").name == "contexts/x"
    assert servicer.calls == ["GetContext"] * 3


def test_calls_that_change_something_are_not_repeated(scripted: tuple[Scripted, Client]) -> None:
    servicer, client = scripted
    with pytest.raises(ServerUnreachableError):
        client.delete_context("contexts/x")
    assert servicer.calls == ["DeleteContext"]


def test_deadline_of_the_client(scripted: tuple[Scripted, Client]) -> None:
    with Client(scripted[1]._address, timeout_s=0.5) as hasty, pytest.raises(DeadlineExceededError):
        hasty.warm_context("contexts/x")  # which is not answered before the test ends


def test_foreign_errors_keep_code_and_message(scripted: tuple[Scripted, Client]) -> None:
    with pytest.raises(InternalError, match="PERMISSION_DENIED: not for you"):
        scripted[1].list_methods()


def test_nobody_answers() -> None:
    with Client("127.0.0.1:1") as client:
        assert not client.is_serving()
        with pytest.raises(ServerUnreachableError, match="decode-engine serve"):
            list(client.list_contexts())
        with pytest.raises(ServerUnreachableError):
            client.generate("contexts/x", text="a").read()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"text": "a", "question": "b"},
        {"token_ids": [1], "text": "a"},
        {"text": "a", "keep_ratio": 0.1, "target_mass": 0.9},
        {"text": "a", "keep_ratio": 0.1, "token_budget": 10},
    ],
)
def test_requests_that_cannot_be_sent(arguments: dict[str, Any]) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError):
        client.generate("contexts/x", **arguments)


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda client: client.generate("contexts/x", text="a", logit_bias={1: 10**400}), "logit_bias"),
        (lambda client: client.generate("contexts/x", text="a", temperature=10**400), "temperature"),
        (
            lambda client: client.update_context(
                "x", expire_time=datetime.fromisoformat("0001-01-01T00:00:00+23:59")
            ),
            "expire_time",
        ),
        (
            lambda client: client.update_context(
                "x", expire_time=datetime.fromisoformat("9999-12-31T23:59:59-23:59")
            ),
            "expire_time",
        ),
    ],
)
def test_numbers_and_times_too_large_for_a_message_name_their_field(
    ask: Callable[[Client], object], field: str
) -> None:
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(InvalidArgumentError, match=f"^{field} is ") as caught,
    ):
        ask(client)
    assert caught.value.metadata["field"] == field


def test_both_clients_have_the_same_verbs() -> None:
    def verbs(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(verb).parameters)
            for name, verb in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name != "run"
        }

    assert verbs(Client) == verbs(AsyncClient)


def test_an_answer_begins_again_where_no_server_took_it(scripted: tuple[Scripted, Client]) -> None:
    servicer, client = scripted
    servicer.refusals = 2
    assert client.generate("contexts/x", text="a").read() == "hello"
    assert servicer.calls == ["Generate"] * 3
    with pytest.raises(ServerUnreachableError, match="stopped before the answer was complete"):
        client.generate("contexts/x", text="breaks off").read()
    assert servicer.calls == ["Generate"] * 4
    servicer.refusals = 9
    with pytest.raises(ServerUnreachableError, match="starting"):
        client.generate("contexts/x", text="a").read()
    assert servicer.calls == ["Generate"] * 8


def test_a_batch_begins_again_where_no_server_took_it(scripted: tuple[Scripted, Client]) -> None:
    servicer, client = scripted
    servicer.refusals = 2
    items = list(client.batch_generate("contexts/x", [{"text": "a"}]))
    assert [(item.index, item.texts) for item in items] == [(0, ("hello",))]
    servicer.refusals = 9
    with pytest.raises(ServerUnreachableError, match="starting"):
        list(client.batch_generate("contexts/x", [{"text": "a"}]))
    assert servicer.calls == ["BatchGenerate"] * 7


def test_a_batch_brings_calls_and_log_probabilities_as_an_answer_does(
    scripted: tuple[Scripted, Client],
) -> None:
    [item] = scripted[1].batch_generate("contexts/x", [{"text": "a"}])
    assert (item.texts, item.token_ids) == (("hello",), ((3, 4),))
    assert item.tool_calls == ((ToolCall("look", '{"at":1}', "c"),),)
    assert [[each.token_id for each in own] for own in item.logprobs] == [[3, 4]]
    assert [each.token_id for each in item.prompt_logprobs] == [3, 4]


def test_the_asynchronous_client_reads_cancels_and_fails_like_the_other(
    scripted: tuple[Scripted, Client],
) -> None:
    client = scripted[1]

    async def use() -> None:
        async with AsyncClient(client._address, timeout_s=60) as asynchronous:
            assert (await asynchronous.get_context("contexts/x")).name == "contexts/x"
            listed = [context.name async for context in asynchronous.list_contexts()]
            assert listed == [f"contexts/{id_}" for id_ in IDS]
            async with asynchronous.generate("contexts/x", text="a") as generation:
                assert await generation.read() == "hello"
                assert generation.summary.completion_tokens == 3
            with pytest.raises(ServerUnreachableError):
                await asynchronous.delete_context("contexts/x")
            with pytest.raises(InternalError, match="PERMISSION_DENIED: not for you"):
                await asynchronous.list_methods()
            assert not await asynchronous.is_serving()

    asyncio.run(use())


HALF = "a\ud800b"
SAID = Message(Role.USER, HALF)
TOOL = {"messages": [Message(Role.USER, "x")], "tools": [Tool(HALF)]}


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.get_context(HALF),
        lambda client: next(client.list_contexts(name_prefix=HALF)),
        lambda client: client.create_context(HALF),
        lambda client: client.create_context(HALF * 2**21),  # which would be uploaded
        lambda client: client.create_context("x", labels={"a": HALF}),
        lambda client: client.create_context(messages=[SAID]),
        lambda client: client.count_tokens([SAID]),
        lambda client: client.update_context("contexts/x", labels={HALF: None}),
        lambda client: client.generate(HALF, text="x"),
        lambda client: client.generate("contexts/x", messages=[SAID]),
        lambda client: client.generate("contexts/x", **TOOL),
        lambda client: client.generate("contexts/x", text="x", keep=Keep(HALF)),
        lambda client: client.generate("contexts/x", text="x", choices=[HALF]),
        lambda client: client.batch_generate("contexts/x", [{"text": HALF}]),
    ],
)
def test_text_that_is_no_text_is_named(ask: Callable[[Client], object]) -> None:
    match = r"which no request can carry|half a character"
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError, match=match) as caught:
        ask(client)
    assert caught.value.metadata["field"]


def test_of_many_messages_the_one_that_does_not_fit_is_named() -> None:
    turns = [Message(Role.USER, "x"), SAID]
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(InvalidArgumentError, match=r"^messages\[1\]\.content"),
    ):
        client.generate("contexts/x", messages=turns)


def test_a_request_larger_than_servers_take_is_not_sent() -> None:
    large = [1] * (MAX_REQUEST_BYTES + 1)
    with Client("127.0.0.1:1") as client:
        for call in (
            lambda: client.detokenize(large),
            lambda: client.count_tokens("x" * len(large)),
            lambda: client.create_context(token_ids=large),
            lambda: client.batch_generate("contexts/x", [{"token_ids": large}]),
        ):
            with pytest.raises(InvalidArgumentError, match=f"expected at most {MAX_REQUEST_BYTES}"):
                call()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"text": "a", "seed": -1}, "seed is -1"),
        ({"token_ids": [5, -1]}, r"token_ids is \[5, -1\]"),
        ({"text": "a", "max_tokens": 2**40}, "max_tokens is 1099511627776"),
        ({"text": "a", "stop": ["\udcff"]}, r"stop is \['\\udcff'\]"),
        ({"question": "\udcff" * 1000}, r"question is '\\udcff.*\.\.\."),
    ],
)
def test_a_value_that_cannot_be_sent_is_named(arguments: dict[str, Any], named: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError, match=named):
        client.generate("contexts/x", **arguments)


def fill(message: ProtoMessage) -> ProtoMessage:
    """Sets every field, of a oneof the last one."""
    for field in message.DESCRIPTOR.fields:
        place = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            place["a"] = "b"
        elif field.message_type is not None:
            fill(place.add() if field.is_repeated else place)
        else:
            value: Any = {field.TYPE_STRING: "x", field.TYPE_BYTES: b"x"}.get(field.type, 1)
            place.append(value) if field.is_repeated else setattr(message, field.name, value)
    return message


NOT_OF_THE_MESSAGE = {"name", "done", "context_name"}
"""What an operation itself says."""


@pytest.mark.parametrize("name", values.CLASSES)
def test_every_field_of_every_message_is_read(name: str) -> None:
    kind, message = values.CLASSES[name], GetMessageClass(Default().FindMessageTypeByName(name))
    assert read_reply(kind, message()) == kind()
    read, others = read_reply(kind, fill(message())), NOT_OF_THE_MESSAGE if kind is OperationState else set()
    unread = {
        field.name for field in fields(kind) if getattr(read, field.name) == getattr(kind(), field.name)
    }
    one_of = {field.name for each in message.DESCRIPTOR.oneofs for field in each.fields[:-1]}
    assert unread == others | one_of


def test_one_text_stands_for_a_list_of_it() -> None:
    request = verbs.generate_request("", {"text": "x", "stop": "dairy is"})
    assert list(request.stop) == ["dairy is"]
    assert list(verbs.generate_request("", {"text": "x", "choices": "yes"}).constraint.choices.texts) == [
        "yes"
    ]
    order = verbs.create_context({"methods": "quest"}, text="x").request
    assert list(order.methods) == ["quest"]
