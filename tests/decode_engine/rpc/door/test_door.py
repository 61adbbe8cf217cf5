"""Who is let in, by tokens of a file, by JWT and with certificates, and what slows down who guesses."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import pickle
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from decode_engine.__main__ import main
from decode_engine.errors import ServerUnreachableError
from decode_engine.rpc.client import Client, Credentials
from decode_engine.rpc.door import signed_tokens
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
from decode_engine.rpc.door.signed_tokens import JwtRules, KeySetError, SignedTokens
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


def test_a_token_is_kept_as_a_hash_in_a_private_file(tokens: Path) -> None:
    secret = TokenFile(tokens).create("alice")
    assert stat.S_IMODE(tokens.stat().st_mode) == 0o600
    assert secret not in tokens.read_text()
    (token,) = TokenFile(tokens).read()
    assert (token.name, token.digest) == ("alice", digest_of(secret))
    assert list(tokens.parent.iterdir()) == [tokens]


def test_writers_at_once_lose_no_token(tokens: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(TokenFile(tokens).create, [f"user-{number}" for number in range(12)]))
    assert {token.name for token in TokenFile(tokens).read()} == {f"user-{number}" for number in range(12)}


@pytest.mark.parametrize("name", ["", "-a", "a b", "ä", "a" * 65, "a\n"])
def test_names(tokens: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the name is"):
        TokenFile(tokens).create(name)
    assert not tokens.exists()


def test_a_file_that_cannot_be_used_is_refused_by_name(tokens: Path) -> None:
    file = TokenFile(tokens)
    with pytest.raises(
        TokenFileError, match=r"there is no file of tokens; make one with `decode-engine token"
    ):
        file.read()
    file.create("alice")
    intact = tokens.read_bytes()
    tokens.write_bytes(intact.replace(b"alice", b"mallo"))
    with pytest.raises(TokenFileError, match="its contents have crc32c"):
        file.read()
    with pytest.raises(
        TokenFileError, match=r"its contents have crc32c.*delete the file and make new tokens"
    ):
        file.create("bob")  # which would throw away what may be mended
    tokens.write_bytes(intact)
    tokens.chmod(0o620)
    with pytest.raises(TokenFileError, match="can be written by others"):
        file.read()


def test_the_commands(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["token", *arguments, "--tokens", str(tokens)])
        captured = capsys.readouterr()
        assert (ended.value.code, captured.err) == (0, "")
        return captured.out

    secret = run("create", "alice").strip()
    assert digest_of(secret) == TokenFile(tokens).read()[0].digest
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


ISSUER, AUDIENCE = "https://issuer.example", "sparsekv"
PRIVATE = {
    "r": (rsa.generate_private_key(65537, 2048), "RS256", RSAAlgorithm),
    "e": (ec.generate_private_key(ec.SECP256R1()), "ES256", ECAlgorithm),
    "d": (ed25519.Ed25519PrivateKey.generate(), "EdDSA", OKPAlgorithm),
}
OTHER = ed25519.Ed25519PrivateKey.generate()


def jwk(kid: str) -> dict[str, Any]:
    private, name, algorithm = PRIVATE[kid]
    told: dict[str, Any] = json.loads(algorithm.to_jwk(private.public_key()))
    return {**told, "kid": kid, "alg": name}


def write_keys(path: Path, *kids: str) -> None:
    path.write_text(json.dumps({"keys": [jwk(kid) for kid in kids]}))


def claims(**changes: Any) -> dict[str, Any]:
    usual = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "exp": time.time() + 600,
        "sub": "alice",
        "tenant": "acme",
        "rights": ["read", "create"],
    }
    return {name: value for name, value in {**usual, **changes}.items() if value is not None}


def signed(kid: str = "d", headers: dict[str, Any] | None = None, **changes: Any) -> str:
    private, algorithm, _ = PRIVATE[kid]
    return jwt.encode(claims(**changes), private, algorithm, {"kid": kid, **(headers or {})})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys.json", *PRIVATE)
    return tmp_path / "keys.json"


@pytest.fixture
def jwts(keys: Path) -> SignedTokens:
    return SignedTokens(JwtRules(str(keys), ISSUER, AUDIENCE, "tenant", "rights"))


@pytest.mark.parametrize("kid", PRIVATE)
def test_who_shows_one_is_its_tenant_with_its_rights(jwts: SignedTokens, kid: str) -> None:
    wanted = Caller("acme", frozenset({"read", "create"}), "alice")
    token = signed(kid)
    assert jwts.caller_of(token) == jwts.caller_of(token) == wanted
    assert jwts.caller_of(signed(kid, rights="read write delete")) == Caller(
        "acme", frozenset({"read", "delete"}), "alice"
    )
    assert jwts.caller_of(signed(kid, rights=None, sub=None)) == Caller("acme", frozenset({"read"}), "acme")


def test_claims_have_the_names_that_the_server_was_told(keys: Path) -> None:
    tokens = SignedTokens(JwtRules(str(keys), ISSUER, AUDIENCE, "org", "scope"))
    found = tokens.caller_of(signed(tenant=None, org="beta", scope="openid read"))
    assert found == Caller("beta", frozenset({"read"}), "alice")
    assert tokens.caller_of(signed()) is None


def unsigned() -> str:
    head, body = (
        base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode()
        for each in ({"alg": "none", "typ": "JWT"}, claims())
    )
    return f"{head}.{body}."


def by_the_public_key() -> str:
    """Signed with HMAC, by the public key as the secret: a verifier that believes the header takes it."""
    private, _, _ = PRIVATE["r"]
    pem = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    head, body = (
        base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode()
        for each in ({"alg": "HS256", "kid": "r"}, claims())
    )
    mac = hmac.digest(pem, f"{head}.{body}".encode(), hashlib.sha256)
    return f"{head}.{body}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


WRONG: dict[str, Callable[[], str]] = {
    "expired": lambda: signed(exp=time.time() - 60),
    "without an end": lambda: signed(exp=None),
    "not yet": lambda: signed(nbf=time.time() + 600),
    "of another issuer": lambda: signed(iss="https://other.example"),
    "without an issuer": lambda: signed(iss=None),
    "for another service": lambda: signed(aud="other"),
    "without an audience": lambda: signed(aud=None),
    "without a tenant": lambda: signed(tenant=None),
    "of a tenant that is none": lambda: signed(tenant="../acme"),
    "of the tenant of no tenants": lambda: signed(tenant=""),
    "of a list of tenants": lambda: signed(tenant=["acme"]),
    "without rights": lambda: signed(rights=[]),
    "with rights that are none": lambda: signed(rights={"admin": True}),
    "by another key": lambda: jwt.encode(claims(), OTHER, "EdDSA", {"kid": "d"}),
    "by an unknown key": lambda: jwt.encode(claims(), OTHER, "EdDSA", {"kid": "x"}),
    "by a key that is not named": lambda: jwt.encode(claims(), PRIVATE["d"][0], "EdDSA"),
    "by another key's algorithm": lambda: jwt.encode(claims(), PRIVATE["r"][0], "RS512", {"kid": "r"}),
    "by nobody": unsigned,
    "by a public key": by_the_public_key,
    "altered": lambda: signed()[:-4] + "AAAA",
    "no JWT": lambda: "a.b.c",
    "of depth": lambda: base64.urlsafe_b64encode(b"[" * 2000).decode() + ".e30.AA",
    "pickled": lambda: base64.urlsafe_b64encode(pickle.dumps({"alg": "EdDSA"})).decode() + ".e30.AA",
}


@pytest.mark.parametrize("way", WRONG)
def test_others_are_not_taken(jwts: SignedTokens, way: str) -> None:
    assert jwts.caller_of(WRONG[way]()) is None


@pytest.mark.parametrize("name", ["jku", "x5u", "jwk"])
def test_ssrf_nothing_is_fetched_for_a_tokens_header(
    jwts: SignedTokens, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A header that brings a key, or says where one is, neither counts nor has anything asked."""

    def never(*given: object, **more: object) -> None:
        raise AssertionError("the network is asked")

    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setattr(signed_tokens, "_fetch", never)
    value: Any = "http://127.0.0.1:1/keys.json"
    if name == "jwk":
        value = json.loads(OKPAlgorithm.to_jwk(OTHER.public_key()))
    forged = jwt.encode(claims(), OTHER, "EdDSA", {"kid": "mine", name: value})
    assert jwts.caller_of(forged) is None
    assert jwts.caller_of(signed(headers={name: value})) is not None  # it is passed over


