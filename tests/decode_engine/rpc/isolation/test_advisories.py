"""Advisories of the field, each by its name: what was taken advantage of in other servers does nothing here.

Salts that callers choose are refused below, and cannot stand for a tenant (`tests/index_store/store/test_tenants.py`).
Requests that a token has the server make are in `door/test_door.py`. That nothing unpickles is a rule of imports
(`tests/test_layers.py`), and folders of pickled weights are refused (`tests/index_store/models/test_model.py`).

How long a server takes to say that there is no context tells nobody whether another tenant has it. Probes of a foreign
id and of an absent one go in an order that is drawn, over one connection. What is compared is their ranks (Mann and
Whitney's U), which no outlier moves.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from sparsekv.v1 import context_pb2
from tests.decode_engine.rpc.isolation.conftest import House
from tests.decode_engine.rpc.isolation.test_isolation import (
    ABSENT,
    ABSENT_NAME,
    OPERATIONS,
    WAYS,
    context,
    created,
    found,
    grpc_told,
)
from tests.support.waiting import wait_until

PATHS = (
    "../../etc/passwd",
    "..",
    "/etc/passwd",
    "%2e%2e/%2e%2e/etc/passwd",
    "....//etc",
    "a\0b",
    "." * 3,
    "~root",
    "*",
)


@pytest.mark.parametrize("path", PATHS)
def test_path_traversal(house: House, path: str) -> None:
    """No name reaches a file that is not its own, and no answer tells where the server's lie."""
    beta = house["beta"]
    told = [
        grpc_told(lambda: found(beta, name=f"contexts/{path}")),
        grpc_told(lambda: found(beta, reference=path)),
        grpc_told(lambda: created(beta, upload=f"uploads/{path}")),
        grpc_told(lambda: created(beta, parent=f"contexts/{path}", text="a")),
        *(grpc_told(lambda call=call: call(beta, path)) for call in OPERATIONS.values()),
    ]
    refused = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert {code for code, *_ in told} <= refused
    replies = [
        beta.web.get(f"/v1/contexts/{path}".replace("\0", "%00")),
        beta.web.post("/v1/contexts", json={"file_id": f"file-{path}"}),
        beta.web.post("/v1/contexts", json={"text": "a", "parent": path}),
    ]
    assert {reply.status_code for reply in replies} <= {400, 404}
    said = repr(told) + "".join(reply.text for reply in replies)
    assert "root:" not in said
    assert str(house.library.store) not in said


def test_salts_by_callers(house: House) -> None:
    """No request names a salt: what keeps tenants apart is none of their own choosing."""
    names = {
        field.name
        for message in context_pb2.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }
    assert not {name for name in names if "salt" in name}
    for path, body in (
        ("/v1/contexts", {"text": "a", "salt": "acme"}),
        ("/v1/completions", {"model": "model", "prompt": "a", "cache_salt": "acme", "max_tokens": 1}),
    ):
        reply = house["beta"].web.post(path, json=body)
        taken = reply.headers.get("x-sparsekv-taken", "")
        assert reply.status_code == 400 or "salt" in taken, f"{path}: {reply.text[:200]}"


def test_tenants_by_callers(house: House) -> None:
    """Whose a context is, is never what a request says."""
    changed = context_pb2.Context(name=f"contexts/{house.granted}", tenant="beta", owner="beta")
    request = context_pb2.UpdateContextRequest(context=changed)
    for path in ("tenant", "owner", "*"):
        request.update_mask.paths[:] = [path]
        code, *_ = grpc_told(
            lambda: house["beta"].contexts.UpdateContext(request, metadata=house["beta"].shown)
        )
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)
    for body in ({"tenant": "beta"}, {"owner": "beta"}):
        assert house["acme"].web.patch(f"/v1/contexts/{house.granted}", json=body).status_code == 400
    assert house["acme"].client.get_context(f"contexts/{house.granted}").tenant == "acme"


