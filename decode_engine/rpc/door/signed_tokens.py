"""Tokens that somebody else makes: JWT, signed by a key of a set (JWK) that comes from a file or an https address.

Which key signed a token is looked for in that set alone: addresses and keys in a token's header count for nothing, and
no caller has anything fetched. Only signatures by asymmetric keys are taken, each by its own key's algorithm.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import HTTPRedirectHandler, Request, build_opener

from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.store.description.callers import RIGHTS, Caller, is_tenant
from index_store.store.files.reading import stamp_of

if TYPE_CHECKING:
    from jwt import PyJWK

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")

_FETCH_EVERY_S, _FETCH_S = 300.0, 10.0
_LEEWAY_S = 30.0
_LARGEST = 1 << 20
_MOST_KNOWN = 4096
_MOST_NAME = 64

logger = logging.getLogger(__name__)


class KeySetError(SparseKVError, reason="JWT_KEYS_UNUSABLE"):
    """The set of keys that JWT are verified by cannot be used."""


@dataclass(frozen=True, slots=True)
class JwtRules:
    """Which JWT are taken. keys: a file's path, or an https address. issuer, audience: that they name. tenant_claim,
    rights_claim: what says whose they are, and what they may: a list, or names with blanks between them."""

    keys: str
    issuer: str
    audience: str
    tenant_claim: str
    rights_claim: str

    @property
    def remote(self) -> bool:
        return self.keys.startswith("https://")


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *given: object) -> None:
        return None  # the address is the operator's choice; where it leads to would be another's


class SignedTokens:
    """Verifies JWT. `look` is to be called now and then, by a thread that may wait; `caller_of` by any other."""

    def __init__(self, rules: JwtRules) -> None:
        """Raises KeySetError, and InvalidArgumentError where PyJWT is not installed."""
        try:
            import jwt  # noqa: F401 - late: whoever asks for none does without
        except ImportError as error:
            raise InvalidArgumentError(
                "--jwt-keys needs PyJWT and cryptography, which are not installed: `pip install 'sparsekv[jwt]'`"
            ) from error
        self._rules = rules
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[Caller, float]] = (
            OrderedDict()
        )  # by digest, with when each ends
        self._stamp: object = None
        self._due = 0.0
        self._keys = self._read()

    def caller_of(self, token: str) -> Caller | None:
        """Who shows a token; None for one that is not to be taken, for whatever reason."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            keys, known = self._keys, self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
                return known[0] if time.time() < known[1] + _LEEWAY_S else None
        verified = self._verify(token, keys)
        if verified is not None:
            with self._lock:
                if self._keys is keys:
                    self._known[digest] = verified
                while len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)
        return None if verified is None else verified[0]

    def look(self) -> None:
        """Reads the keys again where their file has changed, or where it is time to fetch them.

        Where they cannot be fetched, those that were go on to count; a file that cannot be used lets nobody in.
        """
        if not self._is_due():
            return
        keys: Mapping[str, PyJWK] = {}
        try:
            keys = self._read()
        except KeySetError as error:
            if self._rules.remote:
                logger.warning("the keys of JWT stay as they were: %s", error.message)
                return
            logger.error("no JWT is taken: %s", error.message)
        with self._lock:
            self._keys = keys
            self._known.clear()

    def _is_due(self) -> bool:
        if self._rules.remote:
            return time.monotonic() >= self._due
        return stamp_of(Path(self._rules.keys)) != self._stamp

    def _read(self) -> Mapping[str, PyJWK]:
        from jwt import PyJWKSet
        from jwt.exceptions import PyJWTError

        self._due = time.monotonic() + _FETCH_EVERY_S
        self._stamp = None if self._rules.remote else stamp_of(Path(self._rules.keys))
        where = self._rules.keys
        try:
            found = PyJWKSet.from_dict(json.loads(_fetch(where) if self._rules.remote else _load(where)))
        except (OSError, ValueError, PyJWTError, AttributeError, TypeError) as error:
            raise KeySetError(
                f"--jwt-keys is {where!r}, which cannot be used ({error}); expected a set of public keys (JWK), as a "
                "file or at an https address"
            ) from error
        taken = [key for key in found.keys if key.algorithm_name in ALGORITHMS]
        usable = [key for key in taken if "d" not in key._jwk_data]  # else it is a private one
        if len(usable) < len(found.keys):
            raise KeySetError(
                f"--jwt-keys is {where!r}, which has keys that are not public ones, or of another algorithm than "
                f"{', '.join(ALGORITHMS)}; leave them out",
                keys=len(found.keys) - len(usable),
            )
        return {key.key_id or "": key for key in usable}

    def _verify(self, token: str, keys: Mapping[str, PyJWK]) -> tuple[Caller, float] | None:
        import jwt

        rules = self._rules
        try:
            named = jwt.get_unverified_header(token).get("kid") or ""
            key = keys.get(named) or (next(iter(keys.values())) if not named and len(keys) == 1 else None)
            if key is None:
                return None
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                issuer=rules.issuer,
                audience=rules.audience,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except (jwt.exceptions.PyJWTError, ValueError, TypeError, RecursionError) as error:
            logger.debug("a JWT is not taken: %s", error)
            return None
        tenant = claims.get(rules.tenant_claim)
        rights = _names(claims.get(rules.rights_claim, "read")) & set(RIGHTS)
        if not isinstance(tenant, str) or not is_tenant(tenant) or not rights:
            return None
        subject = str(claims.get("sub", ""))[:_MOST_NAME]
        name = subject if subject.isprintable() and subject else tenant
        had = frozenset(each for each in RIGHTS if each in rights)
        return Caller(tenant, had, name), float(claims["exp"])


def _names(claim: Any) -> set[str]:
    """Names in a claim that is a list or a text of them."""
    given = claim.split() if isinstance(claim, str) else claim
    return {each for each in given if isinstance(each, str)} if isinstance(given, list) else set()


def _load(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_LARGEST)


def _fetch(url: str) -> bytes:
    request = Request(url, headers={"accept": "application/json"})
    with build_opener(_NoRedirects).open(request, timeout=_FETCH_S) as reply:
        data: bytes = reply.read(_LARGEST)
        return data
