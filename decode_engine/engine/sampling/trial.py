"""Constraints tried in another process before this one obeys them: what takes too long or too much dies there.

Run as a program, it reads the vocabulary's tokenizer as a line of JSON, then one constraint a line, and answers each
with a line: an empty text where it can be obeyed, else why not.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from selectors import EVENT_READ, DefaultSelector

from llguidance import LLTokenizer
from msgspec.structs import asdict as struct_asdict

from decode_engine.engine.sampling.matching import (
    DeadEndError,
    UnfitConstraintError,
    allowed_tokens,
    make_matcher,
)
from decode_engine.orders.order import Constraint

_TRIAL_S = 2.0
_START_S = 60.0
_LONGEST_S = 10  # of computing for one constraint, whether somebody waits or not
_SLOWEST_MASK_S = 0.1
_WALK = 64  # tokens of a random answer that is begun
_MEMORY_BYTES = 2 * 2**30  # on top of what the vocabulary takes


@dataclass(frozen=True, slots=True)
class VocabularySource:
    """What llguidance makes a vocabulary of: the tokenizer's definition as JSON, its size, and tokens that end."""

    definition: str
    size: int
    end_ids: Sequence[int]

    def make(self) -> LLTokenizer:
        """The vocabulary; takes up to a second."""
        return LLTokenizer(self.definition, n_vocab=self.size, eos_token=list(self.end_ids) or None)


class Trial:
    """Tries constraints one after another, in a process that is begun when the first one comes. Thread-safe."""

    def __init__(self, source: Callable[[], VocabularySource]) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def check(self, constraint: Constraint) -> None:
        """Raises UnfitConstraintError for one that cannot be obeyed. Waits for those before it, 2 s for each."""
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._begin()
                reason = self._ask(struct_asdict(constraint), _TRIAL_S)
                if reason is None:
                    raise UnfitConstraintError(
                        f"it is too complex (more than {_TRIAL_S:g} s to compile, or too large)"
                    )
            except BaseException:
                self._end()  # the answer that it may still give must not be read as one to the next question
                raise
        if reason:
            raise UnfitConstraintError(reason)

    def _begin(self) -> None:
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if self._ask(asdict(self._source()), _START_S) is None:
            raise UnfitConstraintError("the process that tries constraints does not start")

    def _ask(self, question: dict[str, object], timeout_s: float) -> str | None:
        """The process's answer; None where it has died, or gives none in time."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return None
        with DefaultSelector() as selector:  # `select` itself knows no descriptors from 1,024 on
            selector.register(process.stdout, EVENT_READ)
            ready = selector.select(timeout_s)
        line = process.stdout.readline() if ready else b""
        return str(json.loads(line)) if line.endswith(b"\n") else None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:
                pass


def _try(vocabulary: LLTokenizer, constraint: Constraint) -> str:
    """Why it cannot be obeyed; empty where it can."""
    draw, begun = random.Random(0), False
    try:
        matcher = make_matcher(vocabulary, constraint)
        for _ in range(_WALK):
            before = time.process_time()  # not the clock's: others may have the cores meanwhile
            tokens = allowed_tokens(matcher)
            if time.process_time() - before > _SLOWEST_MASK_S:
                return "it is too complex (tokens take too long to be checked)"
            if not tokens:
                raise DeadEndError("an answer may begin in a way that no token of this model can follow")
            matcher.consume_token(draw.choice(tokens))
            begun = True
            if matcher.is_stopped():
                break
    except DeadEndError as error:
        return str(error) if begun else "nothing satisfies it"
    except UnfitConstraintError as error:
        return str(error)
    return ""


def main() -> None:
    """The process."""
    source = json.loads(sys.stdin.readline())
    vocabulary = VocabularySource(**source).make()
    used = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    _answer("")
    for line in sys.stdin:
        spent = int(time.process_time())
        # Should the server end meanwhile, so does this.
        resource.setrlimit(resource.RLIMIT_CPU, (spent + _LONGEST_S, resource.RLIM_INFINITY))
        _answer(_try(vocabulary, Constraint(**json.loads(line))))


def _answer(text: str) -> None:
    sys.stdout.write(json.dumps(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
