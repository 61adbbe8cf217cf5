"""Advisories of the field, each by its name: what was taken advantage of in other servers does nothing here.

Salts that callers choose are refused below, and cannot stand for a tenant (`tests/index_store/store/test_tenants.py`).
Timing is measured in `test_timing.py`, requests that a token has the server make in `door/test_signed_tokens.py`. That
nothing unpickles is a rule of imports (`tests/test_layers.py`), and folders of pickled weights are refused
(`tests/index_store/models/test_model.py`).
"""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from sparsekv.v1 import context_pb2
from tests.decode_engine.rpc.isolation.conftest import House
from tests.decode_engine.rpc.isolation.test_isolation import OPERATIONS, created, found, grpc_told

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
