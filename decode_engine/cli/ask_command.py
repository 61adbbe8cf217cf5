"""The command `ask`: questions, about a stored context or without, and their answers; many of them from a file, with
answers in another one that grows line by line and may be gone on with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from decode_engine.cli.answer_options import AnswerConfig, as_flags, decoded, in_flags, read_utf8
from decode_engine.rpc.client import (
    BatchItem,
    Client,
    Explanation,
    GenerateOptions,
    Generation,
    Piece,
    Summary,
    TokenLogprob,
    Waiting,
)
from decode_engine.settings.request_bounds import MAX_BATCH
from index_store.cli.console import Update, print_json, reporter_for
from index_store.cli.entry import INTERRUPTED
from index_store.cli.options import (
    Filled,
    FormatOption,
    InputFile,
    OutputFile,
    OutputFormat,
    QuietOption,
    configured,
)
from index_store.errors import InvalidArgumentError


def described_answers(
    texts: Iterable[str],
    token_ids: Iterable[Sequence[int]],
    logprobs: Iterable[Sequence[TokenLogprob]],
    summaries: Iterable[Summary],
    prompt_logprobs: Sequence[TokenLogprob],
) -> dict[str, object]:
    """All answers to a question: one answer's fields at the top, several in a list; log probabilities where wanted."""
    described = [
        {
            "text": text,
            "token_ids": list(ids),
            **({"logprobs": _described(told)} if told else {}),
            **asdict(summary),
        }
        for text, ids, told, summary in zip(texts, token_ids, logprobs, summaries, strict=True)
    ]
    return {
        **({"prompt_logprobs": _described(prompt_logprobs)} if prompt_logprobs else {}),
        **(described[0] if len(described) == 1 else {"answers": described}),
    }


def shown(text: bytes) -> str:
    """A token's bytes for people: those that are no text become U+FFFD."""
    return text.decode("utf-8", "replace")


def _described(logprobs: Iterable[TokenLogprob]) -> list[dict[str, object]]:
    return [
        {
            "token_id": each.token_id,
            "text": shown(each.text),
            "logprob": each.logprob,
            "alternatives": [
                {"token_id": other.token_id, "text": shown(other.text), "logprob": other.logprob}
                for other in each.alternatives
            ],
        }
        for each in logprobs
    ]


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


_STANDARD_INPUT = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskConfig(AnswerConfig):
    """`decode-engine ask`. Exactly one of prompt, file and questions is given; questions with out."""

    context: Annotated[
        str | None,
        "Context: id, its first 6 or more digits, contexts/<id>, or display name; by default none.",
        Filled(),
    ] = None
    prompt: Annotated[
        str | None, Argument(metavar="QUESTION", help="The question; - reads it from standard input.")
    ] = None
    file: Annotated[
        Path | None, "Read the question from this file; - is standard input.", InputFile(dash=True)
    ] = None
    questions: Annotated[
        Path | None,
        'Ask many questions at once: one a line, or JSON objects with a field "question", one a line.',
        InputFile(),
    ] = None
    out: Annotated[
        Path | None,
        "Where answers to --questions go, a JSON object a line, as they come; those that are there are kept.",
        OutputFile(),
    ] = None
    raw: Annotated[bool, "Continue the context, or begin, by the text as it is, without chat template."] = (
        False
    )

    def __post_init__(self) -> None:
        AnswerConfig.__post_init__(self)
        if [self.prompt, self.file, self.questions].count(None) != 2:
            raise InvalidArgumentError(
                "expected one of a question, - for a question on standard input, --file and --questions"
            )
        if (self.questions is None) != (self.out is None):
            raise InvalidArgumentError("expected --questions and --out together, or neither")
        if self.prompt is not None and self.prompt != "-":
            _check_text(self.prompt, raw=self.raw)

    def find(self, client: Client) -> str:
        """The context's resource name, "" for none."""
        return "" if self.context is None else client.find_context(self.context).name

    def read_text(self) -> str:
        """The question, or with `raw` the text. Raises InvalidArgumentError for one that is not UTF-8 or is blank."""
        path = _STANDARD_INPUT if self.prompt == "-" else self.file
        if path is None:
            return self.prompt or ""
        standard = path == _STANDARD_INPUT
        text = decoded(
            sys.stdin.buffer.read() if standard else path.read_bytes(),
            "standard input" if standard else str(path),
        )
        _check_text(text, raw=self.raw)
        return text if self.raw else text.strip()


