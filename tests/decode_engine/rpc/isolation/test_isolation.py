"""What belongs to another tenant is, for whoever asks in whatever way by whatever door, what does not exist."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from decode_engine.gateway.app import ALL_ROUTES
from decode_engine.rpc.client import NEVER
from decode_engine.rpc.door.access import Door
from decode_engine.rpc.door.audit import AuditLog
from decode_engine.rpc.door.rights import RIGHT_OF
from decode_engine.rpc.server import SERVICES
from decode_engine.rpc.transport.calls import Gate, Limits
from decode_engine.rpc.transport.listener import HEALTH_SERVICE, REFLECTION_SERVICES
from decode_engine.rpc.transport.status import Paths
from index_store.cli.console import LineReporter
from index_store.errors import PermissionDeniedError
from index_store.store.clean_up import KEPT_BEGINNING
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import run_job
from sparsekv.v1 import context_pb2, conversation_pb2, generation_pb2
from tests.decode_engine.conftest import TEXT
from tests.decode_engine.rpc.isolation.conftest import House, Party
from tests.support.waiting import wait_until

ABSENT, ABSENT_NAME = "f" * 64, "sekret"
NO_JOB = "e" * 32

Told = tuple[Any, ...]


def grpc_told(work: Callable[[], Any]) -> Told:
    """All that a call's client gets: answers, or status and trailers."""
    try:
        answer = work()
        messages = [answer] if hasattr(answer, "SerializeToString") else list(answer)
        return ("OK", *(message.SerializeToString(deterministic=True) for message in messages))
    except grpc.RpcError as error:
        trailers = sorted((name, value) for name, value in error.trailing_metadata() if "request" not in name)
        return (error.code(), error.details(), *trailers)


def http_told(reply: httpx.Response) -> Told:
    """All that a response is, but its id and date."""
    headers = sorted(
        (name, value) for name, value in reply.headers.items() if name not in ("x-request-id", "date")
    )
    return (reply.status_code, *headers, reply.content)


def without(told: Told, named: str) -> str:
    """The same, whatever was named: by its id, the digits that errors say, or its name."""
    said = repr(told)
    for shown in (named, named[:16], named[:12]):
        said = said.replace(shown, "#" * len(shown))
    return said


def context(id_: str) -> str:
    return f"contexts/{id_}"


def of_contexts(party: Party, call: str, **given: Any) -> Any:
    request = getattr(context_pb2, f"{call}Request")(**given)
    return getattr(party.contexts, call)(request, metadata=party.shown)


def of_operations(party: Party, call: str, id_: str) -> Any:
    request = getattr(operations_pb2, f"{call}Request")(name=f"operations/{id_}")
    return getattr(party.operations, call)(request, metadata=party.shown)


def ask(party: Party, id_: str, **changes: Any) -> Any:
    request = generation_pb2.GenerateRequest(context=context(id_), max_tokens=1, **changes)
    return party.generations.Generate(request, metadata=party.shown)


def update(party: Party, id_: str, path: str, **changes: Any) -> Any:
    changed = context_pb2.Context(name=context(id_), **changes)
    return of_contexts(party, "UpdateContext", context=changed, update_mask=FieldMask(paths=[path]))


def listed(party: Party, **wanted: Any) -> Any:
    return of_contexts(party, "ListContexts", **wanted)


def found(party: Party, **given: Any) -> Any:
    return of_contexts(party, "GetContext", **given)


def messages(text: str) -> conversation_pb2.Conversation:
    user = conversation_pb2.Message.USER
    return conversation_pb2.Conversation(messages=[conversation_pb2.Message(role=user, content=text)])


def created(party: Party, **given: Any) -> Any:
    return of_contexts(party, "CreateContext", **given)


