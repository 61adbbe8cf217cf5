"""Plays recorded calls at the gRPC door. What depends on time is left out: durations, and how tokens share messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from google.longrunning import operations_pb2
from google.protobuf import json_format, message_factory
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from sparsekv.v1 import context_pb2, generation_pb2
from tests.decode_engine.pins.recording import Line, hide_call_ids, hide_seeds, hide_work_beyond_stops

_FILES = (generation_pb2, context_pb2, operations_pb2, health_pb2)
_STREAMED = {"Generate", "BatchGenerate"}
_CALL_S = 600.0
_ORDER = [*generation_pb2.GenerateResponse.DESCRIPTOR.fields_by_name, "error"]


def _method(name: str) -> MethodDescriptor:
    for file in _FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            if name in service.methods_by_name:
                return service.methods_by_name[name]
    raise ValueError(f"no service has a method {name!r}")


def play_call(channel: grpc.Channel, call: str, request: Any) -> list[Line]:
    """The messages of a reply and how it ended. request: JSON of its message, or a list of these for a stream."""
    method = _method(call)
    service = method.containing_service.full_name
    kind, reply_kind = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
    ways = {True: "stream", False: "unary"}
    way = f"{ways[method.client_streaming]}_{ways[method.server_streaming]}"
    stub = getattr(channel, way)(
        f"/{service}/{call}",
        request_serializer=kind.SerializeToString,
        response_deserializer=reply_kind.FromString,
    )
    sent: Any = [
        json_format.ParseDict(one, kind()) for one in (request if isinstance(request, list) else [request])
    ]
    lines: list[Line] = []
    try:
        replies = stub(iter(sent) if method.client_streaming else sent[0], timeout=_CALL_S)
        for reply in replies if method.server_streaming else [replies]:
            lines.append(plain(reply))
        end: Line = {"end": "OK"}
    except grpc.RpcError as error:
        end = _end(error)
    lines = [_without_times(line) for line in lines]
    if call in _STREAMED:
        lines = list(_joined(lines))
        if end["end"] != "OK":  # what was said while it waited belongs to no token
            lines = [line for line in lines if not line.keys() <= {"request", "usage"}]
    if call == "GetServerStatus":
        told = lines[0]
        lines = [{name: _figure(name, told.get(name)) for name in method.output_type.fields_by_name}]
    lines = [{"message": line} for line in lines] + [end]
    hide_seeds({"request": request}, lines)
    hide_call_ids(lines)
    hide_work_beyond_stops({"request": request}, lines)
    return lines


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON: what is set, bytes as characters of Latin-1, times and durations as texts."""
    return {field.name: _value(field, value) for field, value in message.ListFields()}


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {str(key): value[key] for key in sorted(value)}
    if field.is_repeated:
        return [_single(field, one) for one in value]
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, Timestamp | Duration):
        return value.ToJsonString()
    if isinstance(value, AnyMessage):
        unpacked = message_factory.GetMessageClass(_type_of(value))()
        value.Unpack(unpacked)
        return {"type": value.TypeName(), **plain(unpacked)}
    return plain(value) if isinstance(value, Message) else value


def _type_of(packed: AnyMessage) -> Any:
    name = packed.TypeName()
    for file in (*_FILES, error_details_pb2):
        for kind in file.DESCRIPTOR.message_types_by_name.values():
            if kind.full_name == name:
                return kind
    raise ValueError(f"a message of type {name}, which no file here has")


def _end(error: Any) -> Line:
    line: Line = {"end": error.code().name, "says": error.details()}
    status = rpc_status.from_call(error)
    for packed in () if status is None else status.details:
        line |= _detail(_single_any(packed))
    return line


def _single_any(packed: AnyMessage) -> dict[str, Any]:
    unpacked = message_factory.GetMessageClass(_type_of(packed))()
    packed.Unpack(unpacked)
    return {"type": packed.TypeName().rpartition(".")[2], **plain(unpacked)}


def _detail(told: dict[str, Any]) -> Line:
    """A detail of an error; when to come again is told, but not recorded."""
    if told["type"] == "RetryInfo":
        return {"retry": True}
    return {name: value for name, value in told.items() if name != "type"}


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if not name.endswith("_ns")}
        told = {name: _without_times(one) for name, one in kept.items()}
        if "bytes_written" in told:
            told["bytes_written"] = "<bytes>"
        return told
    return [_without_times(one) for one in value] if isinstance(value, list) else value


def _figure(name: str, value: Any) -> Any:
    return value if name in ("model", "max_positions", "template_reads") else "<figure>"


def _joined(messages: Sequence[Line]) -> Iterator[Line]:
    """Each answer's messages together, those of tokens as one: how many come in one message depends on time.

    Messages about waiting are left out: the usage that the first one tells belongs to the tokens that follow it.
    """
    answers: dict[tuple[int, int], list[Line]] = {}
    wrapped = any("response" in message or "error" in message for message in messages)
    for message in messages:
        inner = message.get("response", {}) if wrapped else message
        if "error" in message:
            inner = {"error": message["error"]}
        key = (message.get("index", 0) if wrapped else 0, inner.get("index", 0))
        own = answers.setdefault(key, [])
        told = {name: value for name, value in inner.items() if name != "waiting"}
        if own and told and own[-1].keys() == {"usage"}:  # of waiting, which depends on time
            waited = own.pop()
            own.append(told if "error" in told else waited | told)
        elif own and "summary" not in told and "error" not in told:
            _append(own[-1], told)
        elif told:
            own.append(told)
    for key in sorted(answers):
        for told in answers[key]:
            message = {name: told[name] for name in sorted(told, key=_ORDER.index)}
            yield {"request": key[0], **message} if wrapped else message


def _append(message: Line, more: Line) -> None:
    for name, value in more.items():
        if name == "tool_calls":
            for part in value:
                calls = message.setdefault(name, [])
                if calls and "id" not in part and calls[-1].get("index", 0) == part.get("index", 0):
                    calls[-1]["arguments_json"] = calls[-1].get("arguments_json", "") + part["arguments_json"]
                else:
                    calls.append(part)
        elif name in ("token_ids", "text", "logprobs"):
            message[name] = message[name] + value if name in message else value
        else:
            message[name] = value
