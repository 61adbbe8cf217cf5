"""JWT: who is let in by one, and all that is wrong with others; keys that change; and what their headers cannot do."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from decode_engine.rpc.door import signed_tokens
from decode_engine.rpc.door.access import (
    Door,
    FailedAttempts,
    TokenFile,
    TooManyAttemptsError,
    UnauthenticatedError,
)
from decode_engine.rpc.door.signed_tokens import JwtRules, KeySetError, SignedTokens
from decode_engine.settings.config import ServeConfig
from index_store.errors import InvalidArgumentError
from index_store.store.description.callers import Caller

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
def tokens(keys: Path) -> SignedTokens:
    return SignedTokens(JwtRules(str(keys), ISSUER, AUDIENCE, "tenant", "rights"))


@pytest.mark.parametrize("kid", PRIVATE)
def test_who_shows_one_is_its_tenant_with_its_rights(tokens: SignedTokens, kid: str) -> None:
    wanted = Caller("acme", frozenset({"read", "create"}), "alice")
    token = signed(kid)
    assert tokens.caller_of(token) == tokens.caller_of(token) == wanted
    assert tokens.caller_of(signed(kid, rights="read write delete")) == Caller(
        "acme", frozenset({"read", "delete"}), "alice"
    )
    assert tokens.caller_of(signed(kid, rights=None, sub=None)) == Caller("acme", frozenset({"read"}), "acme")


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
def test_others_are_not_taken(tokens: SignedTokens, way: str) -> None:
    assert tokens.caller_of(WRONG[way]()) is None


@pytest.mark.parametrize("name", ["jku", "x5u", "jwk"])
def test_ssrf_nothing_is_fetched_for_a_tokens_header(
    tokens: SignedTokens, monkeypatch: pytest.MonkeyPatch, name: str
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
    assert tokens.caller_of(forged) is None
    assert tokens.caller_of(signed(headers={name: value})) is not None  # it is passed over


def test_keys_that_change_count_and_one_that_is_gone_counts_no_more(
    tokens: SignedTokens, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = signed("d")
    assert tokens.caller_of(token) is not None
    write_keys(keys, "r")
    tokens.look()
    assert tokens.caller_of(token) is None
    assert tokens.caller_of(signed("r")) is not None
    keys.write_text("{")
    tokens.look()
    assert "no JWT is taken" in caplog.text
    assert tokens.caller_of(signed("r")) is None
    write_keys(keys, "r")
    tokens.look()
    assert tokens.caller_of(signed("r")) is not None


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
