"""An answer as its client reads it: pieces, and what was used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from decode_engine.rpc.client.reading import AsyncReader, Reader, Running
from decode_engine.rpc.client.repeats import Stream
from decode_engine.rpc.client.replies import calls_of, read_all, read_reply, texts_of
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import ToolCall
from sparsekv.v1.generation_pb2 import GenerateResponse
from sparsekv.v1.values import Piece, Summary, TokenLogprob, Usage, Waiting


def ignore_waiting(waiting: Waiting) -> None:
    """For those who do not want to know what they wait for."""


class Answer(Running[GenerateResponse, Piece]):
    """What is known of a running generation, whichever way it is read."""

    def __init__(self, stream: Stream[GenerateResponse], on_wait: Callable[[Waiting], None]) -> None:
        """on_wait: as in `AsyncClient.generate`."""
        super().__init__(stream)
        self._on_wait = on_wait
        self._usage: Usage | None = None
        self._generated = 0
        self._summaries: dict[int, Summary] = {}
        self._called: list[Piece] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        """Of the prompt's tokens but the first, where they are wanted, from the first piece on."""

    @property
    def summary(self) -> Summary:
        """Of the first answer. Raises InvalidArgumentError before the generation has been read to its end."""
        return self.summaries[0]

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """Of all answers, in order. Raises as `summary`."""
        if not self._summaries:
            raise InvalidArgumentError("the generation has no summary yet; read it to its end first")
        return tuple(self._summaries[index] for index in sorted(self._summaries))

    @property
    def usage(self) -> Usage | None:
        """Tokens used so far, also where it was cancelled or failed; None before the server's first word."""
        return None if self._usage is None else replace(self._usage, completion_tokens=self._generated)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls that the first answer has made, as far as it has been read."""
        return calls_of(self._called)

    def _take(self, response: GenerateResponse) -> Piece | None:
        """What a message brought; None where that is no part of the answer."""
        if response.HasField("usage"):
            self._usage = read_reply(Usage, response.usage)
        if response.HasField("waiting"):
            self._on_wait(read_reply(Waiting, response.waiting))
        if response.HasField("summary"):
            self._summaries[response.index] = read_reply(Summary, response.summary)
        if response.prompt_logprobs:
            self.prompt_logprobs = read_all(TokenLogprob, response.prompt_logprobs)
        self._generated += len(response.token_ids)
        if not (response.token_ids or response.text or response.tool_calls):
            return None
        piece = read_reply(Piece, response)
        if piece.tool_calls and not piece.index:
            self._called.append(piece)
        return piece


class Generation(Answer, Reader[GenerateResponse, Piece]):
    """A running generation: iterate for its pieces; `summary` is there after the last one.

    Leaving it as a context manager, or `cancel`, ends the work on the server.
    """

    def read(self) -> str:
        """The rest of the text, all at once; of the first answer where there are several."""
        return "".join(piece.text for piece in self if not piece.index)

    def read_all(self) -> list[str]:
        """The rest of the texts of all answers."""
        return texts_of(list(self))


class AsyncGeneration(Answer, AsyncReader[GenerateResponse, Piece]):
    """The same for coroutines: `async with`, `async for`, and `await read()`. Cancelling the task that reads it ends
    the work on the server, too."""

    async def read(self) -> str:
        """The rest of the text, all at once; of the first answer where there are several."""
        return "".join([piece.text async for piece in self if not piece.index])

    async def read_all(self) -> list[str]:
        """The rest of the texts of all answers."""
        return texts_of([piece async for piece in self])
