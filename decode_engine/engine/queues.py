"""Who waits, who is reading its prompt and who decodes: the order in which requests are served.

Admission. Tenants take turns by tokens of prompts and answers (`Turns`): first is the one that was given least, over
its weight. Of a tenant's requests those of the highest priority are first. These wait in one queue per context.
Contexts take turns, and inside a context the first come is the first served; so a flood of requests on one context
costs another context's next request one turn. A request is admitted when
as many sessions are free as it wants answers, and the memory that they need is. Where they are not, the requests of
other contexts may pass it, but at most MAX_PASSED times; after that nobody is admitted before it, so that it gets what
those who run give back. Nobody passes a request of the same context. A request whose context is still being loaded
waits, and anybody passes it; when nobody else can be served it is admitted all the same, and runs behind the loading
until somebody can.

Prompts. Every prompt is cut beforehand into pieces that cost at most half a chunk (`prompt_pieces`). A step feeds
pieces that cost at most `chunk` in all, and then every stream gets its decode step: no stream waits longer between two
tokens than one chunk takes, however many prompts there are, and whatever their methods. The chunk does not shrink as
streams become more: their gap has the same bound, and a prompt that takes longer holds its session longer. While nobody
decodes, prompts that are read together may cost more (IDLE_CHUNKS).
Up to half of the chunk goes to the last pieces of prompts, in order of turn: short ones, of one piece, need not wait
for the turns of long ones, and leave at least half a chunk for them. Then it is the turn of one more prompt, one with
more than a last piece if there is one, which goes to the end of the line. What is left goes to a piece of each other
prompt that fits and is read with others, and then to further pieces of the one whose turn it is.
Pieces of different prompts are read together, in one pass over the model and over each context. Pieces of one prompt
follow each other, and some prompts are read by themselves (`Job.reads_alone`). There are at most MAX_PASSES passes a
step, because each reads the model's weights, however short it is.
In the line, prompts of the tenant come first for whom least was read, over its weight. All that decode take every step
together: between tenants admission and prompts are what is shared out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain
from operator import itemgetter
from typing import Generic

from decode_engine.engine.job import Job
from decode_engine.engine.prompt_pieces import Piece
from decode_engine.engine.requests import SessionT
from index_store.memory.patience import note_passed

_MOST_KNOWN = 4096
"""Tenants that are remembered; of more, those that were given most."""


class Turns:
    """What each tenant was given so far, over its weight: who was given least is first. Not thread-safe.

    Tokens are counted when they are known, a prompt's before it is read, an answer's as they come ("virtual token
    counter": Sheng et al., Fairness in Serving Large Language Models, section 4). Who begins to wait is lifted to where
    the one stood who was served last: time without requests saves nothing up. So of two tenants that always wait, and
    are served when it is their turn, neither gets more than the other, over their weights, by more than what one
    request is given at once and what those that run were given since.
    """

    def __init__(self, weight: Callable[[str], float] = lambda tenant: 1.0) -> None:
        """weight: of a tenant, above 0."""
        self._weight = weight
        self._given: dict[str, float] = {}
        self._now = 0.0

    def given(self, tenant: str) -> float:
        return self._given.get(tenant, self._now)

    def join(self, tenant: str) -> None:
        """A tenant begins to wait for turns."""
        if len(self._given) >= _MOST_KNOWN:
            most_given = sorted(self._given, key=self.given)[_MOST_KNOWN // 2 :]
            self._given = {name: self._given[name] for name in most_given if self._given[name] > self._now}
        self._given[tenant] = max(self.given(tenant), self._now)

    def serve(self, tenant: str) -> None:
        self._now = max(self._now, self.given(tenant))

    def charge(self, tenant: str, tokens: float) -> None:
        """A tenant is given something, or gives it back (below 0)."""
        self._given[tenant] = self.given(tenant) + self.share(tenant, tokens)

    def share(self, tenant: str, tokens: float) -> float:
        return tokens / self._weight(tenant)

    def place(self, tenant: str) -> tuple[float, str]:
        """Tenants are served in the order of this."""
        return self.given(tenant), tenant


MAX_PASSES = 4
"""Passes over the model in which one step feeds pieces of prompts."""

IDLE_CHUNKS = 2
"""Chunks that prompts which are read together may cost while nobody decodes, and so no stream waits for them."""


Pass = list[tuple[Job[SessionT], Piece]]
"""Pieces of different prompts that are read together."""


_Key = tuple[str, int, str]
"""Of requests that wait in one queue: tenant, priority from the highest on, context."""


class Waiting(Generic[SessionT]):
    """Requests that were not admitted yet. turns: of tenants, to be told of what is generated. changes: how often one
    came or went."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = turns or Turns()
        self.changes = 0
        self._queues: dict[_Key, deque[Job[SessionT]]] = {}  # contexts in order of turn

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Job[SessionT]]:
        for queue in self._queues.values():
            yield from queue

    def add(self, job: Job[SessionT]) -> None:
        """Puts a request behind those of its context; a context that had none gets its turn after the others."""
        self.changes += 1
        if not any(tenant == job.tenant for tenant, _, _ in self._queues):
            self.turns.join(job.tenant)
        self._queues.setdefault(_key(job), deque()).append(job)

    def put_back(self, job: Job[SessionT]) -> None:
        """Makes a request that was taken out the one whose turn it is."""
        self.changes += 1
        self.turns.charge(job.tenant, -len(job.work.prompt))
        queue = self._queues.pop(_key(job), deque())
        queue.appendleft(job)
        self._queues = {_key(job): queue, **self._queues}

    def take(
        self, free_bytes: int | None, free_sessions: int, *, loading: bool = False
    ) -> Job[SessionT] | None:
        """Takes out who is admitted next; None when nobody is. free_bytes: memory for it; None has no bound.

        loading: also one whose context is still being loaded.
        """
        blocked: list[Job[SessionT]] = []
        for key in sorted(self._queues, key=lambda key: (*self.turns.place(key[0]), key[1])):
            queue = self._queues[key]
            job = queue[0]
            if job.work.loading and not loading:
                continue
            if job.sessions <= free_sessions and (free_bytes is None or job.memory <= free_bytes):
                note_passed(other.patience for other in blocked)
                self.remove(job)
                if queue:
                    self._queues[key] = self._queues.pop(key)
                self.turns.serve(job.tenant)
                self.turns.charge(job.tenant, len(job.work.prompt))
                return job
            if job.patience.ended:
                return None
            blocked.append(job)
        return None

    def ahead(self) -> Iterator[tuple[Job[SessionT], int]]:
        """Those who wait, with how many are taken before each while there is memory for each, and nobody who runs
        generates more."""
        places: dict[str, list[tuple[tuple[int, int, int], Job[SessionT]]]] = {}
        for turn, ((tenant, rank, _), queue) in enumerate(self._queues.items()):
            own = places.setdefault(tenant, [])
            own += [((rank, place, turn), job) for place, job in enumerate(queue)]
        lines = {
            name: deque(job for _, job in sorted(own, key=itemgetter(0))) for name, own in places.items()
        }
        due = [(*self.turns.place(tenant), line) for tenant, line in lines.items()]
        heapify(due)
        for place in range(len(self)):
            given, tenant, line = due[0]
            job = line.popleft()
            if line:
                given += self.turns.share(tenant, len(job.work.prompt))
                heapreplace(due, (given, tenant, line))
            else:
                heappop(due)
            yield job, place

    def remove(self, job: Job[SessionT]) -> None:
        queue = self._queues.get(_key(job))
        if queue is None or job not in queue:
            return
        self.changes += 1
        queue.remove(job)
        if not queue:
            del self._queues[_key(job)]


