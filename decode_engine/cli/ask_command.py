"""The command `ask`: questions, about a stored context or without, and their answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from decode_engine.cli.asking.answer_options import AnswerConfig, decoded, in_flags
from decode_engine.cli.asking.answers_as_json import described_answers, shown
from decode_engine.cli.asking.many_questions import QuestionFile, ask_all
from decode_engine.rpc.client import Client, Explanation, Generation, Piece, Summary, TokenLogprob, Waiting
from index_store.cli.console import print_json, reporter_for
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

_STANDARD_INPUT = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskConfig(AnswerConfig):
    """`decode-engine ask`. Exactly one of prompt, file and questions is given; questions with out."""

    context: Annotated[
        str | None,
        Option(
            "--context",
            help="Context: id, its first 6 or more digits, contexts/<id>, or display name; by default none.",
        ),
        Filled(),
    ] = None
    prompt: Annotated[
        str | None, Argument(metavar="QUESTION", help="The question; - reads it from standard input.")
    ] = None
    file: Annotated[
        Path | None,
        Option("--file", help="Read the question from this file; - is standard input."),
        InputFile(dash=True),
    ] = None
    questions: Annotated[
        Path | None,
        Option(
            "--questions",
            help='Ask many questions at once: one a line, or JSON objects with a field "question", one a line.',
        ),
        InputFile(),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            "--out",
            help="Where answers to --questions go, a JSON object a line, as they come; those that are there are kept.",
        ),
        OutputFile(),
    ] = None
    raw: Annotated[
        bool,
        Option("--raw", help="Continue the context, or begin, by the text as it is, without chat template."),
    ] = False

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
    """One answer as a whole."""
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
    """What a generation touched and took, in a few lines."""
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
