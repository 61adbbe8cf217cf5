"""What the page for browsers asks beside the API, and the page itself as far as no browser is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from starlette.routing import Match

from decode_engine.gateway import resources
from decode_engine.gateway.app import ROUTES
from decode_engine.gateway.serving import Gateway
from decode_engine.rpc.client import Client
from decode_engine.rpc.door.access import TokenFile
from decode_engine.rpc.server import DecodeServer
from tests.decode_engine.conftest import TEXT, Library

HTML = Path(resources.__file__).parent / "browser/page.html"
SCRIPT = HTML.with_name("page.js").read_text()
ASK = {
    "model": "model",
    "messages": [{"role": "user", "content": "Who lit the lamp?"}],
    "temperature": 0,
    "max_tokens": 7,
}


def test_an_answer_tells_where_it_looked_whole_in_pieces_and_over_grpc(
    web: httpx.Client, official: openai.OpenAI, client: Client, lamp: str
) -> None:
    asked = {**ASK, "context": "lamp", "map_every": 3, "method": "csattention"}
    whole = web.post("/v1/chat/completions", json=asked).json()
    assert [look["token"] for look in whole["looks"]] == [0, 3, 6]
    tokens = client.get_context(lamp).token_count
    for look in whole["looks"]:
        assert [(layers["first"], layers["last"]) for layers in look["layers"]] == [(0, 0), (1, 1)]
        for layers in look["layers"]:
            assert 0 < len(layers["positions"]) == len(layers["weights"]) <= 24
            assert all(0 <= place < tokens for place in layers["positions"])
            assert 0 < sum(layers["weights"]) <= 1
    more = {"extra_body": {"context": "lamp", "map_every": 3, "method": "csattention"}}
    pieces = list(official.chat.completions.create(**ASK, stream=True, **more))  # type: ignore[call-overload]
    assert [look for piece in pieces for look in getattr(piece, "looks", [])] == whole["looks"]
    with client.generate(
        lamp, question="Who lit the lamp?", max_tokens=7, method="csattention", map_every=3
    ) as generation:
        looks = [look for piece in generation for look in piece.looks]
    assert [(look.token, list(look.layers[0].positions)) for look in looks] == [
        (look["token"], look["layers"][0]["positions"]) for look in whole["looks"]
    ]
    plain = web.post("/v1/chat/completions", json={**ASK, "context": "lamp", "method": "csattention"}).json()
    assert "looks" not in plain
    assert plain["choices"] == whole["choices"]


def test_a_map_has_the_context_choose_the_method_and_full_attention_has_none(
    web: httpx.Client, lamp: str
) -> None:
    asked = {**ASK, "context": "lamp", "map_every": 1, "method": "auto"}
    chosen = web.post("/v1/chat/completions", json=asked).json()
    assert chosen["sparsekv"]["method"] == "csattention"
    assert chosen["sparsekv"]["method_reason"].startswith(
        "the context's own, as full attention selects nothing"
    )
    full = web.post("/v1/chat/completions", json={**asked, "method": "full"}).json()
    assert "looks" not in full
    refused = web.post("/v1/chat/completions", json={**asked, "map_every": 1025})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "map_every")


def test_the_text_of_a_context_is_told_token_by_token(
    web: httpx.Client, client: Client, library: Library, lamp: str
) -> None:
    reply = web.get("/v1/contexts/lamp/tokens", params={"count": 16384}).json()
    total = client.get_context(lamp).token_count
    assert (reply["start"], reply["total"], len(reply["texts"])) == (0, total, total)
    some = web.get("/v1/contexts/lamp/tokens", params={"start": total - 5, "count": 9}).json()
    assert some["texts"] == reply["texts"][-5:]
    smiles = library.prefill("smiles", text="ab\N{SLIGHTLY SMILING FACE}" * 20, method=("full",))
    told = web.get(f"/v1/contexts/{smiles}/tokens").json()["texts"]
    assert "".join(told).endswith("ab\N{SLIGHTLY SMILING FACE}" * 20)
    assert TEXT[:40] in "".join(reply["texts"])


@pytest.mark.parametrize(
    ("query", "status"), [("start=-1", 400), ("count=16385", 400), ("count=x", 400), ("begin=1", 400)]
)
def test_what_is_no_part_of_a_text_is_refused(web: httpx.Client, lamp: str, query: str, status: int) -> None:
    reply = web.get(f"/v1/contexts/lamp/tokens?{query}")
    assert reply.status_code == status
    assert web.get("/v1/contexts/nobody/tokens").status_code == 404


def test_the_status_is_that_of_the_server(web: httpx.Client, client: Client) -> None:
    told, status = web.get("/v1/status").json(), client.server_status()
    assert told["model"] == status.model
    assert told["context_limit_bytes"] == status.context_limit_bytes > 0
    assert told["context_loads"] <= status.context_loads


@pytest.fixture
def guarded(library: Library, server: DecodeServer, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Address and token of a door with tokens that waits for its model."""
    path = tmp_path / "tokens"
    secret = TokenFile(path).create("laptop")
    with DecodeServer(library.config(tokens=path)) as other, Gateway("127.0.0.1:0", other.grpc) as gateway:
        yield gateway.url, secret


