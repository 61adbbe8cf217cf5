"""Constraints as the sampler obeys them: which tokens may come next."""

from __future__ import annotations

import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from decode_engine.engine.sampling.constraints import (
    UnfitConstraintError,
    Vocabulary,
    allowed_bits,
    consume,
    make_matcher,
    unfit,
)
from decode_engine.orders.order import Constraint
from index_store.errors import InvalidArgumentError

_MASK_S = 1.0
_KEPT = 64  # grammars
_THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))


class Grammars:
    """Compiles constraints that were tried (`Vocabulary.check`). Thread-safe. Its threads end with `close`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._grammars: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, "grammar")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def compile(self, constraint: Constraint) -> Grammar:
        """The constraint as a grammar; the last 64 are kept. Raises InvalidArgumentError where it cannot be obeyed."""
        with self._lock:
            kept = self._grammars.get(constraint)
            if kept is not None:
                self._grammars.move_to_end(constraint)
                return kept
        try:
            grammar = Grammar(make_matcher(self._vocabulary.made, constraint), self._threads)
        except UnfitConstraintError as error:
            raise unfit(constraint, error) from error
        with self._lock:
            self._grammars[constraint] = grammar
            while len(self._grammars) > _KEPT:
                self._grammars.popitem(last=False)
        return grammar


class Grammar:
    """A constraint that was compiled; any number of answers may obey it at once."""

    def __init__(self, matcher: LLMatcher, threads: ThreadPoolExecutor) -> None:
        """threads: that find out what may come next while the model computes."""
        self._matcher = matcher
        self._threads = threads

    def start(self) -> ObeyedGrammar:
        return ObeyedGrammar(self._matcher.deep_copy(), self._threads)


class ObeyedGrammar:
    """The grammar over one answer."""

    def __init__(self, matcher: LLMatcher, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._threads = threads
        self.ended = False
        """Whether nothing more may come."""
        # Until it is done the matcher is that thread's.
        self._next: Future[bytes] = threads.submit(allowed_bits, matcher)

    def allowed(self) -> NDArray[np.int32]:
        """Words of bits (see `allowed_bits`): tokens that may come next. Raises InvalidArgumentError."""
        try:
            if self._next.cancel():  # the threads are busy
                self._next = Future()
                self._next.set_result(allowed_bits(self._matcher))
            return np.frombuffer(self._next.result(timeout=_MASK_S), dtype=np.int32)
        except (UnfitConstraintError, TimeoutError) as error:
            raise _no_more(str(error) or f"it took more than {_MASK_S:g} s to find the next token") from error

    def take(self, token: int) -> None:
        """The answer goes on with this token. Raises InvalidArgumentError where it may not.

        Nothing is said of tokens behind one that has ended it.
        """
        if self.ended:
            return
        try:
            consume(self._matcher, token)
        except UnfitConstraintError as error:
            raise _no_more(str(error)) from error
        self.ended = bool(self._matcher.is_stopped())
        if not self.ended:
            self._next = self._threads.submit(allowed_bits, self._matcher)


def _no_more(reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the constraint cannot be obeyed any more: {reason}; simplify it", field="constraint"
    )
