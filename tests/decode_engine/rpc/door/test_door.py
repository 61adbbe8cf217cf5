"""Who is let in: tokens, failed attempts, certificates, over gRPC with a real port."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from decode_engine.errors import ServerUnreachableError
from decode_engine.rpc.client import Client, Credentials
from decode_engine.rpc.door.access import (
    CertificateError,
    Door,
    FailedAttempts,
    TokenFile,
    TokenFileError,
    TooManyAttemptsError,
    UnauthenticatedError,
)
from decode_engine.rpc.door.options import Certificates, read_token
from decode_engine.rpc.transport.listener import Listener
from decode_engine.settings.config import ServeConfig
from index_store.errors import InvalidArgumentError
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
        return context_pb2.Context(name=request.name, display_name=call.caller)


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


def test_without_a_file_everybody_is_let_in() -> None:
    assert Door().is_open
    assert Door().check(None, "host") == ""


def test_only_the_tokens_of_the_file_are_let_in_by_name(tokens: Path) -> None:
    file = TokenFile(tokens)
    alice, bob = file.create("alice"), file.create("bob")
    with Door(tokens) as door:
        assert door.check(bearer(alice), "a") == "alice"
        assert door.check(f"bearer  {bob} ", "a") == "bob"
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


def test_a_changed_file_counts_and_a_damaged_one_lets_nobody_in(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TokenFile(tokens)
    alice = file.create("alice")
    with Door(tokens) as door:
        bob = file.create("bob")
        door.look()
        assert door.check(bearer(bob), "a") == "bob"
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


def test_a_server_does_not_start_without_its_tokens(tokens: Path) -> None:
    with pytest.raises(TokenFileError):
        Door(tokens)


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
        assert door.check(bearer(used), "bad") == "used"
        assert door.check(bearer(fresh), "good") == "fresh"
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


def test_mutual_encryption() -> None:
    with listening(certificates=Certificates(SERVER, SERVER_KEY, AUTHORITY)) as address:
        with Client(address, credentials=Credentials(ca_file=AUTHORITY, **MINE)) as client:
            assert client.get_context("contexts/x").name == "contexts/x"
        with Client(address, credentials=Credentials(ca_file=AUTHORITY)) as nobody:
            assert not nobody.is_serving()


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
