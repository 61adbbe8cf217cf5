"""The command `decode-engine tune`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer

from decode_engine.cli.device_option import DeviceOption, PlacementOption, say_device
from decode_engine.config import AUTO, check_placement
from decode_engine.evaluation.context_arena import arena_for
from decode_engine.evaluation.tuning.candidates import find_families
from decode_engine.evaluation.tuning.meters import (
    CONTINUATION_TOKENS,
    QUERIES,
    KlMeter,
    MassMeter,
    Meter,
    continuation,
)
from decode_engine.evaluation.tuning.trials import Outcome, tune
from decode_engine.model.runner import ModelRunner
from index_store.cli.console import (
    FormatOption,
    OutputFormat,
    StoreOption,
    fail,
    format_bytes,
    print_json,
    print_table,
)
from index_store.cli.progress import show_stages
from index_store.errors import InvalidArgumentError
from index_store.memory.resident import ResidentContext
from index_store.methods.expressions import EXPRESSION_HELP
from index_store.models.loading import Tokenizer, resolve_model
from index_store.store.catalog import Store
from index_store.store.manifest import Manifest
from index_store.store.tuned_defaults import TunedDefault


def tune_command(
    store: StoreOption,
    context: Annotated[str, typer.Option("--context", metavar="ID", help="Id, its first digits, or a name.")],
    target_mass: Annotated[
        float | None,
        typer.Option(
            "--target-mass",
            help=f"Attention mass to capture: the average over layers, heads and {QUERIES} of the last queries.",
        ),
    ] = None,
    target_kl: Annotated[
        float | None,
        typer.Option("--target-kl", help="KL divergence from full attention to stay below, nats per token."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="For --target-kl: 'reader', or a Hugging Face folder.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help=f"For --target-kl: texts to predict, one per line; by default the context's last "
            f"{CONTINUATION_TOKENS} tokens once more.",
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help=f"Methods to try, comma-separated, each {EXPRESSION_HELP}; by default all that fit.",
        ),
    ] = "",
    device: DeviceOption = AUTO,
    placement: PlacementOption = AUTO,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only measure, keep nothing.")] = False,
    output_format: FormatOption = OutputFormat.TEXT,
) -> None:
    """Find the cheapest method and budget that reach a quality on a stored context, and make them its default.

    Requests that name no method get it from then on. The context itself is not changed. Exits with 1 when no method
    reaches the target.
    """
    target, wanted = _check_target(target_mass, target_kl)
    if (target == "kl") != (model is not None):
        raise InvalidArgumentError("--model belongs to --target-kl: a model is needed there, and only there")
    if prompts is not None and target != "kl":
        raise InvalidArgumentError("--prompts belongs to --target-kl, and --target-mass is given")
    check_placement(placement, device)
    picked = say_device(device)
    opened = Store(store)
    manifest = opened.manifest(opened.resolve(context))
    families = find_families(manifest, [part.strip() for part in methods.split(",") if part.strip()])
    with (
        show_stages(sys.stderr) as start_stage,
        _open_meter(opened, manifest, target, wanted, picked, placement, model, prompts) as meter,
    ):
        outcomes = tune(families, meter, start_stage)
    best = outcomes[0]
    written = best.reached and not dry_run
    if written:
        opened.set_default_method(manifest.id, _record(manifest, best, target, wanted))
    if output_format is OutputFormat.JSON:
        print_json(_document(manifest, outcomes, target, wanted, written=written))
    else:
        _print(manifest, outcomes, written=written)
    if not best.reached:
        fail(
            f"no method reaches {_target_text(target, wanted)}; the best is {best.candidate.expression} at "
            f"{best.candidate.budget} with {_figures_text(best)}"
        )


def _check_target(mass: float | None, kl: float | None) -> tuple[str, float]:
    if mass is not None and kl is None:
        if not 0.0 < mass <= 1.0:
            raise InvalidArgumentError(
                f"--target-mass is {mass}, expected a number above 0 and at most 1 such as 0.99"
            )
        return "mass", mass
    if kl is not None and mass is None:
        if not kl > 0.0:
            raise InvalidArgumentError(f"--target-kl is {kl}, expected a positive number such as 0.005")
        return "kl", kl
    raise InvalidArgumentError("expected one of --target-mass and --target-kl")


@contextmanager
def _open_meter(
    store: Store,
    manifest: Manifest,
    target: str,
    wanted: float,
    device: torch.device,
    placement: str,
    model: str | None,
    prompts: Path | None,
) -> Iterator[Meter]:
    """Loads the context, and what the target needs."""
    with ExitStack() as stack:
        runner = None
        if model is not None:
            runner = ModelRunner(resolve_model(model), device, manifest.dtype)
            stack.callback(runner.close)
        stored = stack.enter_context(store.open(manifest.id))
        resident = stack.enter_context(arena_for([manifest], device, placement).acquire(store, manifest.id))
        if target == "mass" or runner is None:
            yield MassMeter(stored, resident, wanted)
        else:
            yield KlMeter(runner, resident, _texts(resident, runner.tokenizer, prompts), wanted)


def _texts(resident: ResidentContext, tokenizer: Tokenizer, prompts: Path | None) -> list[list[int]]:
    if prompts is None:
        return [continuation(resident)]
    lines = [line.strip() for line in prompts.read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.encode(line) for line in lines if line]
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
