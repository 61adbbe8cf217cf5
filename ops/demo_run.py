"""The demonstration behind ops/demo: prefill once, serve, ask over gRPC, compare with full attention.

Runs the installed commands as a user would (`prefill-worker run`, `decode-engine serve`) and asks through the Python
client. Everything it makes lies in a temporary folder that goes away with it.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from demo_processes import DemoError, run_command, running_server, temporary_folder
from rich.console import Console
from rich.table import Table
from rich.text import Text

from decode_engine.evaluation.comparison.machine import describe_machine
from decode_engine.evaluation.tasks import read_text
from decode_engine.rpc.client import Client
from index_store.errors import SparseKVError

MAX_TOKENS = 48
DEFAULT_TOKENS = 32_768
ROOM_FOR_ANSWERS = 1_000  # positions of the model that the text leaves to questions and answers
CLEARLY_WORSE = 0.1  # of the questions
LONG_TOKEN_BYTES = 16  # no ordinary text has so many bytes a token
READER_ABILITIES = (
    'The packaged reader answers only questions worded as "What is the price of the lantern?" about facts worded as '
    '"The price of the lantern is 4821." (docs/reader.md); to anything else it makes up an answer.'
)

# What facts in a text do not ask for. Only a model that chats can answer; nobody counts what is right.
SUMMARISING_QUESTIONS = (
    "In two sentences, what is this text about?",
    "Who are the people in this text? Describe two of them in a sentence each.",
    "What mood does this text have, and what in it makes you say so?",
)
SUMMARY_TOKENS = 120


class OutputFormat(StrEnum):
    """How the demonstration reports."""

    text = "text"
    json = "json"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one method said. `correct` is None where the right answer is not known."""

    text: str
    correct: bool | None
    fraction_sparse: float
    fraction_all: float
    milliseconds_per_token: float


@dataclass(frozen=True, slots=True)
class Row:
    """One question with both answers. `depth`, `expected`: None for a question that does not tell them."""

    depth: float | None
    question: str
    expected: str | None
    sparse: Answer
    full: Answer


def read_questions(path: Path) -> list[dict[str, Any]]:
    """One object per line: question, and if known answer and depth."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            questions.append({"question": str(entry["question"]), **entry})
        except (ValueError, KeyError, TypeError):
            raise DemoError(
                f"{path}, line {number}: expected a JSON object with a question, such as "
                '{"question": "What is the price of the tea?", "answer": "4821"}'
            ) from None
    if not questions:
        raise DemoError(f"{path} holds no questions")
    return questions


def is_correct(text: str, expected: str | None) -> bool | None:
    """Whether the expected words stand in the answer, whatever stands around them."""
    if expected is None:
        return None
    words = re.escape(expected.strip().rstrip(".").casefold())
    return re.search(rf"(?<!\w){words}(?!\w)", text.casefold()) is not None


def ask(
    client: Client, context: str, question: dict[str, Any], method: str | None, keep: float | None
) -> Answer:
    """Asks one question over gRPC; the answer ends with its line, a summary with the model's own end."""
    summarises = question.get("summarises", False)
    with client.generate(
        context,
        question=question["question"],
        max_tokens=SUMMARY_TOKENS if summarises else MAX_TOKENS,
        stop=[] if summarises else ["\n"],
        method=method,
        keep_ratio=keep,
    ) as generation:
        text = generation.read().strip()
        summary = generation.summary
    fractions, timings = summary.selection, summary.timings
    return Answer(
        text,
        is_correct(text, question.get("answer")),
        1.0 if fractions.fraction_sparse is None else fractions.fraction_sparse,
        fractions.fraction_all,
        timings.decode_ns / max(1, timings.decode_steps) / 1e6,
    )


def ask_all(
    address: str, context: str, questions: Sequence[dict[str, Any]], keep: float | None, console: Console
) -> list[Row]:
    """Every question with the context's own method, then every question with full attention."""
    answers: dict[str, list[Answer]] = {}
    with Client(address) as client:
        client.warm_context(context)
        own = client.get_context(
            context
        ).default_method  # named: over short texts "auto" takes full attention
        for label, method, ratio in (("default method", own, keep), ("full attention", "full", None)):
            ask(client, context, questions[0], method, ratio)  # compiles and touches memory; not reported
            answers[label] = []
            for number, question in enumerate(questions, 1):
                answers[label].append(ask(client, context, question, method, ratio))
                if console.is_terminal or number == len(questions):
                    end = "\n" if number == len(questions) else "\r"
                    console.print(
                        f"Asked with {label}: {number} of {len(questions)}", end=end, highlight=False
                    )
    pairs = zip(questions, answers["default method"], answers["full attention"], strict=True)
    return [Row(q.get("depth"), q["question"], q.get("answer"), sparse, full) for q, sparse, full in pairs]