def test_the_page_holds_nothing_and_asks_nobody_else(guarded: tuple[str, str], web: httpx.Client) -> None:
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        reply = httpx.get(guarded[0] + path)  # without a token
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith(kind)
        policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in str(policy)
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://|style=|<script>| on\w+=", reply.text)
        assert ("data-tokens" in reply.text) == (path == "/")
    assert "data-tokens" not in web.get("/").text
    html = HTML.read_text()
    assert set(re.findall(r'(?:href|src)="([^"#]+)"', html)) == {"data:,", "page.css", "page.js"}
    assert set(re.findall(r'byId\("([\w-]+)"\)', SCRIPT)) <= set(re.findall(r' id="([\w-]+)"', html))
    for name in re.findall(r'<(?:input|select|textarea)[^>]* id="([\w-]+)"', html):
        assert f'<label for="{name}">' in html


def test_what_the_page_asks_wants_the_token(guarded: tuple[str, str]) -> None:
    for _, path in CALLS:
        assert httpx.get(guarded[0] + path).status_code == 401
    shown = {"authorization": f"Bearer {guarded[1]}"}
    assert httpx.get(f"{guarded[0]}/v1/status", headers=shown).status_code == 503  # let in, and not ready


CALLS = (
    ("GET", "/v1/status"),
    ("GET", "/v1/models"),
    ("GET", "/v1/contexts"),
    ("GET", "/v1/operations"),
    ("GET", "/v1/contexts/lamp/tokens"),
    ("POST", "/v1/files"),
    ("POST", "/v1/contexts"),
    ("POST", "/v1/operations/0/cancel"),
    ("DELETE", "/v1/contexts/lamp"),
    ("POST", "/v1/chat/completions"),
)


def test_every_address_that_the_page_asks_is_there() -> None:
    asked = {
        re.sub(r"\$\{[^}]+\}", "lamp", path).split("?")[0] for path in re.findall(r'["`](/v1/[^"`]*)', SCRIPT)
    }
    known = {(method, re.sub("/0/", "/lamp/", path)) for method, path in CALLS}
    assert asked == {path for _, path in known}
    for method, path in known:
        scope = {"type": "http", "method": method, "path": path}
        assert any(route.matches(scope)[0] is Match.FULL for route in ROUTES), (method, path)


def test_replies_have_what_the_page_reads_of_them(web: httpx.Client, lamp: str) -> None:
    (context,) = web.get("/v1/contexts", params={"name_prefix": "lamp"}).json()["data"]
    asked = {**ASK, "context": "lamp", "stream": True, "stream_options": {"include_usage": True}}
    wanted = {"logprobs": True, "map_every": 1, "explain": True, "method": "csattention"}
    text = web.post("/v1/chat/completions", json={**asked, **wanted}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    (figures,) = [chunk["sparsekv"] for chunk in chunks if "sparsekv" in chunk and not chunk["choices"]]
    looks = [look for chunk in chunks for look in chunk.get("looks", [])]
    words = [
        token["token"]
        for chunk in chunks
        for choice in chunk["choices"]
        for token in (choice["logprobs"] or {}).get("content", [])
    ]
    assert len(looks) == len(words) == 7
    order = {"token_ids": [70] * 40, "display_name": "never made"}
    operation = web.post("/v1/contexts", json=order).json()
    web.post(f"/v1/operations/{operation['id']}/cancel")
    (listed,) = [one for one in web.get("/v1/operations").json()["data"] if one["id"] == operation["id"]]
    for read, reply in {
        "status": web.get("/v1/status").json(),
        "context": context,
        "figures": figures,
        "why": figures["explanation"],
        "one": listed,
        "look": looks[0],
    }.items():
        members = set(re.findall(rf"\b{read}\.(\w+)", SCRIPT)) - {"call", "answer", "question", "text"}
        assert members <= reply.keys(), (read, members - reply.keys())
        assert members or read == "figures"
