"""Who is let in: tokens, failed attempts, certificates, over gRPC with a real port."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from decode_engine.__main__ import main
from decode_engine.errors import ServerUnreachableError
from decode_engine.rpc.client import Client, Credentials
from decode_engine.rpc.door.access import (
    CertificateError,
    Door,
    FailedAttempts,
    Sharing,
    TokenFile,
    TokenFileError,
    TooManyAttemptsError,
    UnauthenticatedError,
    digest_of,
)
from decode_engine.rpc.door.options import Certificates, read_token
from decode_engine.rpc.transport.calls import Limits
from decode_engine.rpc.transport.listener import Listener
from decode_engine.settings.config import ServeConfig
from index_store.errors import InvalidArgumentError
from index_store.store.description.callers import RIGHTS, Caller
from sparsekv.v1 import context_pb2, context_pb2_grpc

FILES = Path(__file__).parents[3] / "support" / "certificates"
AUTHORITY, SERVER, SERVER_KEY = FILES / "authority.pem", FILES / "server.pem", FILES / "server.key"
MINE = {"client_cert": FILES / "client.pem", "client_key": FILES / "client.key"}


class Clock:
    """A clock that stands."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Named(context_pb2_grpc.ContextServiceServicer):
    """Answers with the caller's name."""

    async def GetContext(self, request: Any, call: Any) -> Any:
        return context_pb2.Context(name=request.name, display_name=call.caller.name)


@contextmanager
def listening(door: Door | None = None, certificates: Certificates | None = None) -> Iterator[str]:
    def register(server: Any) -> None:
        context_pb2_grpc.add_ContextServiceServicer_to_server(Named(), server)

    services = ["sparsekv.v1.ContextService"]
    listener = Listener("localhost:0", services, register, door=door, certificates=certificates)
    listener.set_serving(True)
    try:
        yield listener.address
    finally:
        listener.begin_stop(0).result(60)
        listener.close()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def bearer(secret: str) -> str:
    return f"Bearer {secret}"


def test_only_the_tokens_of_the_file_are_let_in_by_name(tokens: Path) -> None:
    file = TokenFile(tokens)
    alice, bob = file.create("alice"), file.create("bob")
    with Door(tokens) as door:
        assert door.check(bearer(alice), "a").name == "alice"
        assert door.check(f"bearer  {bob} ", "a").name == "bob"
        said = set()
        for shown in (
            None,
            "",
            "Bearer",
            bearer(""),
            alice,
            f"Basic {alice}",
            bearer(alice[:-1]),
            bearer(alice * 40),
        ):
            with pytest.raises(UnauthenticatedError) as caught:
                door.check(shown, "a")
            said.add(caught.value.message)
        assert len(said) == 1


def test_a_token_says_whose_it_is_and_what_it_may(tokens: Path) -> None:
    file = TokenFile(tokens)
    plain, mine = file.create("plain"), file.create("mine", "acme")
    reader = file.create("reader", "acme", ("read",))
    late = file.create("late", "acme", expires_at=datetime.now(UTC) - timedelta(seconds=1))
    with Door(tokens) as door:
        assert door.check(bearer(plain), "a") == Caller("", frozenset(RIGHTS), "plain")
        everything = frozenset({"read", "create", "delete"})
        assert door.check(bearer(mine), "a") == Caller("acme", everything, "mine")
        assert door.check(bearer(reader), "a").rights == {"read"}
        with pytest.raises(UnauthenticatedError):
            door.check(bearer(late), "a")


