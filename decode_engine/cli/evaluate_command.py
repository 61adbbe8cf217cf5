"""The commands `evaluate`, `tune`, and `make-document`, which needs a tokenizer and no model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Option

from decode_engine.evaluation.settings import CONTINUATION_TOKENS, EvaluationConfig
from decode_engine.evaluation.tasks.documents import make_document, source_text, write_questions
from decode_engine.evaluation.tasks.family import FAMILIES
from decode_engine.settings import command_options as shared
from index_store.cli.app import fail
from index_store.cli.console import on_terminal, print_json, print_table, show_stages
from index_store.cli.options import (
    AUTO,
    AtLeast,
    Filled,
    FormatOption,
    InputFile,
    MoreThan,
    OneOf,
    OutputFile,
    OutputFormat,
    QuietOption,
    StoreOption,
    check_bounds,
    comma_separated,
    configured,
)
from index_store.errors import InvalidArgumentError, format_bytes
from index_store.methods.presets import EXPRESSION_HELP
from index_store.models.resolve import resolve_model
from index_store.store.catalog import Store, TunedDefault
from index_store.store.description.manifest import Manifest

if TYPE_CHECKING:
    import torch

    from decode_engine.evaluation.results import Results
    from decode_engine.evaluation.tuning import KlMeter, Outcome
    from index_store.memory.resident import ResidentContext
    from index_store.models.tokenizer import Tokenizer


def say_device(name: str, *, quiet: bool) -> torch.device:
    """The device that was picked; says on standard error which, where that was left open and not `quiet`.

    Raises InvalidArgumentError like `pick_device`.
    """
    from index_store.memory.devices import describe_device, pick_device

    device = pick_device(name)
    if name != device.type and not quiet:
        typer.echo(f"computing on {describe_device(device)}", err=True)
    return device


PictureOption = Annotated[bool, typer.Option(help="Draw quality and captured mass (needs matplotlib).")]


@configured(EvaluationConfig)
def evaluate_command(
    config: EvaluationConfig,
    picture: PictureOption = True,
    quiet: QuietOption = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Compare methods with full attention.

    Measured are exact match and KL on questions about long contexts, and errors inside layers. Contexts are made from
    held-out text and prefilled through prefill-worker; those that the store has already are reused.
    """
    from decode_engine.evaluation.evaluate import evaluate
    from decode_engine.evaluation.pictures import check_pictures

    if picture:
        check_pictures()
    say_device(config.device, quiet=quiet)
    with show_stages(sys.stderr, quiet=quiet) as start_stage:
        results = evaluate(config, start_stage)
    show_results(results, config.out, picture=picture, output=output)


def show_results(results: Results, out: Path, *, picture: bool, output: OutputFormat) -> None:
    from decode_engine.evaluation.pictures import draw_pictures
    from decode_engine.evaluation.results import FILES, tables, warnings

    for warning in (*results.setting.get("misfits", ()), *warnings(results.scores)):
        sys.stderr.write(f"warning: {warning}\n")
    files = [*FILES, *(draw_pictures(out, results.scores, results.maps) if picture else ())]
    if output is OutputFormat.JSON:
        print_json(results.as_json())
        return
    settings = results.setting["settings"]
    terminal = Console() if on_terminal() else Console(width=200)
    title = f"{settings['model']}, {settings['questions']} questions per context length"
    for table in tables(results.scores, title, results.prompts):
        terminal.print(table)
    terminal.print(f"Written to {out}: {', '.join(files)}")


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """`decode-engine tune`."""

    store: StoreOption
    context: Annotated[
        str, Option("--context", metavar="ID", help="Id, its first digits, or a name."), Filled()
    ]
    target_kl: Annotated[
        float, "KL divergence from full attention to stay below, nats per token.", MoreThan(0, 1000)
    ]
    model: shared.ModelOption
    prompts: Annotated[
        Path | None,
        f"Texts to predict, one per line; by default the context's last {CONTINUATION_TOKENS} tokens once "
        "more.",
        InputFile(),
    ] = None
    methods: Annotated[
        tuple[str, ...],
        f"Methods to try, comma-separated, each {EXPRESSION_HELP}; by default all that fit.",
        comma_separated(""),
    ] = ()
    device: shared.DeviceOption = AUTO
    placement: shared.PlacementOption = AUTO
    weights: shared.WeightsOption = AUTO
    dry_run: Annotated[bool, "Only measure, keep nothing."] = False

    def __post_init__(self) -> None:
        check_bounds(self)
        shared.check_device(self.device)
        shared.check_placement(self.placement, self.device)
        shared.check_weights(self.weights, self.device)


