"""What a call is about, as far as it says where the call may go. Doors of replicas read and check all of it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from decode_engine.rpc.client.connection import REPEATED
from decode_engine.rpc.client.verbs import METHODS
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES

SESSION = "x-session-id"
"""The header, or the metadata, by which a caller says that its requests belong together."""

MANY_MESSAGES = frozenset({"UploadDocument", "ServerReflectionInfo"})
"""Methods whose caller sends more than one message."""
_STREAMS = frozenset({"Generate", "BatchGenerate", "Check", "Watch"})
_ORDERED = frozenset({"CreateContext", "UploadDocument"})
_OPERATIONS = "google.longrunning.Operations"


@dataclass(frozen=True, slots=True)
class Asked:
    """context: by name, id or `contexts/<id>`, "" for none. session: whose requests stay together. attended: it is
    about what workers make. repeatable: it may be made twice. patient: it may wait for a replica to come."""

    context: str = ""
    session: str = ""
    attended: bool = False
    repeatable: bool = True
    patient: bool = True


def asked_by_rpc(path: str, first: bytes, metadata: Mapping[str, Any]) -> Asked:
    """Of a method, `/service/Method`, and the first message of its caller."""
    service, _, method = path.lstrip("/").partition("/")
    known = METHODS.get(method)
    context = ""
    if known is not None and known.containing_service.full_name == service:
        try:
            message: Any = GetMessageClass(known.input_type).FromString(first)
        except DecodeError:  # which the replica tells
            message = None
        context = _context_of(message)
    operation = service == _OPERATIONS
    return Asked(
        context=context,
        session=str(metadata.get(SESSION, "")),
        attended=operation or method in _ORDERED,
        repeatable=method in REPEATED or method in _STREAMS,
        patient=not service.startswith("grpc."),
    )


def _context_of(message: Any) -> str:
    fields = {} if message is None else message.DESCRIPTOR.fields_by_name
    if "context" in fields and fields["context"].message_type is None:
        return str(message.context)
    if "context" in fields:  # of UpdateContext
        return str(message.context.name)
    name = str(message.name) if "name" in fields else ""
    return name if name.startswith("contexts/") else ""


def asked_by_http(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Asked:
    """Of a request, whose body has come."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    session = headers.get(SESSION, "")
    if parts[:2] in (["v1", "operations"], ["v1", "files"]) or parts == ["v1", "contexts"]:
        ordered = method != "GET" or parts[1] != "contexts"
        return Asked(session=session, attended=ordered, repeatable=method == "GET")
    if parts[:2] == ["v1", "contexts"]:
        name = "/".join(parts[2:])
        name = name.removesuffix("/tokens") if method == "GET" else name
        return Asked(context=name, session=session, repeatable=method != "DELETE")
    given = _object(body, headers.get("content-encoding", "")) if method == "POST" else {}
    context, told = given.get("context"), given.get("prompt_cache_key")
    return Asked(
        context=context if isinstance(context, str) else "",
        session=session or (told if isinstance(told, str) else ""),
    )


def _object(body: bytes, encoding: str) -> dict[str, Any]:
    """What a body says, nothing where it cannot be read: the replica tells why."""
    try:
        if encoding.strip().lower() not in ("", "identity"):
            body = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32).decompress(body, MAX_REQUEST_BYTES)
        given = json.loads(body)
    except (ValueError, zlib.error, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}
