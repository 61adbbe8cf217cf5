"""Where one call goes: what it is about, which family of contexts that is, and the replicas that are asked, one after
another, until one has taken it. Doors of replicas read and check all of a call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import quote, unquote

import aiohttp
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from decode_engine.errors import NotReadyError
from decode_engine.rpc.client.connection import REPEATED
from decode_engine.rpc.client.verbs import METHODS
from decode_engine.rpc.routing.router import Replica, Router, Wanted
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


KNOWN_S = 60.0
"""Parents do not change, names seldom; what is out of date costs a request a longer way and nothing else."""
_MOST_KNOWN = 100_000
_MOST_PARENTS = 64
_ASK_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Family:
    """root: id of the context whose rows all others of the family continue. nbytes: in memory, of the context and those
    that it continues."""

    root: str
    nbytes: int = 0


class Directory:
    """Remembers families, by callers: what one may not see it does not learn. For one event loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._known: OrderedDict[tuple[str, str], tuple[float, Family]] = OrderedDict()

    async def find(self, name: str, authorization: str, replica: Replica) -> Family:
        """The family of a context; one of its own where the replica does not tell."""
        known = self._known.get((authorization, name))
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        seen, nbytes = name.removeprefix("contexts/"), 0
        family = Family(seen)
        for _ in range(_MOST_PARENTS):
            told = await self._ask(seen, authorization, replica)
            if told is None:
                return family
            nbytes += int(told.get("kv_bytes") or 0) + int(told.get("index_bytes") or 0)
            family = Family(str(told.get("id") or seen), nbytes)
            seen = str(told.get("parent") or "").removeprefix("contexts/")
            if not seen:
                break
        self._known[authorization, name] = (time.monotonic() + KNOWN_S, family)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return family

    async def _ask(self, name: str, authorization: str, replica: Replica) -> dict[str, Any] | None:
        headers = {"authorization": authorization} if authorization else {}
        url = f"{replica.http}/v1/contexts/{quote(name, safe='')}"
        try:
            async with self._session.get(
                url, headers=headers, timeout=aiohttp.ClientTimeout(total=_ASK_S)
            ) as reply:
                told = await reply.json() if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.debug("%s does not tell about a context: %s", replica.name, error)
            return None
        return told if isinstance(told, dict) else None


PATIENCE_S = 30.0
"""How long a call waits for a replica that can take it: as long as a replica may take to start again."""
_PART = 0.75
"""Of the time that a caller has left."""
_LOOK_S = 0.05

MOVED_ON = frozenset({"SHUTTING_DOWN", "NOT_READY", "ENGINE_CRASHED"})
"""Reasons of a replica that has not done what was asked; another one may."""
ELSEWHERE = frozenset({"CONTEXT_NOT_FOUND", "OPERATION_NOT_FOUND", "UPLOAD_NOT_FOUND"})
"""Reasons of a replica whose store does not have it (yet); another store may."""


class Tries:
    """Use as a context manager around the whole call. `next` gives the replica to ask; then `failed` or `absent` says
    why the next one is to be asked, if that helps."""

    def __init__(
        self,
        router: Router,
        directory: Directory,
        asked: Asked,
        authorization: str,
        left_s: float | None = None,
    ) -> None:
        """left_s: until the caller's deadline. By then it has heard that no replica is there: who waits for as long, or
        asks again by itself and waits a second time, would hear of its deadline alone."""
        self.asked = asked
        self._router, self._directory, self._authorization = router, directory, authorization
        patience_s = PATIENCE_S if left_s is None else min(PATIENCE_S, _PART * left_s)
        self._until = time.monotonic() + (patience_s if asked.patient else 0.0)
        self._wanted: Wanted | None = None
        self._taken: tuple[Replica, Wanted] | None = None
        self._excluded: set[str] = set()
        self._asked_stores: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()

    async def next(self) -> Replica:
        """The replica to ask now. Raises NotReadyError where none comes in time."""
        self._end()
        while True:
            wanted = self._wanted or await self._find()
            if wanted is not None:
                self._wanted = wanted
                replica = self._router.take(wanted, self._excluded)
                if replica is not None:
                    self._taken = replica, wanted
                    return replica
                self._excluded.clear()  # who failed may have come back
            if time.monotonic() >= self._until:
                raise NotReadyError(self._why())
            await asyncio.sleep(_LOOK_S)

    def failed(self) -> bool:
        """The replica did not take the call, or did not survive it; whether another one may be asked."""
        if self._taken is not None:
            self._router.suspect(self._taken[0].name)
            self._excluded.add(self._taken[0].name)
        return time.monotonic() < self._until or self._another()

    def absent(self) -> bool:
        """The replica's store does not have what was asked for; whether there is another store to ask."""
        if self._taken is not None:
            replica, wanted = self._taken
            self._asked_stores.add(replica.store or replica.name)
            self._wanted = replace(wanted, store="")
        self._excluded |= {
            each.name for each in self._router.replicas if (each.store or each.name) in self._asked_stores
        }
        return self._another()

    def _another(self) -> bool:
        return any(not each.draining and each.name not in self._excluded for each in self._router.replicas)

    async def _find(self) -> Wanted | None:
        asked, willing = self.asked, [each for each in self._router.replicas if not each.draining]
        if not willing:
            return None
        if asked.context:
            nearest = min(willing, key=lambda each: self._router.load(each.name))
            family = await self._directory.find(asked.context, self._authorization, nearest)
            fits = any(not each.memory_bytes or family.nbytes <= each.memory_bytes for each in willing)
            return Wanted(family.root, asked.session, family.nbytes if fits else 0)  # else a replica says why
        # All orders meet at one store, so that what was uploaded is there when it is ordered.
        attended = sorted({each.store for each in willing if each.attended}) if asked.attended else ()
        return Wanted(session=asked.session, store=next(iter(attended), ""))

    def _end(self) -> None:
        if self._taken is not None:
            self._router.give_back(*self._taken)
        self._taken = None

    def _why(self) -> str:
        count = len(self._router.replicas)
        if not count:
            return "no replica serves yet; try again later"
        return f"none of {count} replicas can take this now: they drain or do not answer"
