"""The file of tokens: names and hashes, never a token itself.

A token is 32 random bytes, so its SHA-256 tells nothing about it, and guessing one is hopeless however fast it goes.
The file is JSON with a version and a checksum over itself, private to its owner, replaced all at once.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from decode_engine.rpc.door.refusals import TokenFileError
from index_store.errors import InvalidArgumentError
from index_store.store.description.json_fields import Sealed, check_utc, field_error
from index_store.store.files.durable import TEMPORARY_PREFIX, locked_file, new_file, storing, sync_path
from index_store.store.files.reading import read_file

MAX_TOKENS = 10_000
MAX_TOKEN_CHARACTERS = 256
_PREFIX = "skv_"  # by which programs that look for leaked secrets know one
_SECRET_BYTES = 32
_PRIVATE_FILE = 0o600
_OTHERS_WRITE = 0o022
_LARGEST = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token. sha256: of its text, 64 lower-case hex digits. created_at: UTC."""

    name: str
    sha256: str
    created_at: datetime

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise field_error("name", self.name, "1 to 64 letters, digits, '.', '_' and '-'")
        if not _DIGEST.fullmatch(self.sha256):
            raise field_error("sha256", self.sha256, "64 lower-case hex digits")
        check_utc("created_at", self.created_at)

    @property
    def digest(self) -> bytes:
        """As bytes."""
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
    """What is kept of a token."""
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
        """Changes whenever the file does; None where it cannot be seen."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size

    def create(self, name: str) -> str:
        """Adds a token and returns it, the only time that it is seen. Makes the file where there is none.

        Raises InvalidArgumentError for a name that is taken or none, TokenFileError, StoreError where writing fails.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"the name is {name[:100]!r}, expected 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_' and '-', "
                "beginning with a letter or digit",
                field="name",
            )
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
            self._write((*tokens, Token(name, digest_of(secret).hex(), made)))
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
        """The tokens, while nobody else changes them."""
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