def test_keys_that_change_count_and_one_that_is_gone_counts_no_more(
    jwts: SignedTokens, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = signed("d")
    assert jwts.caller_of(token) is not None
    write_keys(keys, "r")
    jwts.look()
    assert jwts.caller_of(token) is None
    assert jwts.caller_of(signed("r")) is not None
    keys.write_text("{")
    jwts.look()
    assert "no JWT is taken" in caplog.text
    assert jwts.caller_of(signed("r")) is None
    write_keys(keys, "r")
    jwts.look()
    assert jwts.caller_of(signed("r")) is not None


def test_keys_of_an_address_are_fetched_again_and_stay_where_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = json.dumps({"keys": [jwk("d")]}).encode()
    asked: list[str] = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        if len(asked) == 2:
            raise OSError("unreachable")
        return kept

    monkeypatch.setattr(signed_tokens, "_fetch", fetch)
    tokens = SignedTokens(JwtRules("https://issuer.example/keys", ISSUER, AUDIENCE, "tenant", "rights"))
    token = signed()
    tokens.look()  # it is not time yet
    assert len(asked) == 1
    monkeypatch.setattr(signed_tokens, "_FETCH_EVERY_S", 0.0)
    tokens._due = 0.0
    tokens.look()
    assert tokens.caller_of(token) is not None
    kept = json.dumps({"keys": [jwk("r")]}).encode()
    tokens.look()
    assert (len(asked), tokens.caller_of(token)) == (3, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"keys": []}',
        '{"keys": [{"kty": "oct", "k": "c2VjcmV0", "alg": "HS256", "kid": "s"}]}',
        json.dumps({"keys": [json.loads(OKPAlgorithm.to_jwk(OTHER))]}),
    ],
)
def test_a_set_without_public_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(KeySetError, match="--jwt-keys is"):
        SignedTokens(JwtRules(str(tmp_path / "keys"), ISSUER, AUDIENCE, "tenant", "rights"))