@pytest.mark.parametrize(
    "address", ["http://169.254.169.254/latest", "https://example.org/a.png", "file:///etc/passwd"]
)
def test_ssrf_by_links(house: House, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Links to images and documents are refused, and nothing is asked for them."""
    asked: list[Any] = []
    plain = socket.getaddrinfo

    def noted(host: Any, *given: Any, **more: Any) -> Any:
        if host not in (None, "127.0.0.1", "localhost", b"127.0.0.1"):
            asked.append(host)
        return plain(host, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    web = house["beta"].web
    parts: tuple[dict[str, Any], ...] = (
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "input_image", "image_url": address},
        {"type": "file", "file": {"file_data": address}},
        {"type": "input_file", "file_url": address},
    )
    for part in parts:
        body = {"model": "model", "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        assert web.post("/v1/chat/completions", json=body).status_code == 400
        spoken = {"model": "model", "input": [{"role": "user", "content": [part]}], "max_output_tokens": 16}
        assert web.post("/v1/responses", json=spoken).status_code == 400
    assert not asked


def resident_bytes() -> int:
    """Of this process, in which the server is."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


BOMBS: dict[str, tuple[dict[str, str], bytes]] = {
    "packed": ({"content-encoding": "gzip"}, gzip.compress(b'{"text": "' + b"a" * (256 << 20) + b'"}')),
    "packed twice": ({"content-encoding": "gzip"}, gzip.compress(gzip.compress(bytes(64 << 20)))),
    "nested": ({}, b"[" * 1_000_000),
    "declared": ({"content-length": str(1 << 40)}, b"{}"),
    "numbers": ({}, json.dumps({"token_ids": [2**62] * 100_000}).encode()),
    "members": ({}, b"{" + b",".join(b'"a%d":0' % each for each in range(200_000)) + b"}"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_allocation_bombs(house: House, bomb: str) -> None:
    """A small request makes the server hold little, whatever it says that it is."""
    headers, body = BOMBS[bomb]
    web = house["beta"].web
    web.post("/v1/contexts", content=b"{}")
    before = resident_bytes()
    if bomb == "declared":
        with socket.create_connection(("127.0.0.1", int(web.base_url.port or 0))) as raw:
            head = (
                f"POST /v1/contexts HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {house['beta'].secret}\r\n"
            )
            raw.sendall(f"{head}content-length: {1 << 40}\r\n\r\n".encode())
            assert raw.recv(64).startswith(b"HTTP/1.1 413")
    else:
        assert web.post("/v1/contexts", content=body, headers=headers).status_code in (400, 413)
    assert resident_bytes() - before < 96 << 20


@pytest.mark.parametrize(
    "text",
    ["{{ 7 * 7 }}", "{% for a in range(10**9) %}{{ a }}{% endfor %}", "{{ ''.__class__.__mro__ }}", "{#x#}"],
)
def test_template_injection(house: House, text: str) -> None:
    """What somebody says is text to a chat template, whatever it looks like."""
    said = [{"role": "user", "content": text}]
    reply = house["beta"].web.post(
        "/tokenize", json={"model": "model", "messages": said, "return_token_strs": True}
    )
    assert reply.status_code == 200
    plain = house["beta"].web.post("/tokenize", json={"prompt": text}).json()["count"]
    assert reply.json()["count"] >= plain
    assert "49" not in "".join(reply.json()["token_strs"])


_MOST_Z = 4.0
"""Of a thousand tests of two equal samples less than one in ten passes this."""
PROBES: dict[str, Callable[[House, bool], object]] = {
    "gRPC: get": lambda house, foreign: WAYS["gRPC: get by id"](
        house["beta"], house.secret if foreign else ABSENT
    ),
    "gRPC: ask": lambda house, foreign: WAYS["gRPC: ask by tokens"](
        house["beta"], house.secret if foreign else ABSENT
    ),
    "gRPC: delete": lambda house, foreign: WAYS["gRPC: delete"](
        house["beta"], house.secret if foreign else ABSENT
    ),
    "gRPC: name": lambda house, foreign: grpc_told(
        lambda: found(house["beta"], reference="secret" if foreign else ABSENT_NAME)
    ),
    "HTTP: get": lambda house, foreign: WAYS["HTTP: get by id"](
        house["beta"], house.secret if foreign else ABSENT
    ),
}


def z_of(ones: Sequence[float], others: Sequence[float]) -> float:
    """How far the ranks of two samples are apart, in standard deviations of what chance does."""
    ranked = sorted([(each, 0) for each in ones] + [(each, 1) for each in others])
    below = sum(rank for rank, (_, side) in enumerate(ranked, 1) if side == 0)
    n, m = len(ones), len(others)
    return (below - n * (n + m + 1) / 2) / math.sqrt(n * m * (n + m + 1) / 12)


def probe(house: House, way: str, count: int) -> float:
    """z of the times of so many probes a side."""
    ask = PROBES[way]
    drawn = random.Random(1)
    order = [True, False] * count
    for foreign in order[:20]:
        ask(house, foreign)
    drawn.shuffle(order)
    times: dict[bool, list[float]] = {True: [], False: []}
    for foreign in order:
        before = time.perf_counter()
        ask(house, foreign)
        times[foreign].append(time.perf_counter() - before)
    return z_of(times[True], times[False])


def test_the_measure_finds_a_difference_and_none_where_there_is_none() -> None:
    drawn = random.Random(0)
    ones, others = ([drawn.gauss(1, 0.1) for _ in range(1000)] for _ in range(2))
    assert abs(z_of(ones, others)) < _MOST_Z
    assert z_of([each + 0.03 for each in ones], others) > _MOST_Z  # a third of the spread


def test_a_foreign_context_is_not_read_when_it_is_asked_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes time with a context, the file system, is not asked about one that is another tenant's."""
    store = house.server.grpc.store
    asked: list[str] = []
    read = type(store._listing)._read
    monkeypatch.setattr(
        type(store._listing), "_read", lambda self, id_, known: (asked.append(id_), read(self, id_, known))[1]
    )
    house["acme"].client.get_context(context(house.secret))
    assert house.secret in asked
    wait_until(
        lambda: store.list() and store._listing._known[house.secret].stamp is not None
    )  # it lies still
    asked.clear()
    for way in (
        "gRPC: get by id",
        "gRPC: delete",
        "gRPC: warm",
        "gRPC: rename",
        "gRPC: ask by tokens",
        "HTTP: get by id",
        "HTTP: complete",
    ):
        WAYS[way](house["beta"], house.secret)
    assert house.secret not in asked


@pytest.mark.parametrize("way", ["gRPC: get"])
def test_a_foreign_id_takes_as_long_as_an_absent_one(house: House, way: str) -> None:
    """In short; where others use the cores, a second try is not the same chance."""
    assert min(abs(probe(house, way, 150)) for _ in range(2)) < _MOST_Z


@pytest.mark.nightly
@pytest.mark.parametrize("way", PROBES)
def test_a_thousand_probes_a_side_tell_nothing(house: House, way: str) -> None:
    z = probe(house, way, 1000)
    assert abs(z) < _MOST_Z, f"{way}: z {z:+.2f} of 1,000 probes a side"