def summarise(rows: Sequence[Row], prefill: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The figures below the table."""
    known = [row for row in rows if row.expected is not None]
    sparse = [row.sparse for row in rows]
    return {
        "questions": len(rows),
        "with_known_answer": len(known),
        "correct_sparse": sum(bool(row.sparse.correct) for row in known),
        "correct_full": sum(bool(row.full.correct) for row in known),
        "same_answer": sum(row.sparse.text == row.full.text for row in rows),
        "fraction_sparse_layers": statistics.fmean(answer.fraction_sparse for answer in sparse),
        "fraction_all_layers": statistics.fmean(answer.fraction_all for answer in sparse),
        "milliseconds_per_token_sparse": statistics.median(
            answer.milliseconds_per_token for answer in sparse
        ),
        "milliseconds_per_token_full": statistics.median(row.full.milliseconds_per_token for row in rows),
        "context_tokens": prefill["tokens"],
        "prefill_seconds": sum(prefill["seconds"].values()),
        "kv_bytes": prefill["kv_bytes"],
        "index_bytes": sum(prefill["index_bytes"].values()),
        "total_seconds": seconds,
    }


def is_clearly_worse(summary: dict[str, Any]) -> bool:
    """Whether the default method answers fewer questions than full attention, beyond one in ten."""
    if summary["with_known_answer"]:
        lost = summary["correct_full"] - summary["correct_sparse"]
        return bool(lost > CLEARLY_WORSE * summary["with_known_answer"])
    return bool(summary["same_answer"] < (1 - 3 * CLEARLY_WORSE) * summary["questions"])


def print_rows(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="The default method, and full attention")
    table.add_column("depth", justify="right")
    for heading in ("question", "expected", "answer", "with full attention"):
        table.add_column(heading, overflow="fold")
    for heading in ("sparse layers", "all layers", "ms/token", "ms/token, full attention"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            "" if row.depth is None else f"{row.depth:.1%}",
            row.question,
            row.expected or "",
            _marked(row.sparse, row.question),
            _marked(row.full, row.question),
            f"{row.sparse.fraction_sparse:.1%}",
            f"{row.sparse.fraction_all:.1%}",
            f"{row.sparse.milliseconds_per_token:.1f}",
            f"{row.full.milliseconds_per_token:.1f}",
        )
    console.print(table)


def _marked(answer: Answer, question: str) -> Text:
    """The answer without the words that only repeat the question, coloured where it is known to be right or wrong."""
    echo = question.removeprefix("What is ").removesuffix("?") + " is "
    start = len(echo) if answer.text.casefold().startswith(echo.casefold()) else 0
    shown = answer.text[start:]
    if answer.correct is None:
        return Text(shown)
    return Text(shown, style="green") if answer.correct else Text(f"✗ {shown}", style="red")


def print_summary(summary: dict[str, Any], console: Console) -> None:
    known = summary["with_known_answer"]
    right = (
        f"{summary['correct_sparse']} of {known} right, full attention {summary['correct_full']} of {known}; "
    )
    for line in (
        f"Answers: {right if known else ''}{summary['same_answer']} of {summary['questions']} word for word the same.",
        f"Keys touched: {summary['fraction_sparse_layers']:.1%} in the layers that search, "
        f"{summary['fraction_all_layers']:.1%} over all layers.",
        f"Time per token, median: {summary['milliseconds_per_token_sparse']:.1f} ms, "
        f"full attention {summary['milliseconds_per_token_full']:.1f} ms (the whole model, not attention alone).",
        f"Prefill: {summary['context_tokens']:,} tokens in {summary['prefill_seconds']:.1f} s; "
        f"{summary['kv_bytes'] / 1e6:,.1f} MB of keys and values, {summary['index_bytes'] / 1e6:,.1f} MB of index.",
        f"All of it took {summary['total_seconds']:.0f} s.",
    ):
        console.print(line, highlight=False)


@dataclass(frozen=True, slots=True)
class Demo:
    """What to demonstrate; the same names as the flags."""

    file: Path | None
    questions: Path | None
    model: str
    tokens: int | None
    facts: int
    ask: int | None
    keep: float | None
    seed: int

    def check(self) -> None:
        """Raises DemoError for what would fail only after minutes of work."""
        if self.keep is not None and not 0 < self.keep <= 1:
            raise DemoError(f"--keep is {self.keep:g}, expected above 0 and at most 1, such as 0.01")
        if self.tokens is not None and self.tokens < 1:
            raise DemoError(f"--tokens is {self.tokens}, expected at least 1")
        if self.ask is not None and not 0 < self.ask <= self.facts:
            raise DemoError(
                f"--ask is {self.ask} and --facts is {self.facts}, expected at least 1 and at most one a fact"
            )
        if self.questions is not None and self.file is None:
            raise DemoError("--questions needs the text that they are about: ops/demo FILE --questions FILE")
        for path in (self.file, self.questions):
            if path is not None and not path.is_file():
                raise DemoError(f"{path} is not a file")

    def run(self, folder: Path, console: Console) -> tuple[list[Row], dict[str, Any]]:
        """Everything between an empty folder and the rows with their summary."""
        started = time.monotonic()
        document, asked = self.make_document(folder, console)
        store = folder / "store"
        console.print(f"Prefilling {document.name} once", highlight=False)
        prefill = run_command(
            folder,
            *("prefill_worker", "run", "--model", self.model, "--input", str(document)),
            *("--store", str(store), "--name", "demo"),
        )
        console.print("Starting the server", highlight=False)
        with running_server(folder, store, self.model) as address:
            rows = ask_all(address, f"contexts/{prefill['id']}", asked, self.keep, console)
        return rows, summarise(rows, prefill, time.monotonic() - started)

    def make_document(self, folder: Path, console: Console) -> tuple[Path, list[dict[str, Any]]]:
        """The text and the questions: as they are when both were given, else a text with facts put in."""
        if self.questions is not None and self.file is not None:
            if self.model == "reader":
                console.print(READER_ABILITIES, highlight=False)
            return self.file, read_questions(self.questions)
        document, questions = folder / "document.txt", folder / "questions.jsonl"
        source = "held-out novels" if self.file is None else str(self.file)
        wanted = self._wanted_tokens()
        tokens = wanted if self.file is None else self._available_tokens(self.file, wanted)
        if tokens < wanted:
            console.print(
                f"{self.file} has {tokens:,} tokens, fewer than --tokens {wanted}: using them all",
                highlight=False,
                soft_wrap=True,
            )
        console.print(f"Putting {self.facts} facts into {tokens:,} tokens of {source}", highlight=False)
        run_command(
            folder,
            *("decode_engine", "make-document", "--model", self.model, "--tokens", str(tokens)),
            *("--facts", str(self.facts), "--ask", str(self.ask or self.facts), "--seed", str(self.seed)),
            *("--task", "single" if self.model == "reader" else "sentences"),
            *("--out", str(document), "--questions", str(questions)),
            *(() if self.file is None else ("--text", str(self.file))),
        )
        asked = read_questions(questions)
        if self.model != "reader":
            asked += [{"question": question, "summarises": True} for question in SUMMARISING_QUESTIONS]
        return document, asked

    def _wanted_tokens(self) -> int:
        """--tokens; without it 32,768, or as many thousands as the model has positions for beside the answers."""
        if self.tokens is not None:
            return self.tokens
        if self.model == "reader":
            return DEFAULT_TOKENS
        from index_store.models.loading import identify
        from index_store.models.resolve import resolve_model

        room = identify(resolve_model(self.model)).max_positions - ROOM_FOR_ANSWERS
        return min(DEFAULT_TOKENS, max(1, room // 1000 * 1000 or room))

    def _available_tokens(self, file: Path, wanted: int) -> int:
        """`wanted`, or the length of the text where that is less."""
        if file.stat().st_size > LONG_TOKEN_BYTES * wanted:
            return wanted  # long enough without counting, for which a tokenizer takes seconds to load
        from index_store.models.resolve import resolve_model
        from index_store.models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(resolve_model(self.model))
        return min(wanted, len(tokenizer.encode(read_text(file))))


def main(
    file: Annotated[
        Path | None, typer.Argument(help="Text to ask about; held-out novels by default.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="Questions about FILE as it is; otherwise facts are put into it.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="reader, smollm2 (ops/fetch-model smollm2), a Hugging Face folder or a GGUF file."),
    ] = "reader",
    tokens: Annotated[
        int | None,
        typer.Option(help="Length of the text in tokens. [default: 32768, or what the model can read]"),
    ] = None,
    facts: Annotated[int, typer.Option(help="Facts in the text.")] = 24,
    ask_: Annotated[
        int | None, typer.Option("--ask", help="Facts to ask about. [default: all of them]")
    ] = None,
    keep: Annotated[
        float | None, typer.Option(help="Fraction of the keys to keep. [default: the method's own]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides facts and depths.")] = 0,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="text, or one JSON object on stdout.")
    ] = (OutputFormat.text),
) -> None:
    """Prefills a long text once, serves it, asks questions over gRPC and compares with full attention.

    Exit code 1 when something fails or the answers are clearly worse than full attention's.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    progress = Console(stderr=True)
    demo = Demo(file, questions, model, tokens, facts, ask_, keep, seed)
    try:
        demo.check()
        with temporary_folder() as folder:
            rows, summary = demo.run(folder, progress)
    except (DemoError, SparseKVError, OSError) as error:
        progress.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        with suppress(OSError):  # there may be no terminal any more
            progress.print("interrupted; nothing is left running")
        raise typer.Exit(130) from None
    if output_format is OutputFormat.json:
        report = {"rows": [asdict(row) for row in rows], "summary": summary, "machine": describe_machine()}
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        terminal = Console() if sys.stdout.isatty() else Console(width=160)
        print_rows(rows, terminal)
        print_summary(summary, terminal)
    if is_clearly_worse(summary):
        progress.print("The default method answers clearly worse than full attention.", style="red")
        raise typer.Exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)