@configured(TuneConfig)
def tune_command(
    config: TuneConfig, quiet: QuietOption = False, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Find the cheapest method that suffices for a context.

    Method and budget become the context's default: requests that name no method get it from then on. The context
    itself is not changed. Exits with 1 when no method reaches the target.
    """
    store = Store(config.store)
    manifest = store.manifest(store.resolve(config.context))
    from decode_engine.evaluation.tuning import find_sweeps, tune
    from index_store.methods.method import misfits

    for reason in misfits(manifest):
        typer.echo(f"warning: {reason}", err=True)
    device = say_device(config.device, quiet=quiet)
    sweeps = find_sweeps(manifest, config.methods)
    with (
        show_stages(sys.stderr, quiet=quiet) as start_stage,
        _open_meter(config, store, manifest, device) as meter,
    ):
        outcomes = tune(sweeps, meter.measure, config.target_kl, start_stage)
    best = outcomes[0]
    written = best.reached and not config.dry_run
    if written:
        store.set_default_method(manifest.id, _record(manifest, best, config.target_kl))
    if output is OutputFormat.JSON:
        print_json(_document(manifest, outcomes, config.target_kl, written=written))
    else:
        _print(manifest, outcomes, written=written)
    if not best.reached:
        fail(
            f"no method reaches a KL divergence of {config.target_kl:g}; the best is {best.candidate.expression} at "
            f"{best.candidate.budget} with {best.measurement.kl:.4f}"
        )


@contextmanager
def _open_meter(
    config: TuneConfig, store: Store, manifest: Manifest, device: torch.device
) -> Iterator[KlMeter]:
    from decode_engine.evaluation.machine import arena_for
    from decode_engine.evaluation.tuning import KlMeter
    from decode_engine.model.runner import ModelRunner

    with ExitStack() as stack:
        runner = ModelRunner(resolve_model(config.model), device, manifest.dtype, weights=config.weights)
        stack.callback(runner.close)
        runner.check(manifest)
        arena = arena_for([manifest], device, config.placement)
        resident = stack.enter_context(arena.acquire(store, manifest.id))
        yield KlMeter(runner, resident, _texts(resident, runner.tokenizer, config.prompts))


def _texts(resident: ResidentContext, tokenizer: Tokenizer, prompts: Path | None) -> list[list[int]]:
    if prompts is None:
        from decode_engine.evaluation.tuning import continuation

        return [continuation(resident)]
    lines = [line.strip() for line in prompts.read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.encode_behind(line) for line in lines if line]
    if not texts or min(map(len, texts)) < 2:
        raise InvalidArgumentError(f"{prompts}: expected texts of at least 2 tokens, one per line")
    return texts


def _record(manifest: Manifest, best: Outcome, wanted: float) -> TunedDefault:
    return TunedDefault(
        context=manifest.id,
        method=best.candidate.expression,
        keep=best.candidate.keep,
        mass=best.candidate.mass,
        tokens=None,
        target="kl",
        wanted=wanted,
        reached=asdict(best.measurement),
        created_at=datetime.now(UTC),
    )


def _document(
    manifest: Manifest, outcomes: Sequence[Outcome], wanted: float, *, written: bool
) -> dict[str, object]:
    listed = [
        {
            "method": outcome.candidate.expression,
            "keep": outcome.candidate.keep,
            "mass": outcome.candidate.mass,
            "reached": outcome.reached,
            "index_bytes": outcome.index_bytes,
            "measured": asdict(outcome.measurement),
        }
        for outcome in outcomes
    ]
    return {
        "context": manifest.id,
        "target": {"kl": wanted},
        "reached": outcomes[0].reached,
        "written": written,
        "chosen": listed[0] if outcomes[0].reached else None,
        "candidates": listed,
    }


def _print(manifest: Manifest, outcomes: Sequence[Outcome], *, written: bool) -> None:
    columns = ("METHOD", "BUDGET", "REACHED", "KEYS", "KL", "INDEX")
    rows = [
        [
            outcome.candidate.expression,
            outcome.candidate.budget,
            "yes" if outcome.reached else "no",
            f"{outcome.measurement.keys:.2%}",
            f"{outcome.measurement.kl:.4f}",
            format_bytes(outcome.index_bytes),
        ]
        for outcome in outcomes
    ]
    print_table(columns, rows, right=columns[3:])
    best = outcomes[0]
    if best.reached:
        chosen = f"{best.candidate.expression} at {best.candidate.budget}"
        state = "is now the default of" if written else "would be the default of"
        typer.echo(f"{chosen} {state} {manifest.name} ({manifest.id[:12]})")


@dataclass(frozen=True, slots=True)
class DocumentConfig:
    """`decode-engine make-document`."""

    out: Annotated[Path, "Where to write the text.", OutputFile()]
    questions: Annotated[Path, "Where to write the questions, one JSON object per line.", OutputFile()]
    tokens: Annotated[int, "Exact length of the text in the model's tokens.", AtLeast(1, 2**31)] = 32768
    facts: Annotated[int, "Facts to put into the text.", AtLeast(1, 100_000)] = 24
    ask: Annotated[int | None, "Questions to write; one per fact by default.", AtLeast(1, 100_000)] = None
    distractors: shared.DistractorsOption = None
    task: Annotated[str, "What kind of facts and questions.", OneOf(*FAMILIES)] = "single"
    seed: Annotated[int, "Decides facts and depths.", AtLeast(0)] = 0
    text: shared.TextOption = ()
    model: shared.ModelOption = "reader"

    def __post_init__(self) -> None:
        one, other = self.out, self.questions
        same = one.is_file() and other.exists() and one.samefile(other)
        if same or one.absolute() == other.absolute():
            raise InvalidArgumentError(
                f"--out and --questions are both {str(self.out)!r}, expected two files; one would replace the other"
            )
        if self.ask is not None and self.ask > self.facts:
            raise InvalidArgumentError(
                f"--ask is {self.ask}, expected at most one for each of --facts {self.facts}"
            )


@configured(DocumentConfig)
def make_document_command(config: DocumentConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """Write a text with facts in it, and questions about them.

    The text is a long real one, the facts are at known depths.
    """
    from index_store.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(config.model))
    document = make_document(
        tokenizer,
        source_text(config.text),
        config.tokens - len(tokenizer.prefix_ids),
        facts=config.facts,
        seed=config.seed,
        questions=config.ask,
        distractors=config.distractors,
        family=config.task,
    )
    config.out.write_text(document.text, encoding="utf-8")
    write_questions(config.questions, document.questions)
    if output is OutputFormat.JSON:
        told = {name: getattr(config, name) for name in ("tokens", "task", "facts", "seed")}
        print_json({"out": str(config.out), "questions": str(config.questions), **told})
        return
    typer.echo(
        f"{config.out}: {config.tokens:,} tokens with {config.facts} facts; "
        f"{config.questions}: {len(document.questions)} questions"
    )