def _check_text(text: str, *, raw: bool) -> None:
    """Raises InvalidArgumentError where nothing is asked. Blanks alone may be a text to continue by."""
    if not (text if raw else text.strip()):
        raise InvalidArgumentError("the question is empty, expected words")


@configured(AskConfig)
def ask(
    config: AskConfig,
    show_timings: Annotated[
        bool, Option("--show-timings", help="Tell on standard error what was touched and how long it took.")
    ] = False,
    quiet: QuietOption = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Ask questions, of a stored context or of the model alone."""
    with in_flags(), Client(config.server, credentials=config.credentials()) as client:
        if config.questions is not None and config.out is not None:
            _ask_many(client, config, QuestionFile(config.questions, config.out), quiet, output)
            return
        text = config.read_text()
        name = config.find(client)
        with client.generate(
            name,
            timeout_s=config.timeout,
            on_wait=_say_what_it_waits_for,
            **config.generate_options(text, raw=config.raw),
        ) as generation:
            try:
                stream = output is OutputFormat.TEXT and config.answers == 1
                pieces = list(_stream_text(generation) if stream else generation)
            except KeyboardInterrupt:
                generation.cancel()
                raise typer.Exit(INTERRUPTED) from None
    answers = [_answer(pieces, index) for index in range(config.answers)]
    if output is OutputFormat.JSON:
        _print_json(generation, answers)
    else:
        _print_text(generation, answers, streamed=stream)
        if config.constrained:
            _tell_what_was_cut(generation.summaries)
    for summary in generation.summaries:
        for line in summary_lines(summary) if show_timings else _explained(summary.explanation):
            typer.echo(line, err=True)


def _ask_many(
    client: Client, config: AskConfig, questions: QuestionFile, quiet: bool, output: OutputFormat
) -> None:
    """Has all questions answered. Ends the program with 1 where some were not."""
    asked = questions.open_ones()
    name = config.find(client)
    reporter = reporter_for(quiet=quiet)
    requests = {place: config.generate_options(text, raw=config.raw) for place, text in asked.items()}
    with reporter.phase("answers", "questions") as update:
        failed = ask_all(client, name, requests, questions, update, config.timeout)
    for place, message in sorted(failed.items()):
        typer.echo(f"question {place + 1}: {message}", err=True)
    told = {
        "context": name,
        "answered": len(asked) - len(failed),
        "kept": questions.kept,
        "failed": len(failed),
    }
    if output is OutputFormat.JSON:
        print_json({**told, "out": str(questions.out)})
    else:
        typer.echo(
            f"{told['answered']} questions answered, {told['kept']} were before, {told['failed']} failed: "
            f"{questions.out}"
        )
    if failed:
        raise typer.Exit(1)


def _say_what_it_waits_for(waiting: Waiting) -> None:
    """Tells people, on a line of its own, and no file or program."""
    if sys.stderr.isatty():
        ahead = f"{waiting.requests_ahead} requests are admitted before this one"
        typer.echo(
            ahead if waiting.cause == "session" else "the context is being brought into memory", err=True
        )


def _stream_text(generation: Generation) -> Iterable[Piece]:
    """The answer's pieces, each written as it arrives, without the blanks that it begins with."""
    begun = False
    try:
        for piece in generation:
            yield piece
            text = piece.text if begun else piece.text.lstrip()
            begun = begun or bool(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    finally:
        if begun:
            sys.stdout.write("\n")
            sys.stdout.flush()


def _answer(pieces: Sequence[Piece], index: int) -> Piece:
    own = [piece for piece in pieces if piece.index == index]
    return Piece(
        tuple(id_ for piece in own for id_ in piece.token_ids),
        "".join(piece.text for piece in own),
        tuple(each for piece in own for each in piece.logprobs),
        index,
    )


def _print_text(generation: Generation, answers: Sequence[Piece], *, streamed: bool) -> None:
    """Answers, unless they were streamed, and log probabilities: those of the prompt first."""
    for each in generation.prompt_logprobs:
        typer.echo(f"prompt {_logprob_line(each)}")
    for answer in answers:
        if not streamed:
            typer.echo(f"[{answer.index + 1}] {answer.text.strip()}")
        for each in answer.logprobs:
            typer.echo(_logprob_line(each))


def _tell_what_was_cut(summaries: Sequence[Summary]) -> None:
    """Says on standard error which answers ended before they were what they have to be: JSON that is cut is none."""
    for number, summary in enumerate(summaries, 1):
        if summary.finish_reason == "length":
            which = f"answer {number}" if len(summaries) > 1 else "the answer"
            typer.echo(
                f"{which} was cut at --max-tokens after {summary.completion_tokens} tokens, and is not what it has to "
                "be; give it more",
                err=True,
            )


def _logprob_line(each: TokenLogprob) -> str:
    others = "".join(f"  {shown(other.text)!r} {other.logprob:.4f}" for other in each.alternatives)
    return f"{each.logprob:9.4f} {shown(each.text)!r}{':' if others else ''}{others}"


def _print_json(generation: Generation, answers: Sequence[Piece]) -> None:
    described = described_answers(
        (answer.text for answer in answers),
        (answer.token_ids for answer in answers),
        (answer.logprobs for answer in answers),
        generation.summaries,
        generation.prompt_logprobs,
    )
    print_json({"context": generation.summary.context, **described})


def summary_lines(summary: Summary) -> list[str]:
    times, keys = summary.timings, summary.selection
    sparse = (
        "no layer searches"
        if keys.fraction_sparse is None
        else f"{keys.fraction_sparse:.2%} of the keys in the layers that search"
    )
    budget = f" ({summary.budget}, remainder {summary.remainder})" if summary.budget else ""
    per_token = times.decode_ns / max(times.decode_steps + summary.accepted_tokens, 1) / 1e6
    parts = {
        "load": times.load_ns,
        "queue": times.queue_ns,
        "search": times.search_ns,
        "gather": times.gather_ns,
        "attend": times.attend_ns,
        "append": times.append_ns,
    }
    rest = max(0, times.total_ns - sum(parts.values()))
    moved = []
    if times.host_bytes_read or times.rows_reused:
        moved = [
            f"keys and values: {times.host_bytes_read / 2**20:.1f} MiB read from host memory in steps, "
            f"{times.rows_reused} rows found on the device, which waited {times.device_wait_for_host_ns / 1e6:.1f} ms "
            "for the host"
        ]
    listed = ", ".join(f"{name} {spent / 1e6:.1f}" for name, spent in parts.items())
    return [
        f"method {summary.method}{budget}: {sparse}, {keys.fraction_all:.2%} over all layers",
        *([f"chosen: {summary.method_reason}"] if summary.method_reason else []),
        f"tokens: {summary.context_tokens} context, {summary.prompt_tokens} prompt, "
        f"{summary.completion_tokens} answer ({summary.finish_reason})",
        *(
            [f"drafts: {summary.accepted_tokens} of {summary.drafted_tokens} tokens were right"]
            if summary.drafted_tokens
            else []
        ),
        f"time: {times.total_ns / 1e6:.1f} ms, first token after {times.first_token_ns / 1e6:.1f} ms, "
        f"{per_token:.1f} ms per token",
        *moved,
        f"of it, in sum over all layers and steps: {listed}, the rest of the model and waiting {rest / 1e6:.1f} ms",
        *_explained(summary.explanation),
    ]


def _explained(why: Explanation | None) -> list[str]:
    """Why an answer came as it did, where that was asked."""
    if why is None:
        return []
    nearest = (
        f" ({why.missed_context[:12]} has {why.missed_tokens} tokens of it)" if why.missed_context else ""
    )
    missed = f"; why no longer beginning was used: {why.missed}{nearest}" if why.missed else ""
    parts = ("door", "load", "queue", "prompt", "decode")
    times = ", ".join(f"{part} {getattr(why, f'{part}_ms'):.1f}" for part in parts)
    return [
        f"context: {why.lookup} {why.context[:12]} in {why.tier or 'no'} memory{missed}",
        f"method: {why.method}, since {why.method_reason}",
        f"milliseconds: {times}",
        *(
            [f"audits: {why.audited_steps} steps, {why.audited_kl:.4g} nats from full attention"]
            if why.audited_steps
            else []
        ),
    ]