def _key(job: Job[SessionT]) -> _Key:
    return job.tenant, -job.order.priority, job.work.context


@dataclass(slots=True)
class Queues(Generic[SessionT]):
    """Every live job is in exactly one of these. Not thread-safe.

    held: jobs whose doors have to say where their answers end. keeping: jobs that have ended but for what becomes of
    their sessions.

    max_sessions: jobs that prompt or decode at once. memory: bytes that these may need in sum; None has no bound.
    weight: of tenants.
    """

    max_sessions: int
    memory: int | None
    weight: Callable[[str], float] = lambda tenant: 1.0
    waiting: Waiting[SessionT] = field(init=False)
    reading: Turns = field(init=False)
    prompting: deque[Job[SessionT]] = field(default_factory=deque)
    decoding: deque[Job[SessionT]] = field(default_factory=deque)
    held: deque[Job[SessionT]] = field(default_factory=deque)
    keeping: deque[Job[SessionT]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.waiting, self.reading = Waiting(Turns(self.weight)), Turns(self.weight)

    def all(self) -> list[Job[SessionT]]:
        return [*self.waiting, *self.prompting, *self.decoding, *self.held]

    @property
    def empty(self) -> bool:
        return not (self.all() or self.keeping)

    def remove(self, job: Job[SessionT]) -> None:
        self.waiting.remove(job)
        for queue in (self.prompting, self.decoding, self.held, self.keeping):
            if job in queue:
                queue.remove(job)

    @property
    def held_bytes(self) -> int:
        queues = (self.prompting, self.decoding, self.held, self.keeping)
        return sum(job.memory for queue in queues for job in queue)

    def admit(self) -> Job[SessionT] | None:
        """Moves the next waiting job to those that read their prompts; None when nobody can be admitted."""
        used = sum(job.sessions for queue in (self.prompting, self.decoding, self.held) for job in queue)
        if used >= self.max_sessions:
            return None
        free_bytes = None if self.memory is None else self.memory - self.held_bytes
        job = self.waiting.take(free_bytes, self.max_sessions - used)
        if job is None and not self.prompting and not self.decoding:
            job = self.waiting.take(free_bytes, self.max_sessions, loading=True)
        if job is not None:
            if not any(other.tenant == job.tenant for other in self.prompting):
                self.reading.join(job.tenant)
            self.prompting.append(job)
        return job

    def put_back(self, job: Job[SessionT]) -> None:
        self.prompting.remove(job)
        self.waiting.put_back(job)

    def others_can_run(self, job: Job[SessionT]) -> bool:
        """Whether there is work but for this admitted job and those whose contexts are still being loaded."""
        others = (other for other in self.all() if other is not job)
        return any(other.session is not None or not other.work.loading for other in others)

    def take_passes(self, chunk: int) -> list[Pass[SessionT]]:
        """The pieces of prompts that the next step feeds, pass by pass.

        They cost `chunk` at most in all, or while nobody decodes IDLE_CHUNKS as much; but a piece of a single token is
        fed whatever it costs. The job whose turn it was goes to the end of the line.
        """
        most = chunk if self.decoding else IDLE_CHUNKS * chunk
        jobs = sorted(self.prompting, key=lambda job: self.reading.place(job.tenant))
        passes, turn = choose_passes(jobs, chunk, most)
        if jobs:
            self.reading.serve(jobs[0].tenant)
        for job, piece in chain.from_iterable(passes):
            self.reading.charge(job.tenant, piece.cost)
        if turn is not None:
            self.prompting.remove(turn)
            self.prompting.append(turn)
        return passes

    def note_generated(self, job: Job[SessionT], tokens: int) -> None:
        """Tokens of its answer came: they count for its tenant's turns."""
        self.waiting.turns.charge(job.tenant, tokens)

    def start_decoding(self, job: Job[SessionT], answers: Sequence[Job[SessionT]]) -> None:
        """Moves a job on whose prompt was read, as the jobs of its answers."""
        self.prompting.remove(job)
        self.decoding.extend(answers)

    def hold(self, job: Job[SessionT]) -> None:
        """Moves a job on whose door has to say where its answer ends."""
        self.decoding.remove(job)
        self.held.append(job)

    def start_keeping(self, job: Job[SessionT]) -> None:
        """Moves a job on whose answer is complete."""
        (self.held if job in self.held else self.decoding).remove(job)
        self.keeping.append(job)


def choose_passes(
    jobs: Sequence[Job[SessionT]], chunk: int, most: int
) -> tuple[list[Pass[SessionT]], Job[SessionT] | None]:
    """What `Queues.take_passes` gives, of the prompts of jobs in order of turn; and the job whose turn it is.

    chunk: as there. most: cost of all, if it is not of one prompt.
    """
    passes: _Passes[SessionT] = _Passes()
    others: list[Job[SessionT]] = []
    for job in jobs:
        if job.unread == 1 and passes.fit(job, job.pieces[-1], chunk / 2, MAX_PASSES - 1):
            passes.add(job, job.pieces[-1])
        else:
            others.append(job)
    turn = next((job for job in others if job.unread > 1), others[0] if others else None)
    if turn is None:
        return passes.all, None
    first, *further = turn.pieces[turn.read :]
    passes.add(turn, first)
    for job in others:
        piece = job.pieces[job.read]
        if job is not turn and not job.reads_alone and passes.fit(job, piece, most, MAX_PASSES):
            passes.add(job, piece)
    for piece in further:
        if passes.cost + piece.cost > chunk or len(passes.all) == MAX_PASSES:
            break
        passes.alone.append([(turn, piece)])
        passes.cost += piece.cost
    return passes.all, turn


class _Passes(Generic[SessionT]):
    """Pieces by the pass that reads them. together: of several prompts. alone: passes of one piece. cost: of all."""

    def __init__(self) -> None:
        self.together: Pass[SessionT] = []
        self.alone: list[Pass[SessionT]] = []
        self.cost = 0.0

    @property
    def all(self) -> list[Pass[SessionT]]:
        """In the order in which they are read."""
        return [self.together, *self.alone] if self.together else self.alone

    def fit(self, job: Job[SessionT], piece: Piece, cost: float, passes: int) -> bool:
        """Whether with the job's next piece there are so much cost and so many passes at most."""
        more = job.reads_alone or not self.together
        return self.cost + piece.cost <= cost and len(self.all) + more <= passes

    def add(self, job: Job[SessionT], piece: Piece) -> None:
        """Adds the job's next piece, its first one here."""
        if job.reads_alone:
            self.alone.append([(job, piece)])
        else:
            self.together.append((job, piece))
        self.cost += piece.cost
