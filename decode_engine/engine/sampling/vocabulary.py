"""A model's vocabulary as constraints see it: tokens as bytes, and grammars over them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from llguidance import LLTokenizer

from decode_engine.engine.sampling.grammar import Grammar
from decode_engine.engine.sampling.matching import Constraint, UnfitConstraintError, make_matcher
from decode_engine.engine.sampling.trial import Trial, VocabularySource
from index_store.errors import InvalidArgumentError

_KEPT = 64  # grammars
_THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))


class Vocabulary:
    """Made when it is first needed, which takes up to a second. Thread-safe.

    Its threads and its process end with `close`.
    """

    def __init__(self, source: Callable[[], VocabularySource]) -> None:
        """source: tells what it is made of, when that is needed; what it raises, all methods do."""
        self._source = source
        self._lock = threading.Lock()
        self._trial = Trial(source)
        self._grammars: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, "grammar")

    @cached_property
    def _made(self) -> LLTokenizer:
        return self._source().make()

    def close(self) -> None:
        """Ends its threads and its process."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    @cached_property
    def token_bytes(self) -> Sequence[bytes]:
        """What each token stands for, which may be a part of a character; a special token's name."""
        with self._lock:
            made = self._made
        return [bytes(made.decode_bytes([token])) for token in range(made.vocab_size)]

    def compile(self, constraint: Constraint) -> Grammar:
        """The constraint as a grammar, tried in another process first. The last 64 are kept.

        Raises InvalidArgumentError, with the reason, for one that cannot be obeyed. Takes seconds at most.
        """
        with self._lock:
            kept = self._grammars.get(constraint)
            if kept is not None:
                self._grammars.move_to_end(constraint)
                return kept
            made = self._made
        try:
            self._trial.check(constraint)
            grammar = Grammar(make_matcher(made, constraint), self._threads)
        except UnfitConstraintError as error:
            calls = constraint.kind == "calls"
            raise InvalidArgumentError(
                f"{constraint.kind} cannot be obeyed: {error}; expected {'schemas' if calls else 'one'} that this "
                "server supports",
                field="tools" if calls else "constraint",
            ) from error
        with self._lock:
            self._grammars[constraint] = grammar
            while len(self._grammars) > _KEPT:
                self._grammars.popitem(last=False)
        return grammar
