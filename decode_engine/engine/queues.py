"""Who waits, who is reading its prompt and who decodes: the order in which requests are served.

Admission. Requests wait in one queue per context. Contexts take turns, and inside a context the first come is the first
served; so a flood of requests on one context costs another context's next request one turn. A request is admitted when
as many sessions are free as it wants answers, and the memory that they need is. Where they are not, the requests of
other contexts may pass it, but at most MAX_PASSED times; after that nobody is admitted before it, so that it gets what
those who run give back. Nobody passes a request of the same context. A request whose context is still being loaded
waits, and anybody passes it; when nobody else can be served it is admitted all the same, and runs behind the loading
until somebody can.

Prompts. Every prompt is cut beforehand into pieces that cost at most half a chunk (`prompt_pieces`). A step feeds
pieces that cost at most `chunk` in all, and then every stream gets its decode step: no stream waits longer between two
tokens than one chunk takes, however many prompts there are, and whatever their methods. The chunk does not shrink as
streams become more: their gap has the same bound, and a prompt that takes longer holds its session longer.
Up to half of the chunk goes to the last pieces of prompts, in order of turn: short ones, of one piece, need not wait
for the turns of long ones, and leave at least half a chunk for them. What is left is the turn of one more prompt, one
with more than a last piece if there is one, which then goes to the end of the line. There are at most MAX_PIECES pieces
a step, because each costs a pass over the model's weights, however short it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic

from decode_engine.engine.job import Job
from decode_engine.engine.prompt_pieces import Piece
from decode_engine.engine.requests import SessionT, Stream
from index_store.memory.patience import note_passed

MAX_PIECES = 4
"""Pieces of prompts that one step feeds."""


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

    def put_back(self, job: Job[SessionT]) -> None:
        """Makes a request that was taken out the one whose turn it is."""
        queue = self._queues.pop(job.request.context, deque())
        queue.appendleft(job)
        self._queues = {job.request.context: queue, **self._queues}

    def take(
        self, free_bytes: int | None, free_sessions: int, *, loading: bool = False
    ) -> Job[SessionT] | None:
        """Takes out who is admitted next; None when nobody is. free_bytes: memory for it; None has no bound.

        loading: also one whose context is still being loaded.
        """
        blocked: list[Job[SessionT]] = []
        for queue in self._queues.values():
            job = queue[0]
            if job.request.loading() and not loading:
                continue
            if job.sessions <= free_sessions and (free_bytes is None or job.memory <= free_bytes):
                note_passed(other.patience for other in blocked)
                self.remove(job)
                if queue:
                    self._queues[job.request.context] = self._queues.pop(job.request.context)
                return job
            if job.patience.ended:
                return None
            blocked.append(job)
        return None

    def ahead(self, stream: Stream) -> int | None:
        """How many requests are taken before that of the stream while there is memory for each; None if not here."""
        for turn, queue in enumerate(self._queues.values()):
            for place, job in enumerate(queue):
                if job.stream is stream:
                    others = (len(other) for other in self._queues.values())
                    return sum(min(length, place + (i < turn)) for i, length in enumerate(others))
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

    keeping: jobs that have ended but for what becomes of their sessions (`keeping`).

    max_sessions: jobs that prompt or decode at once. memory: bytes that these may need in sum; None has no bound.
    """

    max_sessions: int
    memory: int | None
    waiting: Waiting[SessionT] = field(default_factory=Waiting)
    prompting: deque[Job[SessionT]] = field(default_factory=deque)
    decoding: deque[Job[SessionT]] = field(default_factory=deque)
    keeping: deque[Job[SessionT]] = field(default_factory=deque)

    def all(self) -> list[Job[SessionT]]:
        """All jobs that the scheduler works on, or will."""
        return [*self.waiting, *self.prompting, *self.decoding]

    @property
    def empty(self) -> bool:
        """Whether nobody waits for anything any more."""
        return not (self.all() or self.keeping)

    def remove(self, job: Job[SessionT]) -> None:
        """Forgets a job."""
        self.waiting.remove(job)
        for queue in (self.prompting, self.decoding, self.keeping):
            if job in queue:
                queue.remove(job)

    @property
    def held_bytes(self) -> int:
        """What the admitted jobs may need."""
        queues = (self.prompting, self.decoding, self.keeping)
        return sum(job.memory for queue in queues for job in queue)

    def admit(self) -> Job[SessionT] | None:
        """Moves the next waiting job to those that read their prompts; None when nobody can be admitted."""
        used = sum(job.sessions for queue in (self.prompting, self.decoding) for job in queue)
        if used >= self.max_sessions:
            return None
        free_bytes = None if self.memory is None else self.memory - self.held_bytes
        job = self.waiting.take(free_bytes, self.max_sessions - used)
        if job is None and not self.prompting and not self.decoding:
            job = self.waiting.take(free_bytes, self.max_sessions, loading=True)
        if job is not None:
            self.prompting.append(job)
        return job

    def put_back(self, job: Job[SessionT]) -> None:
        """Undoes the admission of a job."""
        self.prompting.remove(job)
        self.waiting.put_back(job)

    def others_can_run(self, job: Job[SessionT]) -> bool:
        """Whether there is work but for this admitted job and those whose contexts are still being loaded."""
        others = (other for other in self.all() if other is not job)
        return any(other.session is not None or not other.request.loading() for other in others)

    def take_pieces(self, chunk: int) -> list[tuple[Job[SessionT], Piece]]:
        """The pieces of prompts that the next step feeds, in this order, of a cost of at most `chunk` in all.

        Several may be of one job. A piece of a single token is fed whatever it costs. The job whose turn it was goes to
        the end of the line.
        """
        pieces, turn = choose_pieces(self.prompting, chunk)
        if turn is not None:
            self.prompting.remove(turn)
            self.prompting.append(turn)
        return pieces

    def start_decoding(self, job: Job[SessionT], answers: Sequence[Job[SessionT]]) -> None:
        """Moves a job on whose prompt was read, as the jobs of its answers."""
        self.prompting.remove(job)
        self.decoding.extend(answers)

    def start_keeping(self, job: Job[SessionT]) -> None:
        """Moves a job on whose answer is complete."""
        self.decoding.remove(job)
        self.keeping.append(job)


def choose_pieces(
    jobs: Sequence[Job[SessionT]], chunk: int
) -> tuple[list[tuple[Job[SessionT], Piece]], Job[SessionT] | None]:
    """What `Queues.take_pieces` gives, of the prompts of jobs in order of turn; and the job whose turn it is."""
    chosen: list[tuple[Job[SessionT], Piece]] = []
    room = chunk / 2
    for job in jobs:
        last = job.pieces[-1]
        if job.unread == 1 and last.cost <= room and len(chosen) < MAX_PIECES - 1:
            chosen.append((job, last))
            room -= last.cost
    ending = {job for job, _ in chosen}
    others = [job for job in jobs if job not in ending]
    turn = next((job for job in others if job.unread > 1), others[0] if others else None)
    if turn is not None:
        spent = sum(piece.cost for _, piece in chosen)
        for number, piece in enumerate(turn.pieces[turn.read : turn.read + MAX_PIECES - len(chosen)]):
            if number and spent + piece.cost > chunk:
                break
            chosen.append((turn, piece))
            spent += piece.cost
    return chosen, turn
