"""Who is let in: the file of tokens, and one rule for both ports.

A token is 32 random bytes, so its SHA-256, which is all that the file has, tells nothing about it. The file is JSON
with a version and a checksum over itself, private to its owner, replaced all at once. All tokens are compared with
what a caller shows, `authorization: Bearer TOKEN`, each in constant time, so neither answer nor time tells how
close a guess was. Attempts that fail are counted by address: where they come too fast, tokens that were not used
before are refused unseen, while those in use, and JWT, are let in as ever, so that guessing locks nobody else out.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Self

from decode_engine.rpc.door.signed_tokens import JwtRules, SignedTokens
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.store.description.callers import (
    OPERATOR,
    RIGHTS,
    Caller,
    Right,
    check_tenant,
    is_tenant,
    require_tenant,
    rights_of,
)
from index_store.store.description.json_fields import Sealed, check_utc, field_error
from index_store.store.files.durable import TEMPORARY_PREFIX, locked_file, new_file, storing, sync_path
from index_store.store.files.reading import read_file, stamp_of


class UnauthenticatedError(SparseKVError, reason="UNAUTHENTICATED"):
    """The caller has no token that the server knows."""


class TooManyAttemptsError(SparseKVError, reason="TOO_MANY_ATTEMPTS"):
    """Too many wrong tokens came from the caller's address."""


class TokenFileError(SparseKVError, reason="TOKENS_UNUSABLE"):
    """The file of tokens is missing, damaged, or open to others."""


