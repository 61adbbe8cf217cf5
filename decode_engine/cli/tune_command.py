"""The command `tune`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer import Option

from decode_engine.cli.logs import say_device
from decode_engine.evaluation.settings import CONTINUATION_TOKENS, TUNED_QUERIES
from decode_engine.settings.command_options import (
    DeviceOption,
    PlacementOption,
    WeightsOption,
    check_device,
    check_placement,
    check_weights,
)
from index_store.cli.app import fail
from index_store.cli.console import print_json, print_table, show_stages
from index_store.cli.options import (
    AUTO,
    Filled,
    FormatOption,
    InputFile,
    MoreThan,
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

    from decode_engine.evaluation.tuning.meters import Meter
    from decode_engine.evaluation.tuning.trials import Outcome
    from index_store.memory.resident import ResidentContext
    from index_store.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """`decode-engine tune`. One of target_mass and target_kl is given, with the latter a model."""

    store: StoreOption
    context: Annotated[
        str, Option("--context", metavar="ID", help="Id, its first digits, or a name."), Filled()
    ]
    target_mass: Annotated[
        float | None,
        Option(
            "--target-mass",
            help=f"Attention mass to capture: the average over layers, heads and {TUNED_QUERIES} of the last queries.",
        ),
        MoreThan(0, 1),
    ] = None
    target_kl: Annotated[
        float | None,
        Option("--target-kl", help="KL divergence from full attention to stay below, nats per token."),
        MoreThan(0, 1000),
    ] = None
    model: Annotated[
        str | None, Option("--model", help="For --target-kl: 'reader', or a Hugging Face folder."), Filled()
    ] = None
    prompts: Annotated[
        Path | None,
        Option(
            "--prompts",
            help=f"For --target-kl: texts to predict, one per line; by default the context's last "
            f"{CONTINUATION_TOKENS} tokens once more.",
        ),
        InputFile(),
    ] = None
    methods: Annotated[
        tuple[str, ...],
        Option(
            "--methods",
            help=f"Methods to try, comma-separated, each {EXPRESSION_HELP}; by default all that fit.",
        ),
        comma_separated(""),
    ] = ()
    device: DeviceOption = AUTO
    placement: PlacementOption = AUTO
    weights: WeightsOption = AUTO
    dry_run: Annotated[bool, Option("--dry-run", help="Only measure, keep nothing.")] = False

    def __post_init__(self) -> None:
        check_bounds(self)
        if (self.target_mass is None) == (self.target_kl is None):
            raise InvalidArgumentError("expected one of --target-mass and --target-kl")
        if (self.target_kl is None) != (self.model is None):
            raise InvalidArgumentError(
                "--model belongs to --target-kl: a model is needed there, and only there"
            )
        if self.prompts is not None and self.target_kl is None:
            raise InvalidArgumentError("--prompts belongs to --target-kl, and --target-mass is given")
        check_device(self.device)
        check_placement(self.placement, self.device)
        check_weights(self.weights, self.device)

    @property
    def target(self) -> tuple[str, float]:
        """What is measured, "mass" or "kl", and what it is to reach."""
        if self.target_kl is not None:
            return "kl", self.target_kl
        return "mass", cast(float, self.target_mass)


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
    from decode_engine.evaluation.tuning.candidates import find_sweeps
    from decode_engine.evaluation.tuning.trials import tune
    from index_store.methods.method import misfits

    for reason in misfits(manifest):
        typer.echo(f"warning: {reason}", err=True)
    target, wanted = config.target
    device = say_device(config.device, quiet=quiet)
    sweeps = find_sweeps(manifest, config.methods)
    with (
        show_stages(sys.stderr, quiet=quiet) as start_stage,
        _open_meter(config, store, manifest, device) as meter,
    ):
        outcomes = tune(sweeps, meter, start_stage)
    best = outcomes[0]
    written = best.reached and not config.dry_run
    if written:
        store.set_default_method(manifest.id, _record(manifest, best, target, wanted))
    if output is OutputFormat.JSON:
        print_json(_document(manifest, outcomes, target, wanted, written=written))
    else:
        _print(manifest, outcomes, written=written)
    if not best.reached:
        fail(
            f"no method reaches {_target_text(target, wanted)}; the best is {best.candidate.expression} at "
            f"{best.candidate.budget} with {_figures_text(best)}"
        )


@contextmanager
def _open_meter(
    config: TuneConfig, store: Store, manifest: Manifest, device: torch.device
) -> Iterator[Meter]:
    """Loads the context, and what the target needs."""
    from decode_engine.evaluation.context_arena import arena_for
    from decode_engine.evaluation.tuning.meters import KlMeter, MassMeter
    from decode_engine.model.runner import ModelRunner

    target, wanted = config.target
    with ExitStack() as stack:
        runner = None
        if config.model is not None:
            runner = ModelRunner(resolve_model(config.model), device, manifest.dtype, weights=config.weights)
            stack.callback(runner.close)
        stored = stack.enter_context(store.open(manifest.id))
        arena = arena_for([manifest], device, config.placement)
        resident = stack.enter_context(arena.acquire(store, manifest.id))
        if target == "mass" or runner is None:
            yield MassMeter(stored, resident, wanted)
        else:
            yield KlMeter(runner, resident, _texts(resident, runner.tokenizer, config.prompts), wanted)


def _texts(resident: ResidentContext, tokenizer: Tokenizer, prompts: Path | None) -> list[list[int]]:
    if prompts is None:
        from decode_engine.evaluation.tuning.meters import continuation

        return [continuation(resident)]
    lines = [line.strip() for line in prompts.read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.encode_behind(line) for line in lines if line]
    if not texts or min(map(len, texts)) < 2:
        raise InvalidArgumentError(f"{prompts}: expected texts of at least 2 tokens, one per line")
    return texts


def _record(manifest: Manifest, best: Outcome, target: str, wanted: float) -> TunedDefault:
    return TunedDefault(
        context=manifest.id,
        method=best.candidate.expression,
        keep=best.candidate.keep,
        mass=best.candidate.mass,
        tokens=None,
        target=target,
        wanted=wanted,
        reached=best.measurement.figures(),
        created_at=datetime.now(UTC),
    )


def _document(
    manifest: Manifest, outcomes: Sequence[Outcome], target: str, wanted: float, *, written: bool
) -> dict[str, object]:
    listed = [
        {
            "method": outcome.candidate.expression,
            "keep": outcome.candidate.keep,
            "mass": outcome.candidate.mass,
            "reached": outcome.reached,
            "index_bytes": outcome.index_bytes,
            "measured": outcome.measurement.figures(),
        }
        for outcome in outcomes
    ]
    return {
        "context": manifest.id,
        "target": {target: wanted},
        "reached": outcomes[0].reached,
        "written": written,
        "chosen": listed[0] if outcomes[0].reached else None,
        "candidates": listed,
    }


def _print(manifest: Manifest, outcomes: Sequence[Outcome], *, written: bool) -> None:
    figures = [name for name in ("keys", "mass", "error", "kl") if name in outcomes[0].measurement.figures()]
    columns = ("METHOD", "BUDGET", "REACHED", *(name.upper() for name in figures), "INDEX")
    rows = [
        [
            outcome.candidate.expression,
            outcome.candidate.budget,
            "yes" if outcome.reached else "no",
            *(_figure(name, outcome.measurement.figures()[name]) for name in figures),
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


def _figure(name: str, value: float) -> str:
    return f"{value:.2%}" if name == "keys" else f"{value:.4f}"


def _figures_text(outcome: Outcome) -> str:
    return ", ".join(
        f"{name} {_figure(name, value)}" for name, value in outcome.measurement.figures().items()
    )


def _target_text(target: str, wanted: float) -> str:
    return f"a captured mass of {wanted:g}" if target == "mass" else f"a KL divergence of {wanted:g}"
