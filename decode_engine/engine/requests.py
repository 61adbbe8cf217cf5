"""What the engine relies on: work that is asked of it, sessions, steps and the model's runner; and its statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from decode_engine.engine.drafting import Drafter
from decode_engine.engine.prompt_pieces import Piece, PromptCost, cut_prompt
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.sampling.grammar import Grammar
from decode_engine.layers.figures import Figures
from decode_engine.orders.order import Order


class EngineSession(Protocol):
    """What the engine needs of one request's model state."""

    @property
    def figures(self) -> Figures:
        """What the session's attention cost and touched so far; stays readable after `close`."""

    def fork(self) -> Self:
        """Another session that has read the same, and goes on by itself. The caller closes it."""

    def rewind(self, tokens: int) -> None:
        """Takes back the last tokens that it was fed."""

    def close(self) -> None:
        """Frees the session's memory and lets go of the context."""


Found = int | tuple[int, ...] | Exception
"""A session's next token, several where drafts were fed, or what went wrong."""

SessionT = TypeVar("SessionT", bound=EngineSession)
SessionT_contra = TypeVar("SessionT_contra", bound=EngineSession, contravariant=True)


class Step(Protocol):
    """A decode step of some sessions that was launched. It uses their memory until `tokens` or `leave` has returned."""

    def follow(self) -> Step | None:
        """Launches the next step of the same sessions, with the tokens that this one chooses, which were not read yet.

        None where the host has to have a part in it. To be called once, and only while no session has left.
        """

    def leave(self, number: int) -> None:
        """Takes out a session, which may then be closed: waits until the device is done with the step. Never raises."""

    def tokens(self) -> Sequence[Found]:
        """Waits for the step: what was found for each session.

        The fault of one session is not that of the others. A session and its sampler advance here, where a token comes
        back; those that have left do not, and what stands for them means nothing.
        """


