"""Streams that no server took are begun again, a few times. gRPC would do so by itself, as it does for other calls.

But where a server dies while its retries have a stream in hand, that stream may never end, not even at its deadline
(grpcio 1.85: after one in 10 to 20 killed servers, six streams at a time; none without, and no call with one reply).
"""

from __future__ import annotations

import random

import grpc

from decode_engine.errors import ServerUnreachableError
from decode_engine.rpc.transport.status import code_of
from index_store.errors import SparseKVError

MOST_ATTEMPTS = 4
_FIRST_S, _LONGEST_S = 0.1, 1.0


class Attempts:
    """Counts how often one stream was begun."""

    def __init__(self) -> None:
        self._made = 1

    def wait_s(self, error: SparseKVError) -> float | None:
        """Seconds until it may be begun again after this error, which came before any message; None: it may not.

        They are drawn at random from a range that doubles, unless the server names them.
        """
        down = isinstance(error, ServerUnreachableError) or code_of(error) is grpc.StatusCode.UNAVAILABLE
        if not down or self._made >= MOST_ATTEMPTS:
            return None
        longest = min(_FIRST_S * 2 ** (self._made - 1), _LONGEST_S)
        self._made += 1
        return random.uniform(0, longest) if error.retry_after_s is None else error.retry_after_s
