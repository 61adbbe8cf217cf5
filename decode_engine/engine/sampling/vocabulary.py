"""A model's vocabulary: tokens as bytes, and constraints tried over it. No torch here."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property

from llguidance import LLTokenizer

from decode_engine.engine.sampling.matching import UnfitConstraintError
from decode_engine.engine.sampling.trial import Trial, VocabularySource
from decode_engine.orders.order import Constraint
from index_store.errors import InvalidArgumentError

_KEPT = 64  # constraints that were found to be fit


class Vocabulary:
    """Made when it is first needed, which takes up to a second. Thread-safe. Its process ends with `close`."""

    def __init__(self, source: Callable[[], VocabularySource]) -> None:
        """source: tells what it is made of, when that is needed; what it raises, all methods do."""
        self._source = source
        self._lock = threading.Lock()
        self._trial = Trial(source)
        self._fit: OrderedDict[Constraint, None] = OrderedDict()

    @cached_property
    def _made(self) -> LLTokenizer:
        return self._source().make()

    @property
    def made(self) -> LLTokenizer:
        """The vocabulary as llguidance has it."""
        with self._lock:
            return self._made

    def close(self) -> None:
        """Ends its process."""
        self._trial.close()

    @cached_property
    def token_bytes(self) -> Sequence[bytes]:
        """What each token stands for, which may be a part of a character; a special token's name."""
        made = self.made
        return [bytes(made.decode_bytes([token])) for token in range(made.vocab_size)]

    def check(self, constraint: Constraint) -> None:
        """Tries a constraint in another process; the last 64 that were fit are not tried again.

        Raises InvalidArgumentError, with the reason, for one that cannot be obeyed. Takes seconds at most.
        """
        with self._lock:
            if constraint in self._fit:
                self._fit.move_to_end(constraint)
                return
        try:
            self._trial.check(constraint)
        except UnfitConstraintError as error:
            raise unfit(constraint, error) from error
        with self._lock:
            self._fit[constraint] = None
            while len(self._fit) > _KEPT:
                self._fit.popitem(last=False)


def unfit(constraint: Constraint, error: UnfitConstraintError) -> InvalidArgumentError:
    """What clients are told of a constraint that cannot be obeyed."""
    calls = constraint.kind == "calls"
    return InvalidArgumentError(
        f"{constraint.kind} cannot be obeyed: {error}; expected {'schemas' if calls else 'one'} that this "
        "server supports",
        field="tools" if calls else "constraint",
    )