BY_GRPC: Mapping[str, Callable[[Party, str], Any]] = {
    "get by id": lambda p, i: found(p, name=context(i)),
    "get by upper-case id": lambda p, i: found(p, name=context(i.upper())),
    "find by id": lambda p, i: found(p, reference=i),
    "find by resource": lambda p, i: found(p, reference=context(i)),
    "find by digits": lambda p, i: found(p, reference=i[:12]),
    "rename": lambda p, i: update(p, i, "display_name", display_name="mine"),
    "label": lambda p, i: update(p, i, "labels.team", labels={"team": "law"}),
    "expiry": lambda p, i: update(p, i, "expire_time"),
    "grant": lambda p, i: update(p, i, "readers", readers=["beta"]),
    "delete": lambda p, i: of_contexts(p, "DeleteContext", name=context(i)),
    "delete with children": lambda p, i: of_contexts(p, "DeleteContext", name=context(i), force=True),
    "delete if there": lambda p, i: of_contexts(p, "DeleteContext", name=context(i), allow_missing=True),
    "warm": lambda p, i: of_contexts(p, "WarmContext", name=context(i)),
    "continue": lambda p, i: created(p, parent=context(i), text="more"),
    "make again": lambda p, i: created(p, again=i),
    "ask by tokens": lambda p, i: ask(p, i, token_ids=generation_pb2.TokenIds(ids=[5])),
    "ask by text": lambda p, i: ask(p, i, text=" the"),
    "ask a question": lambda p, i: ask(p, i, question="who?"),
    "ask by messages": lambda p, i: ask(p, i, messages=messages("who?")),
    "ask and explain": lambda p, i: ask(p, i, text=" the", explain=True),
    "ask and keep": lambda p, i: ask(p, i, text=" the", keep=generation_pb2.Keep(display_name="k")),
    "batch": lambda p, i: p.generations.BatchGenerate(
        generation_pb2.BatchGenerateRequest(
            context=context(i), requests=[generation_pb2.GenerateRequest(text=" a", max_tokens=1)]
        ),
        metadata=p.shown,
    ),
}

BODY: Mapping[str, Any] = {"model": "model", "max_tokens": 1}
SAID = [{"role": "user", "content": "who?"}]

BY_HTTP: Mapping[str, Callable[[Party, str], httpx.Response]] = {
    "get by id": lambda p, i: p.web.get(f"/v1/contexts/{i}"),
    "get by digits": lambda p, i: p.web.get(f"/v1/contexts/{i[:12]}"),
    "tokens": lambda p, i: p.web.get(f"/v1/contexts/{i}/tokens"),
    "update": lambda p, i: p.web.patch(f"/v1/contexts/{i}", json={"labels": {"team": "law"}}),
    "grant": lambda p, i: p.web.patch(f"/v1/contexts/{i}", json={"readers": ["beta"]}),
    "delete": lambda p, i: p.web.delete(f"/v1/contexts/{i}"),
    "delete with children": lambda p, i: p.web.delete(f"/v1/contexts/{i}", params={"force": "true"}),
    "continue": lambda p, i: p.web.post("/v1/contexts", json={"text": "more", "parent": i}),
    "make again": lambda p, i: p.web.post("/v1/contexts", json={"again": i}),
    "count": lambda p, i: p.web.post(
        "/v1/responses/input_tokens", json={"model": "model", "input": "who?", "context": i}
    ),
    "chat": lambda p, i: p.web.post("/v1/chat/completions", json={**BODY, "messages": SAID, "context": i}),
    "chat as events": lambda p, i: p.web.post(
        "/v1/chat/completions", json={**BODY, "messages": SAID, "context": i, "stream": True}
    ),
    "complete": lambda p, i: p.web.post("/v1/completions", json={**BODY, "prompt": " a", "context": i}),
    "respond": lambda p, i: p.web.post(
        "/v1/responses", json={"model": "model", "input": "who?", "context": i, "max_output_tokens": 16}
    ),
}

BY_NAME = {
    "find by name": lambda p, n: grpc_told(lambda: found(p, reference=n)),
    "list by name": lambda p, n: grpc_told(lambda: listed(p, name_prefix=n)),
    "get by name": lambda p, n: http_told(p.web.get(f"/v1/contexts/{n}")),
    "list by name over HTTP": lambda p, n: http_told(p.web.get("/v1/contexts", params={"name_prefix": n})),
    "ask by name": lambda p, n: http_told(
        p.web.post("/v1/completions", json={**BODY, "prompt": " a", "context": n})
    ),
    "continue by name": lambda p, n: http_told(
        p.web.post("/v1/contexts", json={"text": "more", "parent": n})
    ),
    "make again by name": lambda p, n: http_told(p.web.post("/v1/contexts", json={"again": n})),
    "delete by name": lambda p, n: http_told(p.web.delete(f"/v1/contexts/{n}")),
}

