"""What reads what comes from outside, with examples of it."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
from google.protobuf.message import DecodeError, Message

from decode_engine.errors import EngineCrashedError
from decode_engine.gateway.exchange import parse_json
from decode_engine.gateway.wire.bodies import chat_order, completion_order, response_order
from decode_engine.orders.events import event_of_error
from decode_engine.processes.link import frames
from decode_engine.rpc.client.verbs import Keep, batch_request, generate_request
from decode_engine.rpc.generation_service import parse_batch, parse_order
from decode_engine.rpc.transport.status import CODES, reason_of
from index_store.cli.quotas import parse_quotas
from index_store.errors import SparseKVError
from index_store.models.conversation.messages import Conversation, Role
from index_store.models.conversation.messages import Message as Said
from index_store.models.conversation.turns import StoredConversation
from index_store.models.model_folder import ModelFolder
from index_store.models.resolve import resolve_model
from index_store.models.tokenizer import load_tokenizer
from index_store.objects.context_file import HEAD_BYTES, nowhere, packed, read_contents, receive
from index_store.objects.records import Held, read_record
from index_store.store.catalog import Store
from index_store.store.description.json_fields import render_document
from sparsekv.v1 import context_pb2, generation_pb2
from tests.fuzz.inputs import as_json, changed, with_odd_values
from tests.index_store.models.gguf_files import write_gguf
from tests.index_store.objects.sites import memory_bucket
from tests.sealed_records.records import KINDS, use
from tests.support.models import write_model_folder
from tests.support.store import synthetic_context

WHERE = "a folder/file"


@dataclass(frozen=True)
class Case:
    """make: an input of draws. read: takes it, or raises one of `refusals`, or a SparseKVError that is no INTERNAL.

    share: of a million inputs; those that take long get fewer.
    """

    make: Callable[[random.Random], Any]
    read: Callable[[Any], object]
    share: int
    refusals: tuple[type[BaseException], ...] = ()
    says_where: bool = False


def _told(error: SparseKVError) -> str:
    """What is wrong with how something is refused, "" where nothing is."""
    said = [error.message, *map(str, error.metadata.values())]
    try:
        "".join(said).encode()
    except UnicodeEncodeError:
        return "cannot be sent"
    if len(error.message) > 4_000:
        return "is long"
    return "" if reason_of(error) in CODES or type(error).reason != "INTERNAL" else "is INTERNAL"


def tried(case: Case, given: Any) -> str:
    """What is wrong with how an input is read, "" where nothing is."""
    try:
        case.read(given)
    except SparseKVError as error:
        wrong = _told(error)
        if not wrong and case.says_where and WHERE not in error.message:
            wrong = "does not say where"
        return f"{type(error).__name__} {wrong}: {error.message}" if wrong else ""
    except case.refusals:
        pass
    return ""


def _sealed(name: str) -> Case:
    sealed, record = KINDS[name]
    data = sealed.render(record)
    document = json.loads(data)
    del document["checksum"]
    plain = json.dumps(document)

    def make(draws: random.Random) -> bytes:
        if draws.random() < 0.4:
            return changed(data, [data], draws)
        odd = with_odd_values(plain, draws)
        if not isinstance(odd, dict):
            return as_json(odd)
        try:
            return render_document(json.loads(json.dumps(odd)))
        except ValueError:  # no JSON: surrogates, infinities
            return as_json(odd)

    def read(given: bytes) -> None:
        found = sealed.parse(given, WHERE)
        sealed.parse(sealed.render(found), WHERE)
        use(found)

    return Case(make, read, 9_000, says_where=True)


def _bodies() -> Mapping[str, Case]:
    fields = {
        "model": "m", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 3, "stop": ["a", "b"],
        "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"5": -1.5}, "user": "u",
        "context": "notes", "method": "refined", "keep_ratio": 0.1, "priority": 3, "frequency_penalty": 0.5,
    }  # fmt: skip
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
    }
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    chat = {
        **fields,
        "messages": messages,
        "tools": [tool],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 2,
    }
    examples: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
        "chat": (chat_order, [chat, {**fields, "messages": messages[:2], "response_format": schema, "n": 1}]),
        "completion": (
            completion_order,
            [{**fields, "prompt": "q", "logprobs": 2}, {**fields, "prompt": [[1, 2], [3]], "regex": "a+"}],
        ),
        "response": (
            response_order,
            [
                {
                    "model": "m",
                    "input": "q",
                    "max_output_tokens": 3,
                    "instructions": "i",
                    "text": {"format": schema},
                },
                {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]},
            ],
        ),
    }

    def make(texts: list[str], draws: random.Random) -> bytes:
        text = draws.choice(texts)
        if draws.random() < 0.3:
            return changed(text.encode(), [each.encode() for each in texts], draws)
        return as_json(with_odd_values(text, draws))

    def read(order: Callable[[Any], object], given: bytes) -> None:
        order(parse_json(given))

    return {
        f"body of {name}": Case(
            partial(make, [json.dumps(each) for each in bodies]), partial(read, order), 70_000
        )
        for name, (order, bodies) in examples.items()
    }


def _protos() -> Mapping[str, Case]:
    said = Conversation((Said(Role.USER, "q"), Said(Role.ASSISTANT, "a"), Said(Role.USER, "b")))
    context = "contexts/" + "5" * 64
    many = generate_request(
        context,
        {
            "text": "q",
            "max_tokens": 5,
            "temperature": 0.5,
            "stop": ["a"],
            "seed": 3,
            "method": "refined",
            "keep_ratio": 0.1,
        },
    )
    requests = [
        many,
        generate_request("", {"token_ids": [1, 2, 3], "regex": "a+"}),
        generate_request(context, {"messages": list(said.messages), "keep": Keep("kept")}),
        generate_request(context, {"question": "who?", "choices": ["a", "b"]}),
        generate_request("", {"text": "q", "json_schema": {"type": "object"}}),
    ]
    create = context_pb2.CreateContextRequest(
        text="a text", display_name="name", request_id="1", labels={"a": "b"}, methods=["refined"], priority=3
    )
    batch = batch_request(context, [{"text": "q"}, {"question": "r"}])

    def case(kind: type[Message], examples: list[Message], read: Callable[[Any], object], share: int) -> Case:
        datas = [each.SerializeToString() for each in examples]

        def parse(given: bytes) -> None:
            read(kind.FromString(given))

        return Case(lambda draws: changed(draws.choice(datas), datas, draws), parse, share, (DecodeError,))

    return {
        "generate": case(generation_pb2.GenerateRequest, [*requests], parse_order, 150_000),
        "batch": case(generation_pb2.BatchGenerateRequest, [batch], parse_batch, 60_000),
        "create": case(context_pb2.CreateContextRequest, [create], str, 40_000),
    }


_QUOTAS = """[default]
weight = 2
sessions = 16
generated_tokens_per_minute = 60_000
[tenants.acme]
stored_bytes = "200GiB"
sessions = "none"
[tenants.""]
requests_per_minute = 3
"""


class Memory:
    """Bytes as a source."""

    where = WHERE

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, start: int, count: int) -> bytes:
        return self._data[start : start + count]


def _files() -> Mapping[str, Case]:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"{folder}/store", create=True)
        context = synthetic_context(tokens=9)
        context.write(store)
        data = b"".join(packed(store, store.manifest(context.id)))
    manifest, record = read_contents(Memory(data)).manifest, data[HEAD_BYTES:]
    size = read_contents(Memory(data)).parts[0].start - HEAD_BYTES
    record = record[:size]
    bucket = memory_bucket()

    def file(draws: random.Random) -> bytes:
        if draws.random() < 0.1:  # numbers of any size ask for no memory
            numbers = (draws.getrandbits(draws.choice((2, 32))), draws.getrandbits(32), draws.getrandbits(64))
            head = struct.pack("<8sIIQ", data[:8], *numbers)
            return (
                head + google_crc32c.value(head).to_bytes(4, "little") + draws.randbytes(draws.randrange(200))
            )
        found = bytearray(changed(data, [data], draws, len(data) if draws.random() < 0.5 else HEAD_BYTES))
        if len(found) >= HEAD_BYTES and draws.random() < 0.7:
            found[HEAD_BYTES - 4 : HEAD_BYTES] = google_crc32c.value(bytes(found[: HEAD_BYTES - 4])).to_bytes(
                4, "little"
            )
        return bytes(found)

    def receive_all(given: bytes) -> None:
        source = Memory(given)
        contents = read_contents(source)
        if len(given) < 2 * len(data):
            receive(source, contents.parts, nowhere, threads=1)
        assert given == data, "a file that was changed is taken"

    def read_changed(given: bytes) -> None:
        bucket._store.put(WHERE.replace(" ", "-"), given)  # type: ignore[attr-defined]
        found = read_record(bucket, manifest.id, Held(1, key=WHERE.replace(" ", "-")))
        assert found == manifest, "a record that was changed is taken"  # its line breaks may be others

    turns = StoredConversation(Conversation((Said(Role.USER, "q"),)), *_kept_conversation()).to_bytes()
    return {
        "file of a context": Case(file, receive_all, 30_000, says_where=True),
        "record of a bucket": Case(lambda draws: changed(record, [data], draws), read_changed, 30_000),
        "quotas": Case(
            lambda draws: changed(_QUOTAS.encode(), [_QUOTAS.encode()], draws).decode("utf-8", "replace"),
            lambda given: parse_quotas(given, WHERE),
            100_000,
            says_where=True,
        ),
        "conversation": Case(
            lambda draws: (
                as_json(with_odd_values(turns.decode(), draws))
                if draws.random() < 0.6
                else changed(turns, [turns], draws)
            ),
            lambda given: StoredConversation.from_bytes(given, WHERE),
            60_000,
            says_where=True,
        ),
    }


def _kept_conversation() -> tuple[Any, ...]:
    from datetime import UTC, datetime

    return datetime(2026, 1, 1, tzinfo=UTC), 1, "0" * 64


def _frames() -> Mapping[str, Case]:
    fails = event_of_error(EngineCrashedError("the engine failed"))
    door = [
        frames.encode(each)
        for each in (frames.Hello(*_fields(frames.Hello)), frames.Cancels(*_fields(frames.Cancels)))
    ]
    engine = [
        frames.encode(each)
        for each in (frames.Closing(fails), frames.Unknown("why"), frames.Denies(3, fails))
    ]
    return {
        name: Case(
            partial(lambda datas, draws: changed(draws.choice(datas), datas, draws), datas),
            read,
            100_000,
            (msgspec.MsgspecError, UnicodeDecodeError),
        )
        for name, datas, read in (
            ("frames of doors", door, frames.decode_from_door),
            ("frames of engines", engine, frames.decode_from_engine),
        )
    }


def _fields(kind: type[msgspec.Struct]) -> list[Any]:
    """Plain values of a frame's fields."""
    plain: dict[Any, Any] = {int: 1, str: "a", bytes: b"k", float: 0.5, bool: True}
    return [plain.get(each.type, 1) for each in msgspec.structs.fields(kind)]