def test_a_token_of_before_tenants_is_written_as_it_was(tokens: Path) -> None:
    TokenFile(tokens).create("alice")
    assert set(json.loads(tokens.read_text())["tokens"][0]) == {"name", "sha256", "created_at"}
    assert TokenFile(tokens).read()[0].caller == Caller(name="alice")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("../acme", ()), "the tenant is '../acme'"),
        (("*", ()), "the tenant is"),
        (("a" * 65, ()), "the tenant is"),
        (("acme", ("write",)), "the rights are 'write', expected some of read, create, delete, admin"),
    ],
)
def test_tenants_and_rights_that_are_none(
    tokens: Path, given: tuple[str, tuple[str, ...]], said: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        TokenFile(tokens).create("alice", *given)
    assert not tokens.exists()


def test_a_changed_file_counts_and_a_damaged_one_lets_nobody_in(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TokenFile(tokens)
    alice = file.create("alice")
    with Door(tokens) as door:
        bob = file.create("bob")
        door.look()
        assert door.check(bearer(bob), "a").name == "bob"
        file.revoke("alice")
        door.look()
        with pytest.raises(UnauthenticatedError):
            door.check(bearer(alice), "a")
        tokens.write_text("{}")
        with caplog.at_level(logging.ERROR):
            door.look()
        assert "nobody is let in" in caplog.text
        with pytest.raises(UnauthenticatedError):
            door.check(bearer(bob), "a")


def test_guessing_is_slowed_down_for_its_address_and_not_for_tokens_in_use(tokens: Path) -> None:
    file, clock = TokenFile(tokens), Clock()
    used, fresh = file.create("used"), file.create("fresh")
    with Door(tokens, FailedAttempts(burst=3, every_s=10, clock=clock)) as door:
        door.check(bearer(used), "bad")
        for _ in range(3):
            with pytest.raises(UnauthenticatedError):
                door.check(bearer("guess"), "bad")
        for secret in ("guess", fresh):
            with pytest.raises(TooManyAttemptsError) as caught:
                door.check(bearer(secret), "bad")
            assert caught.value.retry_after_s == 10
        assert door.check(bearer(used), "bad").name == "used"
        assert door.check(bearer(fresh), "good").name == "fresh"
        clock.now += 10
        with pytest.raises(UnauthenticatedError):
            door.check(bearer("guess"), "bad")
        with pytest.raises(TooManyAttemptsError):
            door.check(bearer("guess"), "bad")


def test_failed_attempts_of_many_addresses_are_forgotten() -> None:
    attempts = FailedAttempts(burst=1, every_s=10, clock=Clock())
    for number in range(5000):
        attempts.add(str(number))
    assert attempts.delay_s("0") == 0
    assert attempts.delay_s("4999") == 10


def test_calls_need_a_token_and_health_does_not(tokens: Path) -> None:
    secret = TokenFile(tokens).create("alice")
    with Door(tokens) as door, listening(door) as address:
        with Client(address, credentials=Credentials(token=secret)) as client:
            assert client.get_context("contexts/x").display_name == "alice"
        with Client(address) as client:
            assert client.is_serving()
            with pytest.raises(UnauthenticatedError, match="a valid token is needed"):
                client.get_context("contexts/x")
        with grpc.insecure_channel(address) as channel:
            stub = context_pb2_grpc.ContextServiceStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetContext(
                    context_pb2.GetContextRequest(name="x"), metadata=(("authorization", "Bearer x"),)
                )
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_encrypted_calls() -> None:
    with listening(certificates=Certificates(SERVER, SERVER_KEY)) as address:
        with Client(address, credentials=Credentials(ca_file=AUTHORITY)) as client:
            assert client.get_context("contexts/x").name == "contexts/x"
        with Client(address) as plain, pytest.raises(ServerUnreachableError):
            plain.get_context("contexts/x")
        with Client(address, credentials=Credentials(ca_file=Path("system"))) as stranger:
            assert not stranger.is_serving()


def test_certificates_are_checked_before_anything_runs(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no certificate")
    with pytest.raises(CertificateError, match="expected a certificate chain and its private key"):
        Certificates(SERVER, FILES / "client.key").check()
    with pytest.raises(CertificateError, match="--tls-client-ca is"):
        Certificates(SERVER, SERVER_KEY, text).check()
    with pytest.raises(CertificateError, match="--ca-file is"):
        Credentials(ca_file=text)
    with pytest.raises(InvalidArgumentError, match="both of --client-cert and --client-key"):
        Credentials(ca_file=AUTHORITY, client_cert=MINE["client_cert"])
    with pytest.raises(InvalidArgumentError, match="without --ca-file"):
        Credentials(**MINE)
    with pytest.raises(InvalidArgumentError, match="the token has 5 characters"):
        Credentials(token="a\nb c")


def test_tokens_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_TOKEN", "from-the-environment")
    assert read_token(None) == "from-the-environment"
    (tmp_path / "token").write_text("from-a-file\n")
    assert read_token(tmp_path / "token") == "from-a-file"
    monkeypatch.delenv("SPARSEKV_TOKEN")
    assert read_token(None) is None


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ({}, "neither encryption nor any token"),
        ({"tokens": Path("t")}, "is no encryption"),
        ({"tls_cert": SERVER, "tls_key": SERVER_KEY}, "are no tokens"),
    ],
)
def test_other_machines_are_let_near_only_with_both_or_by_word(given: dict[str, Any], lacking: str) -> None:
    def config(**options: Any) -> ServeConfig:
        return ServeConfig(Path(), "reader", device="cpu", **options)

    with pytest.raises(InvalidArgumentError, match=f"--listen is 0.0.0.0:1, .*{lacking}.*add --allow-remote"):
        config(listen="0.0.0.0:1", **given)
    assert config(listen="0.0.0.0:1", allow_remote=True, **given)
    assert config(**given)
    assert config(listen="0.0.0.0:1", tokens=Path("t"), tls_cert=SERVER, tls_key=SERVER_KEY)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(InvalidArgumentError, match="both of --tls-cert and --tls-key"):
        ServeConfig(Path(), "reader", tls_cert=SERVER)
    with pytest.raises(InvalidArgumentError, match="--tls-client-ca is given without"):
        ServeConfig(Path(), "reader", tls_client_ca=AUTHORITY)


@pytest.mark.parametrize("doors", [1, 3, 4, 64])
def test_parts_come_to_no_more_than_the_whole(doors: int) -> None:
    sharing = Sharing(doors)
    limits, whole = Limits(connections=100).of_one(sharing), Limits(connections=100)
    for name in ("connections", "unfinished", "unread", "abandoned", "waiting"):
        assert 1 <= doors * getattr(limits, name) <= getattr(whole, name)
    crowded = Limits().of_one(Sharing(doors, places=500))  # who may all come by one door
    for name in ("unfinished", "unread", "waiting"):
        assert getattr(crowded, name) == getattr(limits, name) + 500
    assert limits.streams == whole.streams  # of one connection, which has one door
    assert sharing.part(8) * doors <= max(8, doors)


def test_attempts_at_all_doors_are_as_many_as_at_one() -> None:
    now = 0.0
    each = [FailedAttempts(20, 3.0, lambda: now).of_one(Sharing(4)) for _ in range(4)]

    def failed() -> int:
        count = 0
        for attempts in each:
            while not attempts.delay_s("a"):
                attempts.add("a")
                count += 1
        return count

    assert failed() == 20
    now = 12.0
    assert failed() == 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_a_token_is_kept_as_a_hash_in_a_private_file(path: Path) -> None:
    secret = TokenFile(path).create("alice")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    (token,) = TokenFile(path).read()
    assert (token.name, token.digest) == ("alice", digest_of(secret))
    assert list(path.parent.iterdir()) == [path]


def test_writers_at_once_lose_no_token(path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(TokenFile(path).create, [f"user-{number}" for number in range(12)]))
    assert {token.name for token in TokenFile(path).read()} == {f"user-{number}" for number in range(12)}


@pytest.mark.parametrize("name", ["", "-a", "a b", "ä", "a" * 65, "a\n"])
def test_names(path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the name is"):
        TokenFile(path).create(name)
    assert not path.exists()


def test_a_file_that_cannot_be_used_is_refused_by_name(path: Path) -> None:
    file = TokenFile(path)
    with pytest.raises(
        TokenFileError, match=r"there is no file of tokens; make one with `decode-engine token"
    ):
        file.read()
    file.create("alice")
    intact = path.read_bytes()
    path.write_bytes(intact.replace(b"alice", b"mallo"))
    with pytest.raises(TokenFileError, match="its contents have crc32c"):
        file.read()
    with pytest.raises(
        TokenFileError, match=r"its contents have crc32c.*delete the file and make new tokens"
    ):
        file.create("bob")  # which would throw away what may be mended
    path.write_bytes(intact)
    path.chmod(0o620)
    with pytest.raises(TokenFileError, match="can be written by others"):
        file.read()


def test_the_commands(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["token", *arguments, "--tokens", str(path)])
        captured = capsys.readouterr()
        assert (ended.value.code, captured.err) == (0, "")
        return captured.out

    secret = run("create", "alice").strip()
    assert digest_of(secret) == TokenFile(path).read()[0].digest
    assert json.loads(run("create", "bob", "--format", "json"))["name"] == "bob"
    assert [token["name"] for token in json.loads(run("list", "--format", "json"))["tokens"]] == [
        "alice",
        "bob",
    ]
    run("create", "carol", "--tenant", "acme", "--rights", "read,create", "--ttl", "90d")
    carol = json.loads(run("list", "--format", "json"))["tokens"][-1]
    assert (carol["tenant"], carol["rights"]) == ("acme", ["read", "create"])
    assert carol["expires_at"] > carol["created_at"]
    assert "carol  acme" in run("list")
    run("revoke", "carol")
    assert "alice" in run("list")
    assert run("revoke", "alice") == "revoked alice\n"
    run("revoke", "bob")
    assert "nobody is let in" in run("list")
