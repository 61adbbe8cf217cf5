"""The scheduler: what the engine's thread does with the model, turn by turn, and how requests end.

Every turn drops ended requests, admits waiting ones, feeds at most one chunk of prompts and then takes one decode step
with all decoding sessions in a batch; more of them between the layers of the prompts, where those take longer than a
step (`Pace`). So a short request streams while a long prompt is still being read, and
cancellation or a passed deadline ends a request's work within a turn or two. Where the device chooses tokens itself, a
step may be in flight from one turn to the next (`Flight`), and nobody's session is closed before it is done. In which
order requests are served, and how long a stream waits at most between two tokens, stands in `queues`.

A session that is to be kept is read at its end, and kept on threads beside the scheduler's, a few at a time. Its
request has ended for the scheduler, but still counts with its memory and its place, so that those bound how many wait
here; its reply ends when that is done.

Stop strings are found by doors, which read the text, a step or two behind: an answer then ends with tokens that were
said before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from itertools import compress
from typing import Generic

import torch
from msgspec.structs import replace
from torch import Tensor

from decode_engine.engine.drafting import MOST, Allowance, Costs, Plan
from decode_engine.engine.job import Job, call_all
from decode_engine.engine.prompt_pieces import Pace, Piece
from decode_engine.engine.queues import Pass, Queues
from decode_engine.engine.requests import EngineStats, Found, GiveWayError, Runner, SessionT
from decode_engine.engine.sampler import Sampler
from decode_engine.engine.stepping import Flight, forward_each
from decode_engine.errors import EngineCrashedError, ShuttingDownError
from decode_engine.layers.figures import Figures
from decode_engine.orders.events import Ends, FinishReason, PromptRead, Waits

_KEPT = 64  # kinds of batches whose costs are known

logger = logging.getLogger(__name__)

Batch = list[tuple[Job[SessionT], SessionT]]
"""Jobs that decode together, and their sessions."""


class Drafts(Generic[SessionT]):
    """Has drafts made before a step, and takes in what became of them."""

    def __init__(self, runner: Runner[SessionT], clock_ns: Callable[[], int]) -> None:
        self._runner = runner
        self._clock_ns = clock_ns
        self._costs: dict[object, Costs] = {}
        self._allowance = Allowance()
        self._by_method_s: float | None = None  # what drafts by methods took for the step to come

    def make(self, batch: Batch[SessionT]) -> Sequence[Sequence[int]]:
        """Tokens that may follow the last one of each job; nothing where no job drafts."""
        if not any(job.drafter is not None for job, _ in batch):
            return ()
        costs, others = self._costs_of(batch), len(batch) - 1
        most = self._runner.draft_room([job.sampler for job, _ in batch])
        rooms = [min(job.room, most, MOST) for job, _ in batch]
        by_method = [job.drafter is not None and job.drafter.by_method for job, _ in batch]
        worth = (0, 1.0)
        if any(by_method):
            longest = max(compress(rooms, by_method))
            worth = costs.worth_by_method(longest, others, self._allowance)
        plans = [
            Plan() if job.drafter is None else job.drafter.plan(room, costs, others, worth)
            for (job, _), room in zip(batch, rooms, strict=True)
        ]
        drafts = [list(plan.tokens) for plan in plans]
        rows = [row for row, plan in enumerate(plans) if plan.by_method]
        if rows:
            some, counts = [batch[row] for row in rows], [plans[row].by_method for row in rows]
            begin = self._clock_ns()
            for row, draft in zip(rows, self._by_method(some, counts), strict=True):
                drafts[row] = draft
            self._by_method_s = (self._clock_ns() - begin) * 1e-9
            costs.note_drafting(self._by_method_s, sum(counts))
        return drafts if any(drafts) else ()

    def note(
        self,
        batch: Batch[SessionT],
        drafts: Sequence[Sequence[int]],
        found: Sequence[Found | None],
        seconds: float,
    ) -> None:
        """What a step found for each job, and how long it took."""
        if not any(job.drafter is not None for job, _ in batch):
            return
        costs, won = self._costs_of(batch), 0.0
        costs.note_step(seconds, sum(map(len, drafts)))
        if self._by_method_s is not None and costs.plain_s:
            tokens = sum(len(each) - 1 for each in found if isinstance(each, tuple))
            won = tokens / len(batch) - (self._by_method_s + seconds) / costs.plain_s + 1
        self._by_method_s = None
        self._allowance.note(won)
        for row, ((job, session), each) in enumerate(zip(batch, found, strict=True)):
            if job.drafter is None or each is None or isinstance(each, Exception):
                continue
            drafted, accepted = (
                len(drafts[row]) if drafts else 0,
                len(each) - 1 if isinstance(each, tuple) else 0,
            )
            session.figures.drafted += drafted
            job.drafter.note(drafted, accepted)

    def _by_method(self, batch: Batch[SessionT], counts: Sequence[int]) -> Sequence[list[int]]:
        """Drafts of so many tokens each; none where they fail: the step itself needs none."""
        jobs, sessions = [job for job, _ in batch], [session for _, session in batch]
        try:
            return self._runner.draft(
                sessions, [job.last_token for job in jobs], [job.sampler for job in jobs], counts
            )
        except Exception as error:
            logger.warning("drafts of %d sessions failed: %s", len(batch), error)
            return [[] for _ in batch]

    def _costs_of(self, batch: Batch[SessionT]) -> Costs:
        """Of steps of about as many sessions on these contexts."""
        key = (frozenset(job.work.context for job, _ in batch), len(batch).bit_length())
        if key not in self._costs and len(self._costs) >= _KEPT:
            self._costs.clear()
        return self._costs.setdefault(key, Costs())


_ADMISSIONS = 16
"""Requests admitted in one turn: making a session takes a little time, which streams wait for."""

_KEEPERS = 2
"""Threads that keep sessions."""

Keep = Callable[[], str]
"""Keeps a session, and returns the id of what was kept."""


class CrashError(BaseException):
    """The scheduler failed while a model computed, whose own faults are errors of requests."""


def _fed(batch: Batch[SessionT]) -> tuple[list[SessionT], list[int], list[Sampler]]:
    sessions = [session for _, session in batch]
    return sessions, [job.last_token for job, _ in batch], [job.sampler for job, _ in batch]


class Scheduler(Generic[SessionT]):
    """Advances the jobs of queues. All of it runs on one thread, but for `stats`."""

    def __init__(
        self,
        runner: Runner[SessionT],
        queues: Queues[SessionT],
        changed: threading.Condition,
        *,
        prompt_chunk: int,
        clock_ns: Callable[[], int],
        on_step: Callable[[Sequence[SessionT], float], None] = lambda sessions, seconds: None,
        send: Callable[[], None] = lambda: None,
    ) -> None:
        """changed: guards the queues, and is notified when there is room in them. The others are as in `Engine`."""
        self._runner = runner
        self._flight = Flight(runner)
        self._drafts = Drafts(runner, clock_ns)
        self._queues = queues
        self._changed = changed
        self._prompt_chunk = prompt_chunk
        self._clock_ns = clock_ns
        self._on_step = on_step
        self._send = send
        self._pace = Pace(clock_ns)
        self._endings = Endings(queues, changed, self._flight, self._note_session, send)
        self._told_changes = 0
        self.stats = EngineStats()
        """What was done so far; guarded by `changed`. It is counted before a request that it ends has ended."""

    def turn(self) -> None:
        with self._changed:
            self.stats = self.stats.after_turn()
        self._drop_ended()
        self._admit()
        self._advance_prompts()
        self._decode()
        self._tell_waiting()
        self._send()

    def fail_all(self, error: Exception) -> None:
        """Ends all requests but those whose sessions are being kept."""
        with self._changed:
            left = self._queues.all()
        for job in left:
            self._endings.fail(job, error)
        self._send()

    def close(self) -> None:
        """Waits for sessions that are being kept; those whose turn has not come are not kept."""
        self._endings.close()

    def _note_batch(self, count: int) -> None:
        with self._changed:
            self.stats = self.stats.after_decoding(count)

    def _note_session(self, figures: Figures) -> None:
        with self._changed:
            self.stats = self.stats.after_session(figures)

    def _drop_ended(self) -> None:
        now = self._clock_ns()
        with self._changed:
            jobs = self._queues.all()
        for job in jobs:
            error = job.end(now)
            if error is not None:
                self._endings.fail(job, error)
            elif job.loaded_ns is None and not job.work.loading:
                job.loaded_ns = now
            elif job.reply.stops and (reason := job.stopped(job in self._queues.held)) is not None:
                self._endings.finish(job, job.ends(reason, now))

    def _tell_waiting(self) -> None:
        """Tells those who wait how many are ahead, where that has changed since somebody came or went."""
        with self._changed:
            if self._told_changes == self._queues.waiting.changes:
                return
            self._told_changes = self._queues.waiting.changes
            news = [(job, ahead) for job, ahead in self._queues.waiting.ahead() if ahead != job.ahead]
        for job, ahead in news:
            job.ahead = ahead
            job.reply.tell(Waits("session", ahead))

    def _admit(self) -> None:
        for _ in range(_ADMISSIONS):
            with self._changed:
                job = self._queues.admit()
            if job is None:
                return
            job.admitted_ns, job.ahead = self._clock_ns(), None
            job.reply.tell(Waits(""))
            try:
                job.session = job.work.start()
            except GiveWayError:  # of a session that begins when its context is there
                self._put_back(job)
                return
            except Exception as error:
                self._endings.fail(job, error)

    def _advance_prompts(self) -> None:
        with self._changed:
            passes = self._queues.take_passes(self._prompt_chunk)
        for pieces in passes:
            self._read_pass(pieces)
        if passes and self._queues.decoding:
            self._send()  # first tokens do not wait for a step

    def _read_pass(self, pieces: Pass[SessionT]) -> None:
        """Feeds pieces of different prompts at once."""
        here = [
            (job, piece) for job, piece in pieces if job.session is not None
        ]  # the piece before ended others
        read = [(job, piece) for job, piece in here if not piece.stored]
        told = any(job.order.prompt_logprobs for job, _ in read)
        self._pace.begin_pass()
        found = forward_each(
            partial(self._runner.read, all_logits=told, between=self._between_layers),
            [job.running() for job, _ in read],
            [job.piece_ids(piece) for job, piece in read],
        )
        results = {job: result for (job, _), result in zip(read, found, strict=True)}
        fed = sum(piece.tokens for job, piece in read if isinstance(results[job], Tensor))
        with self._changed:
            self.stats = self.stats.after_prompts(fed)
        for job, piece in here:
            try:
                self._take_piece(job, piece, results.get(job))
            except GiveWayError:
                self._put_back(job)
            except Exception as error:
                self._endings.fail(job, error)

    def _between_layers(self) -> None:
        """Lets streams take steps while prompts are read."""
        self._pace.note_layer()
        try:
            while self._queues.decoding and self._pace.due:
                self._decode()
                self._send()
        except Exception as error:
            raise CrashError from error

    def _take_piece(self, job: Job[SessionT], piece: Piece, result: Tensor | Exception | None) -> None:
        """Goes on behind a piece of a prompt. result: logits after it, or what went wrong; None of stored tokens."""
        if isinstance(result, Exception):
            raise result
        if result is None:
            job.restore(piece.tokens)
            return
        job.place.use.read(piece.tokens)
        job.note_read(piece, result)
        if not job.unread:
            self._start_answers(job, result[-1])

    def _start_answers(self, job: Job[SessionT], logits_V: Tensor) -> None:
        """From the end of the prompt on, every answer has a session of its own."""
        job.prompt_done_ns = self._clock_ns()
        answers = job.fork()
        with self._changed:
            self._queues.start_decoding(job, answers)
        if job.order.prompt_logprobs:
            job.reply.tell(PromptRead(job.prompt_logprobs))
        if job.order.keep is not None and job.order.keep.prompt_only:
            self._endings.finish(job, job.ends("length", job.prompt_done_ns))
            return
        for each in answers:
            try:
                token_id = each.sampler.sample(logits_V)
            except Exception as error:
                self._endings.fail(each, error)
                return
            self._take_tokens([(each, (token_id,))])

    def _put_back(self, job: Job[SessionT]) -> None:
        """Has a job wait that cannot go on before its context is loaded. It has passed no layer that is not there."""
        session, job.session, job.read = job.session, None, 0
        job.prompt_logprobs.clear()
        with self._changed:
            self._queues.put_back(job)
        if session is not None:
            session.close()

    def _decode(self) -> None:
        """Takes one step with all that decode, or all that are in the step in flight."""
        batch = self._batch()
        if not batch:
            self._pace.note_step(0)
            self._note_batch(0)
            return
        begun = self._clock_ns()
        drafts = () if self._flight.flies else self._drafts.make(batch)
        before = self._clock_ns()
        follow = not drafts and all(job.goes_on for job, _ in batch)
        launch = partial(self._runner.launch, drafts=drafts) if drafts else None
        results = self._flight.step(*_fed(batch), follow, launch)
        spent = self._clock_ns() - before
        self._drafts.note(batch, drafts, results, spent * 1e-9)
        stepped = [(job, each) for (job, _), each in zip(batch, results, strict=True) if each is not None]
        self._note_batch(len(stepped))
        if self._pace.note_step(len(batch)) and not drafts:
            self._on_step([session for _, session in batch], spent * 1e-9)
        for job, _ in stepped:
            job.decode_steps += 1
            job.decode_ns += before + spent - begun
        found = ((job, (each,) if isinstance(each, int) else each) for job, each in stepped)
        self._take_tokens((job, tokens) for job, tokens in found if not isinstance(tokens, Exception))
        for job, each in stepped:
            if isinstance(each, Exception):
                self._endings.fail(job, each)
        batch = self._batch()
        if not any(job.drafter is not None and job.drafter.waits for job, _ in batch):
            self._flight.launch_ahead(*_fed(batch))

    def _batch(self) -> Batch[SessionT]:
        with self._changed:
            jobs = list(self._queues.decoding)
        batch: Batch[SessionT] = []
        for job in jobs:
            try:
                batch.append((job, job.running()))
            except EngineCrashedError as error:
                self._endings.fail(job, error)
        return batch

    def _take_tokens(self, taken: Iterable[tuple[Job[SessionT], Sequence[int]]]) -> None:
        """Emits tokens, and then ends the jobs for which it was the last one: that may wait for a step in flight."""
        ended: list[tuple[Job[SessionT], FinishReason]] = []
        came: dict[Job[SessionT], int] = {}
        for job, tokens in taken:
            if job.session is None:  # another answer to its request failed
                continue
            before = job.generated
            try:
                reason = job.take(tokens, self._clock_ns())
            except Exception as error:
                self._endings.fail(job, error)
                continue
            came[job] = job.generated - before
            if reason is not None:
                ended.append((job, reason))
        with self._changed:
            for job, count in came.items():
                self._queues.note_generated(job, count)
        for job, count in came.items():
            job.place.use.generated(count)
        for job, reason in ended:
            if job.session is None:
                continue
            if job.awaits_stop:
                self._endings.hold(job, reason)
            else:
                self._endings.finish(job, job.ends(reason, self._clock_ns()))


class Endings(Generic[SessionT]):
    """Ends jobs; for the scheduler's thread, and for threads that keep."""

    def __init__(
        self,
        queues: Queues[SessionT],
        changed: threading.Condition,
        flight: Flight[SessionT],
        on_session: Callable[[Figures], None],
        send: Callable[[], None],
    ) -> None:
        """changed: guards the queues. on_session: told what a session moved, once it is not used any more."""
        self._queues = queues
        self._changed = changed
        self._flight = flight
        self._on_session = on_session
        self._send = send
        self._keepers = ThreadPoolExecutor(_KEEPERS, thread_name_prefix="keep")

    def hold(self, job: Job[SessionT], reason: FinishReason) -> None:
        """Has a job wait for its door, which knows whether a stop string was completed before its end."""
        job.ending = reason
        self._flight.leave(job.running())
        with self._changed:
            self._queues.hold(job)

    def finish(self, job: Job[SessionT], end: Ends) -> None:
        """Ends an answer; where its session is kept, when that is done."""
        if job.order.keep is None:
            self._tell(job, end)
            return
        try:
            self._flight.leave(job.running())
            kept = job.kept_tokens
            keep = job.work.keep(job.running(), kept)
        except Exception as error:
            self.fail(job, error)
            return
        with self._changed:
            self._queues.start_keeping(job)
        self._close_session(job)
        written = len(job.work.prompt) + len(kept)
        self._keep(keep, replace(end, written=written), partial(self._tell, job))

    def fail(self, job: Job[SessionT], error: Exception) -> None:
        """Ends the job's request, with all of its answers."""
        if job not in job.live:
            return
        for each in list(job.live):
            self._release(each)
        job.reply.fail(error)
        if isinstance(error, torch.AcceleratorError):
            # Raises where the device is lost: then nothing can run any more. A device cannot be waited for as a whole
            # while another thread captures.
            torch.accelerator.current_stream().synchronize()

    def close(self) -> None:
        """Waits for sessions that are being kept; those whose turn has not come are not kept."""
        self._keepers.shutdown(wait=True, cancel_futures=True)

    def _keep(self, keep: Keep, end: Ends, tell: Callable[[Ends | Exception], None]) -> None:
        """Begins to keep. `tell` gets the end with the id of what was kept, or an error, on any thread."""

        def ended(done: Future[str]) -> None:
            try:
                tell(replace(end, kept=done.result()))
            except CancelledError:
                tell(ShuttingDownError("the server shut down before the session was kept"))
            except Exception as error:
                tell(error)
            self._send()

        self._keepers.submit(keep).add_done_callback(ended)

    def _tell(self, job: Job[SessionT], end: Ends | Exception) -> None:
        self._release(job)
        if isinstance(end, Exception):
            job.reply.fail(end)
        else:
            job.reply.tell(end)

    def _release(self, job: Job[SessionT]) -> None:
        """Takes the job out of the queues and gives back all it held, before its reader learns of its end."""
        job.live.remove(job)
        with self._changed:
            self._queues.remove(job)
            self._changed.notify_all()
        self._close_session(job)
        if not job.live:
            call_all(job.work.close, job.place.release)

    def _close_session(self, job: Job[SessionT]) -> None:
        session, job.session = job.session, None
        if session is not None:
            self._flight.leave(session)
            self._on_session(session.figures)
            call_all(session.close)