@cache
def _models() -> tuple[Path, Path, str, bytes]:
    """A model's folder and the same as a GGUF file, which may be overwritten, and what tokenizer and file were."""
    folder = Path(tempfile.mkdtemp(prefix="fuzzed-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = write_model_folder(folder / "model")
    gguf = write_gguf(model, folder / "model.gguf")
    return model, gguf.with_name("changed.gguf"), (model / "tokenizer.json").read_text(), gguf.read_bytes()


def _odd_tokenizer(draws: random.Random) -> bytes:
    _, _, tokenizer, _ = _models()
    if draws.random() < 0.3:
        return changed(tokenizer.encode(), [tokenizer.encode()], draws)
    return as_json(with_odd_values(tokenizer, draws))


def _read_tokenizer(given: bytes) -> None:
    model, *_ = _models()
    (model / "tokenizer.json").write_bytes(given)
    load_tokenizer(ModelFolder(model, WHERE)).encode("a text")


def _odd_gguf(draws: random.Random) -> bytes:
    *_, data = _models()
    return changed(data, [data], draws, 12_000)


def _read_gguf(given: bytes) -> None:
    _, place, *_ = _models()
    place.write_bytes(given)
    resolve_model(str(place))


_MODELS = {
    "tokenizer": Case(_odd_tokenizer, _read_tokenizer, 2_000),
    "gguf": Case(_odd_gguf, _read_gguf, 300),
}


def cases() -> dict[str, Case]:
    """All of them by name."""
    sealed = {
        name: _sealed(name)
        for name in KINDS
        if name.startswith(("manifest", "job", "default", "tokens", "checkpoint", "layer"))
    }
    return {**sealed, **_bodies(), **_protos(), **_files(), **_frames(), **_MODELS}