class Launcher(Protocol[SessionT_contra]):
    """What takes decode steps."""

    def launch(
        self, sessions: Sequence[SessionT_contra], last_tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> Step:
        """Begins a step that feeds each session its last token and chooses its next one with its sampler.

        What it raises ends the requests of all the sessions. Where a sampler is repeatable, the session gets the same
        bits as if it were alone.
        """


class Runner(Launcher[SessionT_contra], Protocol[SessionT_contra]):
    """What the engine needs of the model."""

    def launch(
        self,
        sessions: Sequence[SessionT_contra],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]] = (),
    ) -> Step:
        """See `Launcher`. drafts: of each session tokens that may follow its last one; none of any by default.

        They are fed behind it. What is chosen is what would be chosen one by one, as far as drafts are right, and one
        token more.
        """

    def read(
        self,
        sessions: Sequence[SessionT_contra],
        token_ids: Sequence[Sequence[int]],
        *,
        all_logits: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Feeds each session a piece of its prompt, any number T of tokens: logits [1, V] after the last one of each.

        all_logits: after all of them, [T, V]. between: called now and then while the model computes, after each layer:
        other sessions may take decode steps there.

        When it raises, the same call may be made again with the same result: no session has advanced. Their figures
        may count what the failed attempt did.
        """

    def draft(
        self,
        sessions: Sequence[SessionT_contra],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        counts: Sequence[int],
    ) -> list[list[int]]:
        """So many tokens that may follow each session's last one, proposed by the method that it drafts with.

        No session and no sampler advances. Raises what a step may.
        """

    def draft_room(self, samplers: Sequence[Sampler]) -> int:
        """Tokens that may be drafted for each session of a step with these samplers."""


@dataclass(kw_only=True, eq=False)
class Work(ABC, Generic[SessionT]):
    """An order on its context, in memory: what it means there, and what its sessions are made of.

    prompt: token ids that are read, at least one; before: those of the order that need not be: with the prompt they are
    what penalties count. max_tokens: that may be generated. end_ids: tokens that end an answer, beside the order's own.
    context: requests that share one wait in one queue. memory: bytes that the session of each answer may come to hold.
    stored: tokens before the prompt whose keys and values are known: a child's own. cost, stored_cost: of the prompt's
    tokens and of those, by which they are cut into pieces. grammar: what answers must be. arrived_ns: when the order
    came, on the engine's clock; loaded_in_ns: what of the time since then was spent on loading. None: now, and nothing.

    All methods but `close` are called on the scheduler's thread.
    """

    order: Order
    prompt: Sequence[int]
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    before: Sequence[int] = ()
    context: str = ""
    memory: int = 0
    cost: PromptCost = field(default_factory=PromptCost)
    stored: int = 0
    stored_cost: PromptCost = field(default_factory=PromptCost)
    grammar: Grammar | None = None
    arrived_ns: int | None = None
    loaded_in_ns: int = 0

    @property
    def loading(self) -> bool:
        """Whether the context is still being loaded."""
        return False

    @abstractmethod
    def start(self) -> SessionT:
        """The session; again when it had to give way while its context was being loaded (`Engine.give_way`)."""

    def restore(self, session: SessionT, start: int, end: int) -> None:
        """Adds the stored tokens start..end-1 to a session that has those before."""
        raise NotImplementedError

    def drafter(self) -> Drafter | None:
        """What drafts one of the answers; None where nothing does."""
        return None

    def keep(self, session: SessionT, answer: Sequence[int]) -> Callable[[], str]:
        """What keeps a session that has ended, called on another thread; it returns the id of what was kept.

        answer: tokens that are kept with it; the session may have read more. It is closed after this.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of the context. Called exactly once, when the engine has dropped the sessions; by any thread."""

    def pieces(self, most: float) -> list[Piece]:
        """What is read at a time: pieces of stored tokens and of the prompt, each of a cost of at most `most`."""
        prompt = cut_prompt(self.cost, len(self.prompt), most)
        if not self.stored:
            return prompt
        copied = cut_prompt(self.stored_cost, self.stored, most)
        return [*(piece._replace(stored=True) for piece in copied), *prompt]

    def sampler(self, answer: int) -> Sampler:
        drawn, said = self.order.sampling, [*self.before, *self.prompt] if self.before else self.prompt
        parameters = SamplingParameters.of(drawn, self.grammar).for_answer(answer)
        return Sampler(parameters, said, self.end_ids | self.order.stop_token_ids)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine does now, and did since it started, under the names of the API's ServerStatus.

    waiting, prompting, decoding: requests that wait for admission, read their prompts, and decode.
    requests: of these, and of those about to be submitted.
    session_bytes: memory that the admitted ones may come to hold. session_limit_bytes: bound of that; None without one.
    steps: turns of the scheduler. prompt_tokens: fed in them.
    decode_steps: turns in which somebody decoded. decode_tokens: tokens fed by these, so that their quotient is the
    mean batch. decode_batch: sessions that decoded in the latest turn.
    host_bytes_read, rows_reused, device_wait_for_host_ns: see `Figures`; of sessions that have ended.
    """

    waiting: int = 0
    prompting: int = 0
    decoding: int = 0
    requests: int = 0
    session_bytes: int = 0
    session_limit_bytes: int | None = None
    steps: int = 0
    prompt_tokens: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_batch: int = 0
    host_bytes_read: int = 0
    rows_reused: int = 0
    device_wait_for_host_ns: int = 0

    def after_turn(self) -> EngineStats:
        """With one more turn of the scheduler counted, which begins."""
        return replace(self, steps=self.steps + 1)

    def after_prompts(self, tokens: int) -> EngineStats:
        """With prompt tokens counted that were fed."""
        return replace(self, prompt_tokens=self.prompt_tokens + tokens)

    def after_decoding(self, batch: int) -> EngineStats:
        """With a turn counted in which so many decoded."""
        return replace(
            self,
            decode_steps=self.decode_steps + (batch > 0),
            decode_tokens=self.decode_tokens + batch,
            decode_batch=batch,
        )

    def after_session(self, figures: Figures) -> EngineStats:
        """With what a session moved counted, at its end."""
        return replace(
            self,
            host_bytes_read=self.host_bytes_read + figures.host_bytes_read,
            rows_reused=self.rows_reused + figures.rows_reused,
            device_wait_for_host_ns=self.device_wait_for_host_ns + figures.device_wait_for_host_ns,
        )


class GiveWayError(Exception):
    """A session stopped waiting for a layer of its context because others can be served; see `Engine.give_way`."""