WAYS: Mapping[str, Callable[[Party, str], Told]] = {
    **{f"gRPC: {way}": lambda p, i, w=work: grpc_told(lambda: w(p, i)) for way, work in BY_GRPC.items()},
    **{f"HTTP: {way}": lambda p, i, w=work: http_told(w(p, i)) for way, work in BY_HTTP.items()},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_foreign_id_is_one_that_does_not_exist(house: House, way: str) -> None:
    before = house["acme"].client.get_context(context(house.secret))
    foreign = WAYS[way](house["beta"], house.secret)
    assert without(foreign, house.secret) == without(WAYS[way](house["beta"], ABSENT), ABSENT)
    assert house["acme"].client.get_context(context(house.secret)) == before


@pytest.mark.parametrize("way", BY_NAME)
def test_a_foreign_name_is_one_that_does_not_exist(house: House, way: str) -> None:
    foreign = BY_NAME[way](house["beta"], "secret")
    assert without(foreign, "secret") == without(BY_NAME[way](house["beta"], ABSENT_NAME), ABSENT_NAME)


OPERATIONS = {
    verb.lower(): lambda p, i, call=f"{verb}Operation": of_operations(p, call, i)
    for verb in ("Get", "Wait", "Cancel", "Delete")
}


def test_the_same_text_is_made_again_for_each_and_operations_are_ones_own(house: House) -> None:
    """Neither what is ordered nor how it goes on depends on what another tenant has stored or ordered."""
    acme, beta = house["acme"], house["beta"]
    orders = {}
    for party in (acme, beta):
        for text in (TEXT, "A text that both have ordered."):
            given = {"text": text, "request_id": f"one-{len(text)}", "display_name": f"same {len(text)}"}
            orders[party.name, text] = created(party, **given)
            assert created(party, **given).name == orders[party.name, text].name
    assert len({each.name for each in orders.values()}) == 4
    metadata = {key: context_pb2.CreateContextMetadata() for key in orders}
    for key, order in orders.items():
        order.metadata.Unpack(metadata[key])
    assert len({each.context for each in metadata.values()}) == 4
    theirs, (mine, _) = metadata["beta", TEXT], (orders["acme", TEXT], None)
    assert theirs.context != context(house.secret)
    assert not orders["beta", TEXT].done  # although acme has stored that text
    names = {each.name for each in beta.client.list_operations()}
    assert names == {orders["beta", text].name for text in (TEXT, "A text that both have ordered.")}
    web = {each["id"] for each in beta.web.get("/v1/operations").json()["data"]}
    assert {f"operations/{each}" for each in web} == names
    id_ = mine.name.removeprefix("operations/")
    for call in OPERATIONS.values():
        foreign = grpc_told(lambda call=call: call(beta, id_))
        assert without(foreign, id_) == without(grpc_told(lambda call=call: call(beta, NO_JOB)), NO_JOB)
    for path in ("/v1/operations/{}", "/v1/operations/{}/cancel"):
        send = beta.web.get if path.endswith("{}") else beta.web.post
        said = [without(http_told(send(path.format(each))), each) for each in (id_, NO_JOB)]
        assert said[0] == said[1]
    for party in (acme, beta):
        for text in (TEXT, "A text that both have ordered."):
            party.client.cancel_operation(orders[party.name, text].name)
    assert {each.name for each in house["ops"].client.list_operations()} >= {
        each.name for each in orders.values()
    }


def test_lists_have_ones_own_and_what_was_granted(house: House) -> None:
    assert {each.display_name for each in house["acme"].client.list_contexts()} == {"secret", "granted"}
    (granted,) = house["beta"].client.list_contexts()
    assert (granted.display_name, granted.tenant, list(granted.readers)) == ("granted", "acme", [])
    assert {each.display_name for each in house["ops"].client.list_contexts()} == {"secret", "granted"}
    (over_http,) = house["beta"].web.get("/v1/contexts").json()["data"]
    assert over_http["id"] == house.granted
    assert house["beta"].web.get("/v1/models").json() == house["acme"].web.get("/v1/models").json()


def test_a_reader_asks_and_does_no_more(house: House) -> None:
    beta = house["beta"]
    with beta.client.generate(context(house.granted), text=" the", max_tokens=1) as generation:
        generation.read()
        assert generation.summary.context_tokens > 500
    assert beta.web.get("/v1/contexts/granted/tokens").json()["total"] > 500
    beta.client.warm_context(context(house.granted))
    refused: list[Callable[[], object]] = [
        lambda: beta.client.delete_context(context(house.granted)),
        lambda: beta.client.update_context(context(house.granted), display_name="mine"),
        lambda: beta.client.update_context(context(house.granted), readers=["beta", "gamma"]),
        lambda: beta.client.create_context(text="more", parent=context(house.granted)),
    ]
    for change in refused:
        with pytest.raises(PermissionDeniedError, match="another tenant's"):
            change()
    keep = generation_pb2.Keep(display_name="kept")
    code, said, *_ = grpc_told(lambda: ask(beta, house.granted, text=" the", keep=keep))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "another tenant's" in said


def test_what_another_tenant_stored_shortens_no_prompt(house: House) -> None:
    """A stored beginning is found by its tenant alone; who misses it is told of no other one."""
    for name, cached in (("acme", True), ("beta", False), ("ops", False)):
        client = house[name].client
        ids = list(client.tokenize(TEXT).ids)
        with client.generate(token_ids=ids, max_tokens=1, explain=True) as generation:
            generation.read()
            summary = generation.summary
        why = summary.explanation
        assert bool(summary.cached_tokens) == cached, name
        assert (why.lookup, bool(why.context)) == (("found", True) if cached else ("none", False))
        if not cached:
            assert (why.missed, why.missed_context, why.missed_tokens) == ("not_stored", "", 0)


def test_an_upload_is_its_tenants(house: House) -> None:
    upload = house["acme"].client.upload_document(b"A document of acme's.").name
    absent = f"uploads/{NO_JOB}"
    told = [
        without(
            grpc_told(lambda name=name: created(house["beta"], upload=name)), name.removeprefix("uploads/")
        )
        for name in (upload, absent)
    ]
    assert told[0] == told[1]
    file = (
        house["acme"]
        .web.post("/v1/files", files={"file": ("a.txt", b"Another one.")}, data={"purpose": "user_data"})
        .json()["id"]
    )
    said = [
        without(http_told(house["beta"].web.post("/v1/contexts", json={"file_id": each})), each[5:])
        for each in (file, f"file-{NO_JOB}")
    ]
    assert said[0] == said[1]
    order = created(house["acme"], upload=upload)
    house["acme"].client.cancel_operation(order.name)


def test_a_page_token_shows_nobody_elses_page(house: House) -> None:
    asked = context_pb2.ListContextsRequest(page_size=1)
    page = house["acme"].contexts.ListContexts(asked, metadata=house["acme"].shown)
    asked.page_token = page.next_page_token
    rest = house["beta"].contexts.ListContexts(asked, metadata=house["beta"].shown)
    assert {each.name for each in rest.contexts} <= {context(house.granted)}


def test_an_admin_sees_all_and_others_are_told_nothing_of_the_server(house: House) -> None:
    ops = house["ops"]
    assert ops.client.get_context(context(house.secret)).tenant == "acme"
    assert ops.client.server_status().contexts >= 0
    assert ops.web.get("/v1/status").status_code == 200
    with pytest.raises(PermissionDeniedError, match="the right admin"):
        house["beta"].client.server_status()
    assert house["beta"].web.get("/v1/status").status_code == 403


# ---- rights

SERVED = {
    *(
        f"/{service}/{rpc}"
        for service, rpcs in (
            (HEALTH_SERVICE, ("Check", "Watch", "List")),
            *((service, ("ServerReflectionInfo",)) for service in REFLECTION_SERVICES),
        )
        for rpc in rpcs
    ),
}


def test_every_rpc_and_route_has_its_right(house: House) -> None:
    services = house.server.grpc.served.services
    assert set(services) == set(SERVICES)
    rpcs = {
        f"/{service}/{method}"
        for service, handlers in services.items()
        for method in vars(type(handlers).__mro__[1])
        if method[0].isupper()
    }
    routes = {
        f"{method}:{route.path}" for route in ALL_ROUTES for method in (route.methods or set()) - {"HEAD"}
    }
    assert rpcs | routes | SERVED == set(RIGHT_OF)


DENIED: Mapping[str, tuple[str, Callable[[Party], Told]]] = {
    "create": ("reader", lambda p: grpc_told(lambda: created(p, text="a"))),
    "create over HTTP": ("reader", lambda p: http_told(p.web.post("/v1/contexts", json={"text": "a"}))),
    "upload": ("reader", lambda p: http_told(p.web.post("/v1/files"))),
    "keep": (
        "reader",
        lambda p: grpc_told(lambda: ask(p, ABSENT, text="a", keep=generation_pb2.Keep())),
    ),
    "label": ("reader", lambda p: grpc_told(lambda: update(p, ABSENT, "labels.a", labels={"a": "b"}))),
    "delete": ("creator", lambda p: grpc_told(lambda: BY_GRPC["delete"](p, ABSENT))),
    "delete over HTTP": ("creator", lambda p: http_told(p.web.delete(f"/v1/contexts/{ABSENT}"))),
    "forget": ("creator", lambda p: grpc_told(lambda: OPERATIONS["delete"](p, NO_JOB))),
    "pin": ("creator", lambda p: grpc_told(lambda: update(p, ABSENT, "pinned", pinned=True))),
    "status": ("creator", lambda p: http_told(p.web.get("/v1/status"))),
}


@pytest.mark.parametrize("way", DENIED)
def test_who_has_not_the_right_is_refused_before_anything_is_looked_at(house: House, way: str) -> None:
    name, work = DENIED[way]
    told = repr(work(house[name]))
    assert "PERMISSION_DENIED" in told or told.startswith("(403")
    assert "this takes the right" in told


def test_an_end_is_brought_forward_by_who_may_delete(house: House) -> None:
    """A creator names, labels and prolongs what its tenant has; ending it takes the right to delete."""
    beta, creator = house["beta"], house["creator"]
    id_ = house.library.prefill("of beta", salt="", tenant="beta", ttl="1h")
    name = context(id_)
    try:
        assert creator.client.update_context(name, labels={"a": "b"}, expire_time=NEVER).labels == {"a": "b"}
        reply = creator.web.patch(f"/v1/contexts/{id_}", json={"ttl_seconds": 60})
        assert (reply.status_code, "right delete" in reply.text) == (403, True)
        assert beta.web.patch(f"/v1/contexts/{id_}", json={"ttl_seconds": 3600}).status_code == 200
    finally:
        beta.client.delete_context(name)


def test_a_creator_ends_and_unpins_nothing_by_other_ways(house: House) -> None:
    """An order of what is there with a time to live, a mask of all fields, and the server's own label."""
    ops, creator = house["ops"], house["creator"]
    document = house.library.store.parent / "lasting.txt"
    document.write_text(TEXT)
    given = {"model": str(house.library.model), "store": house.library.store, "device": "cpu"}
    config = PrefillConfig(input=(document,), name="lasting", tenant="beta", **given)  # as a server orders it
    id_ = run_job(config, LineReporter(io.StringIO())).manifest.id
    name = context(id_)
    try:
        told = grpc_told(lambda: created(creator, text=TEXT, ttl=Duration(seconds=60)))
        assert (told[0], "right delete" in told[1]) == (grpc.StatusCode.PERMISSION_DENIED, True)
        reply = creator.web.post("/v1/contexts", json={"text": TEXT, "ttl_seconds": 60})
        assert (reply.status_code, "right delete" in reply.text) == (403, True)
        assert update(creator, id_, "*", display_name="all").display_name == "all"
        ops.client.update_context(name, pinned=True)
        told = grpc_told(lambda: update(creator, id_, "*", display_name="none"))
        assert (told[0], "right admin" in told[1]) == (grpc.StatusCode.PERMISSION_DENIED, True)
        assert creator.client.get_context(name).pinned
        dropped = {KEPT_BEGINNING: ""}
        for labelled in (
            lambda: update(creator, id_, "labels", labels=dropped),
            lambda: created(creator, text="Not the server's own.", labels=dropped),
        ):
            told = grpc_told(labelled)
            assert (told[0], "right admin" in told[1]) == (grpc.StatusCode.PERMISSION_DENIED, True)
    finally:
        ops.client.delete_context(name)


def test_names_are_of_ones_own_tenant(house: House) -> None:
    """`move_name` moves a name from one context of a tenant to another in one step, and touches no other tenant's."""
    beta = house["beta"]
    first, second = (
        house.library.prefill(name, text=TEXT + name, salt="", tenant="beta") for name in ("secret", "next")
    )
    try:
        assert beta.client.find_context("secret").name == context(first)
        moved = beta.client.update_context(context(second), display_name="secret", move_name=True)
        assert moved.display_name == "secret"
        assert beta.client.find_context("secret").name == context(second)
        assert beta.client.get_context(context(first)).display_name == f"secret {first[:6]}"
        assert house["acme"].client.find_context("secret").name == context(house.secret)
    finally:
        for id_ in (first, second):
            beta.client.delete_context(context(id_))


# ---- the audit log


def lines(house: House) -> list[dict[str, Any]]:
    return [json.loads(line) for line in house.audit.read_text().splitlines()]


def test_the_audit_log_says_who_did_what_and_never_what_was_said(house: House) -> None:
    acme = house["acme"]
    with acme.client.generate(context(house.secret), text=" unmistakable words", max_tokens=1) as generation:
        generation.read()
    assert acme.web.get("/v1/contexts/secret").status_code == 200
    acme.client.update_context(context(house.secret), readers=["gamma"])
    acme.client.update_context(context(house.secret), readers=[])
    unsaid = context_pb2.Context(name=context(house.granted), readers=["beta", "delta"])
    unmasked = context_pb2.UpdateContextRequest(context=unsaid)
    acme.contexts.UpdateContext(unmasked, metadata=acme.shown)
    acme.client.update_context(context(house.granted), readers=["beta"])
    for refused in (
        lambda: ask(house["beta"], house.secret, text=" the"),
        lambda: OPERATIONS["cancel"](house["beta"], NO_JOB),
    ):
        grpc_told(refused)
    grpc_told(lambda: found(house["beta"], name=context(house.secret)))
    httpx.get(f"{acme.url}/v1/contexts/secret", headers={"authorization": "Bearer wrong"})
    http_told(house["reader"].web.delete(f"/v1/contexts/{ABSENT}"))

    def told(**wanted: Any) -> bool:
        return any(wanted.items() <= line.items() for line in lines(house))

    for wanted in (
        {"call": "/sparsekv.v1.GenerationService/Generate", "tenant": "acme", "context": house.secret},
        {"call": "GET:/v1/contexts/{context:path}", "caller": "acme", "outcome": "200", "right": "read"},
        {"call": "/sparsekv.v1.ContextService/UpdateContext", "context": house.secret, "readers": ["gamma"]},
        {"call": "/sparsekv.v1.ContextService/UpdateContext", "readers": ["beta", "delta"]},
        {"call": "/sparsekv.v1.ContextService/GetContext", "tenant": "beta", "context": house.secret},
        {"call": "/sparsekv.v1.GenerationService/Generate", "tenant": "beta", "context": house.secret},
        {"call": "/google.longrunning.Operations/CancelOperation", "operation": f"operations/{NO_JOB}"},
        {"call": "GET:/v1/contexts/{context:path}", "caller": "", "outcome": "401"},
        {"call": "DELETE:/v1/contexts/{context:path}", "caller": "reader", "outcome": "403"},
    ):
        wait_until(lambda wanted=wanted: told(**wanted))
    written = house.audit.read_text()
    assert "unmistakable" not in written
    assert not any(party.secret in written for party in house.parties.values())
    assert house.audit.stat().st_mode & 0o077 == 0
    house.audit.rename(house.audit.with_suffix(".old"))
    acme.client.get_context(context(house.secret))
    wait_until(house.audit.exists)
    assert house.audit.stat().st_mode & 0o077 == 0  # also of the one that is begun then


def test_lines_that_cannot_be_written_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Once a minute in the log, and in the server's status."""
    audit = AuditLog(Path("/dev/full"))
    told: dict[str, Any] = dict.fromkeys(("id_", "host", "tenant", "caller", "right", "call", "outcome"), "x")
    for _ in range(3):
        audit.tell(**told, facts={})
    audit.close()
    assert audit.lost == 3
    lines = [record for record in caplog.records if "the audit log /dev/full lacks" in record.message]
    assert [record.levelname for record in lines] == ["ERROR"]
    assert "No space left on device" in lines[0].message
    gate = Gate(Limits(), Paths(), Door(), audit=audit)
    assert gate.traffic().unlogged == 3
    gate.work.close()
