"""A submitted request and how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from decode_engine.engine.places import Place
from decode_engine.engine.prompt_pieces import Piece
from decode_engine.engine.requests import Request, SessionT, Stream, Times
from decode_engine.engine.sampler import Sampler
from decode_engine.errors import CancelledError, DeadlineExceededError, EngineCrashedError
from index_store.memory.patience import Patience


@dataclass(eq=False, slots=True)
class Job(Generic[SessionT]):
    """A submitted request. Times are on the engine's clock.

    pieces: of the prompt; read: how many of them were. patience: while others are admitted and its memory is not free.
    loaded_ns: when it was first seen that its context is not being loaded; None before.
    """

    request: Request[SessionT]
    place: Place
    stream: Stream
    sampler: Sampler
    submitted_ns: int
    pieces: Sequence[Piece]
    patience: Patience = field(default_factory=Patience)
    session: SessionT | None = None
    read: int = 0
    last_token: int = -1
    generated: int = 0
    loaded_ns: int | None = None
    admitted_ns: int = 0
    prompt_done_ns: int = 0
    first_token_ns: int = 0
    decode_steps: int = 0
    decode_ns: int = 0

    @property
    def unread(self) -> int:
        """Pieces of the prompt that are still to be read."""
        return len(self.pieces) - self.read

    @property
    def fed(self) -> int:
        """Tokens of the prompt that were read."""
        return sum(piece.tokens for piece in self.pieces[: self.read])

    def end(self, now_ns: int) -> Exception | None:
        """Why nobody waits for the job any more; None as long as somebody does."""
        if self.stream.cancelled:
            return CancelledError("the client ended the call")
        deadline_ns = self.request.deadline_ns
        if deadline_ns is None or now_ns < deadline_ns:
            return None
        message = f"the deadline passed after {self.generated} generated tokens"
        return DeadlineExceededError(message, generated=self.generated)

    def running(self) -> SessionT:
        """The session. Raises EngineCrashedError when there is none, before the admission and after the end."""
        if self.session is None:
            raise EngineCrashedError("a request was worked on without a session")
        return self.session

    def times(self, now_ns: int) -> Times:
        """Of the request, when it ends now."""
        admitted_ns = self.admitted_ns
        loaded_ns = admitted_ns if self.loaded_ns is None else min(self.loaded_ns, admitted_ns)
        return Times(
            load_ns=loaded_ns - self.submitted_ns,
            queue_ns=admitted_ns - loaded_ns,
            prompt_ns=self.prompt_done_ns - admitted_ns,
            first_token_ns=self.first_token_ns - self.submitted_ns,
            total_ns=now_ns - self.submitted_ns,
            decode_steps=self.decode_steps,
            decode_ns=self.decode_ns,
        )
