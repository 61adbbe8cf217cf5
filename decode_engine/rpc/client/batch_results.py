"""Many requests on one context, as their client reads them: one after another as they end."""

from __future__ import annotations

from google.rpc.status_pb2 import Status

from decode_engine.rpc.client.reading import AsyncReader, Reader, Running
from decode_engine.rpc.client.repeats import Stream
from decode_engine.rpc.client.replies import BatchItem, calls_of, read_all, read_reply, texts_of
from decode_engine.rpc.transport.status import error_of
from sparsekv.v1.generation_pb2 import BatchGenerateRequest, BatchGenerateResponse
from sparsekv.v1.values import Piece, Summary, TokenLogprob


class Results(Running[BatchGenerateResponse, BatchItem]):
    """What is known of a running batch, whichever way it is read."""

    def __init__(self, stream: Stream[BatchGenerateResponse], request: BatchGenerateRequest) -> None:
        super().__init__(stream)
        self._answers = [each.n or 1 for each in request.requests]
        self._pieces: dict[int, list[Piece]] = {}
        self._summaries: dict[int, dict[int, Summary]] = {}
        self._prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}

    def _take(self, response: BatchGenerateResponse) -> BatchItem | None:
        """What became of a request with this message; None while it goes on."""
        index = response.index
        if response.HasField("error"):
            return self._item(index, response.error)
        answer = response.response
        if answer.prompt_logprobs:
            self._prompt_logprobs[index] = read_all(TokenLogprob, answer.prompt_logprobs)
        if answer.token_ids or answer.text or answer.tool_calls:
            self._pieces.setdefault(index, []).append(read_reply(Piece, answer))
        if answer.HasField("summary"):
            summaries = self._summaries.setdefault(index, {})
            summaries[answer.index] = read_reply(Summary, answer.summary)
            if len(summaries) == self._answers[index]:
                return self._item(index, None)
        return None

    def _item(self, index: int, error: Status | None) -> BatchItem:
        pieces, summaries = self._pieces.pop(index, []), self._summaries.pop(index, {})
        texts = texts_of(pieces)
        texts += [""] * (len(summaries) - len(texts))
        answers = [[piece for piece in pieces if piece.index == place] for place in range(len(texts))]
        return BatchItem(
            index,
            tuple(texts),
            tuple(tuple(id_ for piece in own for id_ in piece.token_ids) for own in answers),
            tuple(summaries[place] for place in sorted(summaries)),
            None if error is None else error_of(error),
            tuple(map(calls_of, answers)),
            tuple(tuple(each for piece in own for each in piece.logprobs) for own in answers),
            self._prompt_logprobs.pop(index, ()),
        )


class Batch(Results, Reader[BatchGenerateResponse, BatchItem]):
    """A running batch: iterate for its requests as they end, in any order; each comes once.

    Leaving it as a context manager, or `cancel`, ends the work on the server.
    """


class AsyncBatch(Results, AsyncReader[BatchGenerateResponse, BatchItem]):
    """The same for coroutines: `async with` and `async for`."""
