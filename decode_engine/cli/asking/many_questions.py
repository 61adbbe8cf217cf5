"""Many questions from a file, and their answers in another one that grows line by line and may be gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from decode_engine.cli.asking.answer_options import as_flags, read_utf8
from decode_engine.cli.asking.answers_as_json import described_answers
from decode_engine.rpc.client import BatchItem, Client, GenerateOptions
from decode_engine.settings.request_bounds import MAX_BATCH
from index_store.cli.console import Update
from index_store.errors import InvalidArgumentError

_BATCH_BYTES = 2**21  # of questions in one call


class QuestionFile:
    """Questions, one a line of a file, and the file of answers: JSON objects with the question's place, from 0.

    Only answers are written there, so that what failed is asked again the next time. kept: answers that were there.
    """

    def __init__(self, path: Path, out: Path) -> None:
        self.path = path
        self.out = out
        self.kept = 0
        self._questions: list[str] = []

    def open_ones(self) -> dict[int, str]:
        """Questions without an answer, by place.

        Raises InvalidArgumentError where the files are not what they should be, or answers belong to other questions.
        """
        self._questions = list(_questions(self.path))
        answered = self._answered()
        self.kept = len(answered)
        return {place: text for place, text in enumerate(self._questions) if place not in answered}

    def _answered(self) -> set[int]:
        """Places that have their answers. An unfinished last line, of a program that was ended, is cut off."""
        if not self.out.exists():
            return set()
        data = self.out.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        found: set[int] = set()
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                place, question = int(record["index"]), record["question"]
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidArgumentError(
                    f"--out is {str(self.out)!r}, whose line {number} is no answer; name a new file"
                ) from error
            if not 0 <= place < len(self._questions) or self._questions[place] != question:
                raise InvalidArgumentError(
                    f"--out is {str(self.out)!r}, whose line {number} answers another question than "
                    f"{str(self.path)!r} has there; name a new file"
                )
            found.add(place)
        if len(whole) < len(data):
            self.out.write_bytes(whole)
        return found

    def add(self, place: int, item: BatchItem) -> None:
        """Writes the answer, or all of several, to a question."""
        answers = described_answers(
            item.texts, item.token_ids, item.logprobs, item.summaries, item.prompt_logprobs
        )
        record = {"index": place, "question": self._questions[place], **answers}
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def ask_all(
    client: Client,
    context: str,
    requests: Mapping[int, GenerateOptions],
    questions: QuestionFile,
    update: Update,
    timeout_s: float | None,
) -> dict[int, str]:
    """Has the requests answered, by place; returns why some were not. timeout_s: for each call."""
    failed: dict[int, str] = {}
    done = 0
    for places in _calls(requests):
        with client.batch_generate(
            context, [requests[place] for place in places], timeout_s=timeout_s
        ) as batch:
            for item in batch:
                place = places[item.index]
                if item.error is None:
                    questions.add(place, item)
                else:
                    failed[place] = as_flags(item.error.message)
                done += 1
                update(done, len(requests))
    return failed


def _calls(requests: Mapping[int, GenerateOptions]) -> Iterator[list[int]]:
    """Places that go into one call together."""
    places: list[int] = []
    size = 0
    for place, options in requests.items():
        own = len(json.dumps(options))
        if places and (len(places) == MAX_BATCH or size + own > _BATCH_BYTES):
            yield places
            places, size = [], 0
        places.append(place)
        size += own
    if places:
        yield places


def _questions(path: Path) -> Iterator[str]:
    """The questions of a file; JSON where its first line is an object. Blank lines are passed over."""
    lines = [line for line in read_utf8(path).split("\n") if line.strip()]
    if not lines:
        raise InvalidArgumentError(
            f"--questions is {str(path)!r}, which is empty; expected one question a line"
        )
    as_json = lines[0].lstrip().startswith("{")
    for number, line in enumerate(lines, 1):
        if not as_json:
            yield line.strip()
            continue
        try:
            question = json.loads(line)["question"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f'--questions is {str(path)!r}, whose line {number} is no JSON object with a field "question"'
            ) from error
        if not isinstance(question, str) or not question.strip():
            raise InvalidArgumentError(
                f"--questions is {str(path)!r}, whose line {number} asks nothing; expected a text"
            )
        yield question
