"""The demonstration behind ops/demo: prefill once, serve, ask over gRPC, compare with full attention.

Runs the installed commands as a user would (`prefill-worker run`, `decode-engine serve`) and asks through the Python
client. Everything it makes lies in a temporary folder that goes away with it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from demo_answers import Row, ask_all, is_clearly_worse, print_rows, print_summary, read_questions, summarise
from demo_processes import DemoError, run_command, running_server, temporary_folder
from rich.console import Console

from decode_engine.evaluation.machine import describe_machine
from decode_engine.evaluation.tasks.documents import read_text
from index_store.errors import SparseKVError

DEFAULT_TOKENS = 32_768
ROOM_FOR_ANSWERS = 1_000  # positions of the model that the text leaves to questions and answers
LONG_TOKEN_BYTES = 16  # no ordinary text has so many bytes a token
READER_ABILITIES = (
    'The packaged reader answers only questions worded as "What is the price of the lantern?" about facts worded as '
    '"The price of the lantern is 4821." (docs/models.md); to anything else it makes up an answer.'
)

# What facts in a text do not ask for. Only a model that chats can answer; nobody counts what is right.
SUMMARISING_QUESTIONS = (
    "In two sentences, what is this text about?",
    "Who are the people in this text? Describe two of them in a sentence each.",
    "What mood does this text have, and what in it makes you say so?",
)


class OutputFormat(StrEnum):
    """How the demonstration reports."""

    text = "text"
    json = "json"


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

        def told(phase: str) -> None:
            console.print(f"  {phase}", highlight=False, markup=False)

        with running_server(folder, store, self.model, told) as address:
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
        typer.Option(
            help="reader, smollm2 (decode-engine fetch-model smollm2), a Hugging Face folder or a GGUF file."
        ),
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