class CertificateError(SparseKVError, reason="CERTIFICATE_UNUSABLE"):
    """A certificate or key cannot be used."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """doors: of the server. places: requests that may be running or waiting at once, all of which may come by one door.
    key: by which each knows what another one has signed."""

    doors: int = 1
    places: int = 0
    key: bytes = field(default_factory=partial(secrets.token_bytes, 32))

    def part(self, most: int) -> int:
        """What one door may have, of which all may have `most` together; at least one."""
        return max(1, most // self.doors)


MAX_TOKENS = 10_000
MAX_TOKEN_CHARACTERS = 4096
_PREFIX = "skv_"  # by which programs that look for leaked secrets know one
_SECRET_BYTES = 32
_PRIVATE_FILE = 0o600
_OTHERS_WRITE = 0o022
_LARGEST = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token. sha256: of its text, 64 lower-case hex digits. tenant, rights: of who shows it.
    expires_at: when it opens nothing any more; None for never. Times are UTC."""

    name: str
    sha256: str
    created_at: datetime
    tenant: str = ""
    rights: tuple[Right, ...] = RIGHTS
    expires_at: datetime | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise field_error("name", self.name, "1 to 64 letters, digits, '.', '_' and '-'")
        if not _DIGEST.fullmatch(self.sha256):
            raise field_error("sha256", self.sha256, "64 lower-case hex digits")
        check_utc("created_at", self.created_at)
        check_tenant("tenant", self.tenant)
        if not self.rights or len(set(self.rights)) < len(self.rights):
            raise field_error("rights", self.rights, f"some of {', '.join(RIGHTS)}")
        if self.expires_at is not None:
            check_utc("expires_at", self.expires_at)

    @property
    def unsaid(self) -> Collection[str]:
        """Fields that the file says nothing of: files of before tenants have none of them."""
        said = {"tenant": self.tenant, "rights": self.rights != RIGHTS, "expires_at": self.expires_at}
        return tuple(name for name, there in said.items() if not there)

    @property
    def caller(self) -> Caller:
        return Caller(self.tenant, frozenset(self.rights), self.name)

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tokens of a file, in order of their making."""

    tokens: tuple[Token, ...]

    def __post_init__(self) -> None:
        if len({token.name for token in self.tokens}) != len(self.tokens) or len(self.tokens) > MAX_TOKENS:
            raise field_error(
                "tokens", [token.name for token in self.tokens], f"at most {MAX_TOKENS} different names"
            )


TOKENS = Sealed(
    Tokens,
    "the file of tokens",
    "restore a copy, or delete the file and make new tokens with `decode-engine token create`",
    wrong=TokenFileError,
    damaged=TokenFileError,
    foreign=TokenFileError,
)


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class TokenFile:
    """The tokens of a server. Writers on one machine exclude each other; readers see the old file or the new one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[Token, ...]:
        """All tokens, in order of their making. Raises TokenFileError for a file that is missing or cannot be used."""
        try:
            data, status = read_file(self._path, _LARGEST)
        except FileNotFoundError as error:
            raise TokenFileError(
                f"{self._path}: there is no file of tokens; make one with `decode-engine token create --tokens "
                f"{self._path} NAME`",
                path=self._path,
            ) from error
        except OSError as error:
            raise self._error(
                f"cannot be read ({error.strerror or error})", "check its permissions"
            ) from error
        if status.st_mode & _OTHERS_WRITE:
            raise self._error("can be written by others than its owner", f"`chmod 600 {self._path}`")
        return TOKENS.parse(data, str(self._path)).tokens

    def stamp(self) -> tuple[int, ...] | None:
        return stamp_of(self._path)

    def create(
        self, name: str, tenant: str = "", rights: Sequence[str] = (), expires_at: datetime | None = None
    ) -> str:
        """Adds a token and returns it, the only time that it is seen. Makes the file where there is none.

        rights: by default all of them, of a tenant's token all but admin. Raises InvalidArgumentError for a name
        that is taken, for what is no name, tenant or right, TokenFileError, StoreError where writing fails.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"the name is {name[:100]!r}, expected 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_' and '-', "
                "beginning with a letter or digit",
                field="name",
            )
        require_tenant(tenant)
        had = rights_of(rights) if rights else tuple(each for each in RIGHTS if not tenant or each != "admin")
        secret = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        with self._writing() as tokens:
            if any(token.name == name for token in tokens):
                raise InvalidArgumentError(
                    f"there is a token named {name!r} already; revoke it first, or choose another name",
                    field="name",
                )
            if len(tokens) >= MAX_TOKENS:
                raise InvalidArgumentError(
                    f"{self._path} has {len(tokens)} tokens, which is the limit; revoke some first"
                )
            made = datetime.now(UTC).replace(microsecond=0)
            added = Token(name, digest_of(secret).hex(), made, tenant, had, expires_at)
            self._write((*tokens, added))
        return secret

    def revoke(self, name: str) -> None:
        """Removes a token. Raises InvalidArgumentError where there is none of that name, TokenFileError, StoreError."""
        with self._writing() as tokens:
            left = tuple(token for token in tokens if token.name != name)
            if len(left) == len(tokens):
                raise InvalidArgumentError(
                    f"there is no token named {name[:100]!r} in {self._path}; `decode-engine token list` has the names",
                    field="name",
                )
            self._write(left)

    @contextmanager
    def _writing(self) -> Iterator[tuple[Token, ...]]:
        with locked_file(self._path.with_name(f"{self._path.name}.lock")):
            yield self.read() if os.path.lexists(self._path) else ()

    def _write(self, tokens: Sequence[Token]) -> None:
        contents = TOKENS.render(Tokens(tuple(tokens)))
        temporary = self._path.with_name(f"{TEMPORARY_PREFIX}{self._path.name}")
        with storing("writing the tokens", self._path):
            try:
                temporary.unlink(missing_ok=True)  # a killed writer's, perhaps with other permissions
                with new_file(temporary, _PRIVATE_FILE) as file:
                    file.write(contents)
                sync_path(temporary)
                os.replace(temporary, self._path)
                sync_path(self._path.absolute().parent)
            finally:
                temporary.unlink(missing_ok=True)

    def _error(self, what: str, advice: str) -> TokenFileError:
        return TokenFileError(f"{self._path}: the file of tokens {what}; {advice}", path=self._path)


logger = logging.getLogger(__name__)

_OF_CERTIFICATES: frozenset[Right] = frozenset(("read", "create", "delete"))
_SCHEME = "bearer "
_LOOK_S = 1.0
_MAX_HOSTS = 4096


class FailedAttempts:
    """How often each address failed lately: `burst` at once, then one more every `every_s` seconds."""

    def __init__(
        self, burst: int = 20, every_s: float = 3.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._every_s = every_s
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()  # when an address has its whole burst again

    def of_one(self, sharing: Sharing) -> FailedAttempts:
        """Those of one of several doors, which allow as many together."""
        return FailedAttempts(sharing.part(self._burst), self._every_s * sharing.doors, self._clock)

    def delay_s(self, host: str) -> float:
        """Seconds until the address may fail once more; 0 where it may now."""
        free_at = self._free_at.get(host, 0.0)
        return max(0.0, free_at - self._clock() - (self._burst - 1) * self._every_s)

    def add(self, host: str) -> None:
        now = self._clock()
        self._free_at[host] = max(self._free_at.pop(host, 0.0), now) + self._every_s
        if len(self._free_at) > _MAX_HOSTS:
            self._free_at.popitem(last=False)


class Door:
    """Lets callers in by the tokens of a file, by JWT, by the names of their certificates, or everybody where none of
    these is wanted. From any thread.

    A thread looks at the file every second, so that a new token counts soon, and a revoked one no more. Where the file
    cannot be used any longer, nobody is let in.
    """

    def __init__(
        self,
        path: Path | None = None,
        attempts: FailedAttempts | None = None,
        rules: JwtRules | None = None,
        names: bool = False,
    ) -> None:
        """path: the file of tokens. rules: of JWT. names: whether those of certificates are tenants. Raises
        TokenFileError, and what `SignedTokens` raises."""
        self._names = names
        self._signed = None if rules is None else SignedTokens(rules)
        self._file = None if path is None else TokenFile(path)
        self._attempts = attempts or FailedAttempts()
        self._lock = threading.Lock()
        self._tokens: tuple[Token, ...] = ()
        self._accepted: set[bytes] = set()
        self._stamp: tuple[int, ...] | None = None
        self._closed = threading.Event()
        self._inside, self._draining = 0, False
        self._empty = asyncio.Event()
        if self._file is not None:
            self._stamp, self._tokens = self._file.stamp(), self._file.read()
        if self._file is not None or self._signed is not None:
            threading.Thread(target=self._watch, name="tokens", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        return self._file is None and self._signed is None and not self._names

    def close(self) -> None:
        """Looks at the file no more. Idempotent."""
        self._closed.set()

    @property
    def draining(self) -> bool:
        return self._draining

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A call is served in the block. On the loop's thread, as `drain`."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if self._draining and not self._inside:
                self._empty.set()

    async def drain(self, most_s: float) -> None:
        """Nobody is let in from now on; returns when nobody is inside any more, or after so many seconds."""
        self._draining = True
        if self._inside:
            with suppress(TimeoutError):
                async with asyncio.timeout(most_s):
                    await self._empty.wait()

    def check(self, authorization: str | None, host: str, certificate: str = "") -> Caller:
        """Who the caller is; where nobody is asked, one of no tenant and with all rights.

        authorization: what the caller sent under that name. host: the address that it came from. certificate: the name
        in the one that it showed; what it sent goes first. Raises
        UnauthenticatedError, the same for every reason, and TooManyAttemptsError.
        """
        if self.is_open:
            return OPERATOR
        secret = _secret(authorization)
        if not secret and self._names and is_tenant(certificate):
            return Caller(certificate, _OF_CERTIFICATES, certificate)
        digest = digest_of(secret)
        with self._lock:
            signed = None
            if self._signed is not None and secret.count(".") == 2:  # which come and go, and nobody guesses
                signed = self._signed.caller_of(secret)
            delay = self._attempts.delay_s(host)
            if delay and signed is None and digest not in self._accepted:
                error = TooManyAttemptsError(
                    "too many attempts with wrong tokens came from this address; try again later"
                )
                error.retry_after_s = delay
                raise error
            found = [token for token in self._tokens if hmac.compare_digest(token.digest, digest)]
            caller = signed
            if found and (found[0].expires_at is None or datetime.now(UTC) < found[0].expires_at):
                caller = found[0].caller
            if caller is not None:
                self._accept(digest)
                return caller
            self._attempts.add(host)
        raise UnauthenticatedError("a valid token is needed, sent as `authorization: Bearer TOKEN`")

    def _accept(self, digest: bytes) -> None:
        if len(self._accepted) >= 2 * MAX_TOKENS:  # JWT come and go
            self._accepted.clear()
        self._accepted.add(digest)

    def look(self) -> None:
        if self._signed is not None:
            self._signed.look()
        if self._file is None or (stamp := self._file.stamp()) == self._stamp:
            return
        tokens: tuple[Token, ...] = ()
        try:
            tokens = self._file.read()
            logger.info("the tokens have changed, there are %d", len(tokens))
        except TokenFileError as error:
            logger.error("nobody is let in: %s", error.message)
        with self._lock:
            self._tokens, self._stamp = tokens, stamp
            self._accepted.clear()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            self.look()


def _secret(authorization: str | None) -> str:
    """The token that was shown, "" for none."""
    shown = (authorization or "")[: len(_SCHEME) + MAX_TOKEN_CHARACTERS + 1]
    return shown[len(_SCHEME) :].strip() if shown.lower().startswith(_SCHEME) else ""