def test_a_door_takes_both_kinds_and_slows_guesses_of_both(keys: Path, tmp_path: Path) -> None:
    secret = TokenFile(tmp_path / "tokens").create("bob", "beta")
    rules = JwtRules(str(keys), ISSUER, AUDIENCE, "tenant", "rights")
    with Door(tmp_path / "tokens", FailedAttempts(burst=2, every_s=1000), rules) as door:
        assert door.check(f"Bearer {signed()}", "a").tenant == "acme"
        assert door.check(f"Bearer {secret}", "a").tenant == "beta"
        used = signed(sub="used")
        door.check(f"Bearer {used}", "a")
        for _ in range(2):
            with pytest.raises(UnauthenticatedError, match="a valid token is needed"):
                door.check(f"Bearer {signed(exp=1)}", "a")
        with pytest.raises(TooManyAttemptsError):
            door.check(f"Bearer {signed(exp=2)}", "a")
        assert door.check(f"Bearer {signed(sub='fresh')}", "a").name == "fresh"  # of others at that address
        assert door.check(f"Bearer {used}", "a").name == "used"
    with Door(None, None, rules) as door:
        assert not door.is_open
        with pytest.raises(UnauthenticatedError):
            door.check(None, "a")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"jwt_keys": "k"}, "without --jwt-issuer and --jwt-audience"),
        (
            {"jwt_keys": "http://a/k", "jwt_issuer": "i", "jwt_audience": "a"},
            "expected a file or an https address",
        ),
        ({"tls_names": True}, "--tls-names is given without --tls-client-ca"),
    ],
)
def test_options_that_would_let_in_others(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        ServeConfig(Path(), "reader", device="cpu", **given)
