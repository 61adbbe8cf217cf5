"""Steps of several sessions in which the fault of one is not the fault of all, and which may be launched ahead.

Steps on the host need nothing of a session and of a model but a function that feeds tokens and returns logits.

Shape legend: B sessions, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from decode_engine.engine.requests import Found, Launcher, SessionT, Step
from decode_engine.engine.sampler import Draws, Sampler, any_filters, choose_greedy, choose_tokens, not_finite
from decode_engine.engine.sampling.edits import Edits, edit_logits_reference, tell_tokens_reference
from decode_engine.orders.events import TokenLogprob

logger = logging.getLogger(__name__)

_CACHED = 2**15
"""Logits of which a cache holds all that a choice makes, 40 bytes each: more take memory that is new each time."""

Forward = Callable[[Sequence[SessionT], Sequence[Sequence[int]]], Sequence[Tensor]]
"""Feeds each session its tokens; returns logits [1, V] after the last one per session, or [T, V] after all.

When it raises, no session has advanced, and the same call may be made again.
"""


Launch = Callable[[Sequence[SessionT], Sequence[int], Sequence[Sampler]], Step]
"""See `Launcher.launch`."""


def forward_each(
    forward: Forward[SessionT], sessions: Sequence[SessionT], token_ids: Sequence[Sequence[int]]
) -> list[Tensor | Exception]:
    """What `forward` returns of each session, or the session's error.

    A batch that fails is repeated one by one, to find whose fault it is; only sessions with an error do not advance.
    """
    if not sessions:
        return []
    try:
        return list(forward(sessions, token_ids))
    except Exception as error:
        if len(sessions) == 1:
            return [error]
        logger.warning("a batch of %d sessions failed (%s); stepping them one by one", len(sessions), error)
        return [
            forward_each(forward, [session], [ids])[0]
            for session, ids in zip(sessions, token_ids, strict=True)
        ]


def decode_by_forward(
    forward: Forward[SessionT],
    sessions: Sequence[SessionT],
    last_tokens: Sequence[int],
    samplers: Sequence[Sampler],
    drafts: Sequence[Sequence[int]] = (),
) -> list[Found]:
    """One decode step of all sessions: feeds each its last token, and drafts behind it, and chooses what follows.

    drafts: as in `Runner.launch`; with them `forward` returns all logits. Those with a repeatable sampler go one by
    one: what a model computes for a row rounds otherwise with other numbers of rows, and on a CPU even in other places
    among them. The others go together.

    Returns what was found for each. A session with an error has not advanced, nor has its sampler; except
    that one that failed after its logits were there has taken its token in, and cannot go on.
    """
    together = [row for row, sampler in enumerate(samplers) if not sampler.repeatable]
    alone = [[row] for row, sampler in enumerate(samplers) if sampler.repeatable]
    results: dict[int, Found] = {}
    logits: dict[int, Tensor] = {}
    for batch in [together, *alone]:
        fed = [[last_tokens[row], *(drafts[row] if drafts else ())] for row in batch]
        found = forward_each(forward, [sessions[row] for row in batch], fed)
        for row, ids, result in zip(batch, fed, found, strict=True):
            if isinstance(result, Exception):
                results[row] = result
            elif len(ids) > 1:
                results[row] = verified = verify(result, samplers[row], ids[1:])
                if isinstance(verified, tuple):
                    sessions[row].rewind(len(ids) - len(verified))
            else:
                logits[row] = result[-1]
    chosen = choose_each(list(logits.values()), [samplers[row] for row in logits])
    results |= zip(logits, chosen, strict=True)
    return [results[row] for row in range(len(sessions))]


def verify(logits_TV: Tensor, sampler: Sampler, drafts: Sequence[int]) -> tuple[int, ...] | Exception:
    """Tokens that follow by logits after the last token and each draft: as long as drafts are right, and one more.

    Each is the one that its logits and the sampler give where nothing was drafted, and so is their distribution: for
    drafts of which nothing is random this is rejection sampling. Drafts that were drawn with the sampler's own numbers
    (`Sampler.guess`) are mostly right where their logits are similar.

    The sampler advances with each. What goes wrong behind the first one goes wrong again in the next step.
    """
    best = choose_greedy(logits_TV).tolist() if sampler.greedy and not sampler.edited else None
    tokens: list[int] = []
    for number, draft in enumerate([*drafts, None]):
        found = sample(sampler, logits_TV[number]) if best is None else take(sampler, best[number])
        if isinstance(found, Exception):
            return tuple(tokens) or found
        tokens.append(found)
        if found != draft or sampler.ended:
            break
    return tuple(tokens)


def choose_each(logits: Sequence[Tensor], samplers: Sequence[Sampler]) -> list[int | Exception]:
    """A token of each row of logits [V], or the error: SparseKVError where they are not finite.

    Samplers with a token advance. Rows on a device are chosen from together, with one wait. On the CPU it is short rows
    of which nothing has to be sorted out, as many at a time as stay in its cache; the shorter ways of single rows take
    less time for others.
    """
    if len(logits) > 1 and logits[0].device.type != "cpu":
        return _choose_stacked(logits, samplers)
    at_once = max(1, _CACHED // logits[0].numel()) if logits else 1
    plain = [row for row, sampler in enumerate(samplers) if at_once > 1 and not any_filters([sampler])]
    chosen: dict[int, int | Exception] = {}
    for first in range(0, len(plain), at_once):
        some = plain[first : first + at_once]
        found = _choose_stacked([logits[row] for row in some], [samplers[row] for row in some])
        chosen |= zip(some, found, strict=True)
    for row, sampler in enumerate(samplers):
        if row not in chosen:
            chosen[row] = sample(sampler, logits[row])
    return [chosen[row] for row in range(len(samplers))]


def _choose_stacked(logits: Sequence[Tensor], samplers: Sequence[Sampler]) -> list[int | Exception]:
    """`choose_together` for rows that lie apart; where it fails it fails for all."""
    try:
        return choose_together(torch.stack(list(logits)), samplers)
    except Exception as error:
        return [error] * len(logits)


def choose_together(logits_BV: Tensor, samplers: Sequence[Sampler]) -> list[int | Exception]:
    """What `choose_each` does, for rows that lie in one tensor, on its device."""
    edits, failed = _edits(logits_BV, samplers)
    edited_BV = edit_logits_reference(logits_BV, edits) if any(edits) else logits_BV
    if all(sampler.greedy for sampler in samplers):
        chosen_B = choose_greedy(edited_BV)
    else:
        draws = Draws.of(samplers, logits_BV.device)
        chosen_B = choose_tokens(edited_BV, draws, filtered=any_filters(samplers))
    tokens = chosen_B.tolist()
    logprobs = tell_tokens_reference(logits_BV, edits, tokens)
    return [
        failed[row] if row in failed else take(sampler, tokens[row], logprobs[row])
        for row, sampler in enumerate(samplers)
    ]


def _edits(logits_BV: Tensor, samplers: Sequence[Sampler]) -> tuple[list[Edits | None], dict[int, Exception]]:
    edits: list[Edits | None] = [None] * len(samplers)
    failed: dict[int, Exception] = {}
    for row, sampler in enumerate(samplers):
        try:
            edits[row] = sampler.edits(logits_BV.device, logits_BV.shape[1])
        except Exception as error:
            failed[row] = error
    return edits, failed


def sample(sampler: Sampler, logits_V: Tensor) -> int | Exception:
    """What `Sampler.sample` returns or raises."""
    try:
        return sampler.sample(logits_V)
    except Exception as error:
        return error


def take(sampler: Sampler, token: int, logprob: TokenLogprob | None = None) -> int | Exception:
    """What a row's choice means: the token, with its sampler advanced; or, for -1, the error.

    logprob: of the token, where that is wanted.
    """
    if token < 0:
        return not_finite()
    try:
        sampler.take(token, logprob)
    except Exception as error:
        return error
    return token


@dataclass(frozen=True, slots=True)
class Chosen:
    """A step that is over when it is launched (`requests.Step`)."""

    results: Sequence[Found]

    def follow(self) -> None:
        """Nothing: the host chose the tokens."""

    def leave(self, number: int) -> None:
        """Nothing: no device uses the session."""

    def tokens(self) -> Sequence[Found]:
        return self.results


class Flight(Generic[SessionT]):
    """Decode steps, one of which may be in flight: launched before the tokens of the one before it were read."""

    def __init__(self, runner: Launcher[SessionT]) -> None:
        self._runner = runner
        self._step: Step | None = None
        self._flew = False
        self._sessions: list[SessionT | None] = []

    def step(
        self,
        sessions: Sequence[SessionT],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        follow: bool,
        launch: Launch[SessionT] | None = None,
    ) -> list[Found | None]:
        """What was found for each session; a runner that raises says that of all that step.

        launch: instead of the runner's, where no step is in flight. None for those that are not in the step in flight,
        since they have joined after it was launched. Its other sessions are those of the call before, but for those
        that have left. follow: whether all sessions are expected to go on behind this step, so that the next one may be
        launched before its tokens are read.
        """
        step, self._step = self._step, None
        if step is None:
            self._sessions = [*sessions]
        flown = list(self._sessions)
        try:
            step = step or (launch or self._runner.launch)(sessions, last_tokens, samplers)
            if follow and flown == [*sessions]:
                self._step = step.follow()
                self._flew = self._step is not None
            results = step.tokens()
        except Exception as error:
            logger.exception("a decode step failed for a batch of %d", len(flown))
            results = [error] * len(flown)
        if self._step is None:
            self._sessions = []
        found = {id(session): result for session, result in zip(flown, results, strict=True)}
        return [found.get(id(session)) for session in sessions]

    def launch_ahead(
        self, sessions: Sequence[SessionT], last_tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> None:
        """Launches the step that `step` is going to take, if none is in flight and the last ones flew.

        So a device computes while the host reads prompts, also where somebody has joined or left. What goes wrong here
        goes wrong again in `step`.
        """
        if not self._flew or self._step is not None or not sessions:
            return
        try:
            self._step = self._runner.launch(sessions, last_tokens, samplers)
            self._sessions = [*sessions]
        except Exception as error:
            logger.info("a step of %d sessions was not launched ahead: %s", len(sessions), error)

    @property
    def flies(self) -> bool:
        return self._step is not None

    def leave(self, session: SessionT) -> None:
        """To be called before a session is closed: waits until no device uses it any more."""
        if self._step is not None and session in self._sessions:
            number = self._sessions.index(session)
            self._sessions[number] = None
            self._step.leave(number)
            if not any(self._sessions):
                self._step = None
