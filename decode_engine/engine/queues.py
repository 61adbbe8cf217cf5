"""Who waits, who is reading its prompt and who decodes: the order in which requests are served.

Admission. Requests wait in one queue per context. Contexts take turns, and inside a context the first come is the first
served; so a flood of requests on one context costs another context's next request one turn. A request is admitted when
a session is free and the memory that it needs is. Where the memory is not, the requests of other contexts may pass
it, but at most MAX_PASSED times; after that nobody is admitted before it, so that it gets the memory which those who
run give back. Nobody passes a request of the same context.

Prompts. A step feeds at most `chunk` prompt tokens in all, and then every stream gets its decode step: no stream waits
longer between two tokens than one chunk takes, however many prompts there are. The chunk does not shrink as streams
become more: their gap has the same bound, and a prompt that takes longer holds its session longer.
Up to half of the chunk goes to prompts that end with it, in order of turn: short ones need not wait for the turns of
long ones, and leave at least half a chunk for them. What is left is the turn of one more prompt, one of those longer
than half a chunk if there is one, which then goes to the end of the line. There are at most MAX_PIECES pieces a step,
because each costs a pass over the model's weights, however short it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic

from decode_engine.engine.requests import Place, Request, SessionT, Stream
from decode_engine.engine.sampler import Sampler
from decode_engine.errors import EngineCrashedError
from index_store.memory.patience import Patience, note_passed

MAX_PIECES = 4
"""Pieces of prompts that one step feeds."""


@dataclass(eq=False, slots=True)
class Job(Generic[SessionT]):
    """A submitted request and how far it is. patience: while others are admitted and its memory is not free."""

    request: Request[SessionT]
    place: Place
    stream: Stream
    sampler: Sampler
    submitted_ns: int
    patience: Patience = field(default_factory=Patience)
    session: SessionT | None = None
    fed: int = 0
    last_token: int = -1
    generated: int = 0
    admitted_ns: int = 0
    prompt_done_ns: int = 0
    first_token_ns: int = 0
    decode_steps: int = 0
    decode_ns: int = 0

    @property
    def unfed(self) -> int:
        """Tokens of the prompt that are still to be read."""
        return len(self.request.prompt) - self.fed

    def running(self) -> SessionT:
        """The session. Raises EngineCrashedError when there is none, before the admission and after the end."""
        if self.session is None:
            raise EngineCrashedError("a request was worked on without a session")
        return self.session


class Waiting(Generic[SessionT]):
    """Requests that were not admitted yet."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Job[SessionT]]] = {}  # in order of turn

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Job[SessionT]]:
        for queue in self._queues.values():
            yield from queue

    def add(self, job: Job[SessionT]) -> None:
        """Puts a request behind those of its context; a context that had none gets its turn after the others."""
        self._queues.setdefault(job.request.context, deque()).append(job)

    def take(self, free_bytes: int | None) -> Job[SessionT] | None:
        """Takes out who is admitted next; None when nobody is. free_bytes: memory for it; None has no bound."""
        blocked: list[Job[SessionT]] = []
        for queue in self._queues.values():
            job = queue[0]
            if free_bytes is None or job.request.memory <= free_bytes:
                note_passed(other.patience for other in blocked)
                self.remove(job)
                if queue:
                    self._queues[job.request.context] = self._queues.pop(job.request.context)
                return job
            if job.patience.ended:
                return None
            blocked.append(job)
        return None

    def remove(self, job: Job[SessionT]) -> None:
        """Takes out a request, if it is here."""
        queue = self._queues.get(job.request.context)
        if queue is None or job not in queue:
            return
        queue.remove(job)
        if not queue:
            del self._queues[job.request.context]


@dataclass(slots=True)
class Queues(Generic[SessionT]):
    """Every live job is in exactly one of these. Not thread-safe.

    max_sessions: jobs that prompt or decode at once. memory: bytes that these may need in sum; None has no bound.
    """

    max_sessions: int
    memory: int | None
    waiting: Waiting[SessionT] = field(default_factory=Waiting)
    prompting: deque[Job[SessionT]] = field(default_factory=deque)
    decoding: deque[Job[SessionT]] = field(default_factory=deque)

    def all(self) -> list[Job[SessionT]]:
        """All live jobs."""
        return [*self.waiting, *self.prompting, *self.decoding]

    def remove(self, job: Job[SessionT]) -> None:
        """Forgets a job."""
        self.waiting.remove(job)
        for queue in (self.prompting, self.decoding):
            if job in queue:
                queue.remove(job)

    @property
    def held_bytes(self) -> int:
        """What the admitted jobs may need."""
        return sum(job.request.memory for queue in (self.prompting, self.decoding) for job in queue)

    def admit(self) -> Job[SessionT] | None:
        """Moves the next waiting job to those that read their prompts; None when nobody can be admitted."""
        if len(self.prompting) + len(self.decoding) >= self.max_sessions:
            return None
        job = self.waiting.take(None if self.memory is None else self.memory - self.held_bytes)
        if job is not None:
            self.prompting.append(job)
        return job

    def take_pieces(self, chunk: int) -> list[tuple[Job[SessionT], int]]:
        """The pieces of prompts that the next step feeds: jobs and numbers of tokens, at most `chunk` in all.

        The job whose turn it was goes to the end of the line.
        """
        pieces, turn = choose_pieces(self.prompting, chunk)
        if turn is not None:
            self.prompting.remove(turn)
            self.prompting.append(turn)
        return pieces

    def start_decoding(self, job: Job[SessionT]) -> None:
        """Moves a job on whose prompt was read."""
        self.prompting.remove(job)
        self.decoding.append(job)


def choose_pieces(
    jobs: Sequence[Job[SessionT]], chunk: int
) -> tuple[list[tuple[Job[SessionT], int]], Job[SessionT] | None]:
    """What `Queues.take_pieces` gives, of the prompts of jobs in order of turn; and the job whose turn it is."""
    pieces: list[tuple[Job[SessionT], int]] = []
    room = chunk // 2
    for job in jobs:
        if job.unfed <= room and len(pieces) < MAX_PIECES - 1:
            pieces.append((job, job.unfed))
            room -= job.unfed
    ending = {job for job, _ in pieces}
    others = [job for job in jobs if job not in ending]
    turn = next((job for job in others if job.unfed > chunk // 2), others[0] if others else None)
    if turn is not None:
        pieces.append((turn, min(turn.unfed, chunk - sum(count for _, count in pieces))))
    return pieces, turn
