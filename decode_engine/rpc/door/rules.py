"""Who is let in: one rule for both ports.

A caller shows `authorization: Bearer TOKEN`. All tokens are compared, each in constant time, so neither answer nor time
tells how close a guess was. Attempts that fail are counted by address: where they come too fast, tokens that were not
used before are refused unseen, while those in use are let in as ever, so that guessing locks nobody else out.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from decode_engine.rpc.door.refusals import TokenFileError, TooManyAttemptsError, UnauthenticatedError
from decode_engine.rpc.door.sharing import Sharing
from decode_engine.rpc.door.tokens import MAX_TOKEN_CHARACTERS, Token, TokenFile, digest_of

logger = logging.getLogger(__name__)

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
        """The address failed."""
        now = self._clock()
        self._free_at[host] = max(self._free_at.pop(host, 0.0), now) + self._every_s
        if len(self._free_at) > _MAX_HOSTS:
            self._free_at.popitem(last=False)


class Door:
    """Lets callers in by the tokens of a file, or everybody where there is none. From any thread.

    A thread looks at the file every second, so that a new token counts soon, and a revoked one no more. Where the file
    cannot be used any longer, nobody is let in.
    """

    def __init__(self, path: Path | None = None, attempts: FailedAttempts | None = None) -> None:
        """path: the file of tokens. Raises TokenFileError."""
        self._file = None if path is None else TokenFile(path)
        self._attempts = attempts or FailedAttempts()
        self._lock = threading.Lock()
        self._tokens: tuple[Token, ...] = ()
        self._accepted: set[bytes] = set()
        self._stamp: tuple[int, ...] | None = None
        self._closed = threading.Event()
        if self._file is not None:
            self._stamp, self._tokens = self._file.stamp(), self._file.read()
            threading.Thread(target=self._watch, name="tokens", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in."""
        return self._file is None

    def close(self) -> None:
        """Looks at the file no more. Idempotent."""
        self._closed.set()

    def check(self, authorization: str | None, host: str) -> str:
        """The name of the caller's token, "" where none is wanted.

        authorization: what the caller sent under that name. host: the address that it came from. Raises
        UnauthenticatedError, the same for every reason, and TooManyAttemptsError.
        """
        if self._file is None:
            return ""
        secret = _secret(authorization)
        digest = digest_of(secret)
        with self._lock:
            delay = self._attempts.delay_s(host)
            if delay and digest not in self._accepted:
                error = TooManyAttemptsError(
                    "too many attempts with wrong tokens came from this address; try again later"
                )
                error.retry_after_s = delay
                raise error
            found = [token for token in self._tokens if hmac.compare_digest(token.digest, digest)]
            if found:
                self._accepted.add(digest)
                return found[0].name
            self._attempts.add(host)
        raise UnauthenticatedError("a valid token is needed, sent as `authorization: Bearer TOKEN`")

    def look(self) -> None:
        """Reads the file again if it has changed."""
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
            self._accepted &= {token.digest for token in tokens}

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            self.look()


def _secret(authorization: str | None) -> str:
    """The token that was shown, "" for none."""
    shown = (authorization or "")[: len(_SCHEME) + MAX_TOKEN_CHARACTERS + 1]
    return shown[len(_SCHEME) :].strip() if shown.lower().startswith(_SCHEME) else ""
