"""Options from fields, and what long commands say about how far they are."""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from index_store.cli import console
from index_store.cli.console import reporter_for, show_stages
from index_store.cli.options import (
    SIZE,
    AtLeast,
    Check,
    Filled,
    InputFile,
    MoreThan,
    OneOf,
    OutputFile,
    OutputFolder,
    Spelled,
    check_bounds,
    comma_separated,
    configured,
)
from index_store.errors import ContextNotFoundError, InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Config:
    """Options of every kind."""

    name: Annotated[str, typer.Option(help="Required.")]
    files: Annotated[tuple[str, ...], typer.Option("--file", help="At least one.")]
    more: Annotated[tuple[str, ...], typer.Option(help="Any number.")] = ("as", "told")
    end: Annotated[tuple[str, ...] | None, typer.Option(help="Any number, or nothing said.")] = None
    memory: Annotated[int | None, typer.Option(metavar="SIZE"), SIZE, AtLeast(10)] = None
    lengths: Annotated[tuple[int, ...], typer.Option("--length"), comma_separated("1,2", int), AtLeast(1)] = (
        1,
        2,
    )
    layout: Annotated[str | None, typer.Option(), OneOf("dense", "lists")] = None
    kind: Annotated[str, typer.Option(), OneOf("exact", "muse")] = "exact"
    threads: Annotated[int, typer.Option(), Spelled(0, lambda count: count or 4)] = field(
        default_factory=lambda: 4
    )
    fast_steps: Annotated[bool, typer.Option("--fast-steps")] = False
    wait_most: Annotated[float, typer.Option(), AtLeast(0)] = 1.5

    def __post_init__(self) -> None:
        check_bounds(self)


app = typer.Typer()
told: list[tuple[Config, bool]] = []


@app.command()
@configured(Config)
def run(
    config: Config, own: Annotated[bool, typer.Option("--own", help="The command's own.")] = False
) -> None:
    """What the command does."""
    told.append((config, own))


def invoke(*arguments: str) -> tuple[Config, bool]:
    done = CliRunner().invoke(app, arguments, catch_exceptions=True)
    if done.exception is not None:
        raise done.exception
    return told.pop()


REQUIRED = ("--name", "a", "--file", "x")


def test_what_is_not_given_is_the_fields_default() -> None:
    assert invoke(*REQUIRED) == (Config("a", ("x",)), False)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--file", "y"], {"files": ("x", "y")}),
        (["--more", "1", "--more", "2"], {"more": ("1", "2")}),
        (["--end", ""], {"end": ("",)}),
        (["--memory", "1KiB"], {"memory": 1024}),
        (["--memory", "auto"], {"memory": None}),
        (["--length", " 3,,4 "], {"lengths": (3, 4)}),
        (["--length", ""], {"lengths": ()}),
        (["--layout", "lists"], {"layout": "lists"}),
        (["--kind", "muse"], {"kind": "muse"}),
        (["--threads", "2"], {"threads": 2}),
        (["--fast-steps"], {"fast_steps": True}),
    ],
)
def test_values_are_read(arguments: list[str], changes: dict[str, Any]) -> None:
    config, _ = invoke(*REQUIRED, *arguments)
    assert config == Config(**{"name": "a", "files": ("x",), **changes})
    assert type(config.layout) in (str, type(None))
    assert type(config.kind) is str


@pytest.mark.parametrize(
    "arguments", [(), ("--name", "a"), (*REQUIRED, "--colour", "blue"), (*REQUIRED, "--threads", "x")]
)
def test_wrong_usage_is_exit_code_two(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_bounds_name_the_flag() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^--wait-most is -1.0, expected at least 0$"):
        invoke(*REQUIRED, "--wait-most", "-1")
    with pytest.raises(InvalidArgumentError, match=r"^--memory is 9, expected at least 10, or auto$"):
        invoke(*REQUIRED, "--memory", "9")
    with pytest.raises(InvalidArgumentError, match=r"^--memory: size is 'much', expected"):
        invoke(*REQUIRED, "--memory", "much")
    with pytest.raises(InvalidArgumentError, match=r"^--length is 0, expected at least 1$"):
        invoke(*REQUIRED, "--length", "2,0")
    with pytest.raises(InvalidArgumentError, match=r"^--kind is 'x', expected exact or muse$"):
        invoke(*REQUIRED, "--kind", "x")


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (AtLeast(0), [0, 0.5, 2**62], [-1e-9, math.nan, math.inf, 2**64]),
        (AtLeast(1, 4), [1, 4], [0, 5, math.nan]),
        (MoreThan(0, 1), [1e-9, 1.0], [0.0, -1.0, 1.01, math.nan, math.inf]),
        (OneOf("a", "b"), ["a", "b"], ["", "A", "ab"]),
        (Filled(), ["x", " x"], ["", " \n"]),
    ],
)
def test_checks_of_values(check: Check, good: list[object], bad: list[object]) -> None:
    for value in good:
        check.check("--it", value)
    for value in bad:
        with pytest.raises(InvalidArgumentError, match=r"^--it is .*, expected "):
            check.check("--it", value)


def test_checks_of_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    InputFile().check("--it", file)
    InputFile(dash=True).check("--it", Path("-"))
    OutputFile().check("--it", file)
    OutputFile().check("--it", tmp_path / "new")
    OutputFolder().check("--it", tmp_path)
    OutputFolder().check("--it", tmp_path / "new" / "newer")
    for check, path, message in (
        (InputFile(), tmp_path, "a folder; expected a file"),
        (InputFile(), tmp_path / "none", "which is not there"),
        (InputFile(), Path("-"), "which is not there"),
        (OutputFile(), tmp_path, "a folder"),
        (OutputFile(), tmp_path / "none" / "new", "there is no folder"),
        (OutputFolder(), file, "is a file; expected a folder"),
        (OutputFolder(), file / "new", "is a file; expected a folder"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^--it is .*{message}"):
            check.check("--it", path)


def test_checks_of_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may do everything
    for check, path in (
        (InputFile(), file),
        (OutputFile(), file),
        (OutputFile(), tmp_path / "new"),
        (OutputFolder(), tmp_path),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^--it is .*(may not|nothing may) be "):
            check.check("--it", path)


def test_what_a_configuration_refuses_is_wrong_usage() -> None:
    @dataclass(frozen=True)
    class Strict:
        name: Annotated[str, typer.Option()]

        def __post_init__(self) -> None:
            raise ContextNotFoundError("never mind", context="x")

    strict = typer.Typer()
    strict.command()(configured(Strict)(lambda config: None))
    refused = CliRunner().invoke(strict, ["--name", "x"])
    assert isinstance(refused.exception, InvalidArgumentError)
    assert (refused.exception.message, refused.exception.metadata) == ("never mind", {"context": "x"})


def test_help_shows_what_people_write() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.replace("│", " ").split())
    assert "What the command does." in shown
    for part in (
        *("[default: auto]", "[default: 1,2]", "[default: exact]", "[default: 0]", "dense|lists", "--own"),
    ):
        assert part in shown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the day, which passes when a test says so."""
    now = [100.0]
    # Of this module alone: servers of other tests in this process go by the true time.
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_what_takes_no_time_is_not_told_in_a_pipe(clock: list[float]) -> None:
    pipe = io.StringIO()
    reporter = reporter_for(pipe)
    with reporter.phase("verify", "bytes") as update:
        for done in range(1, 11):
            update(done, 10)
    assert pipe.getvalue() == ""
    reporter.note("a sentence")
    assert pipe.getvalue() == "a sentence\n"


def test_what_takes_long_is_told_every_ten_seconds_and_at_the_end(clock: list[float]) -> None:
    pipe = io.StringIO()
    with reporter_for(pipe).phase("prefill", "tokens") as update:
        for done in range(1, 10):
            clock[0] += 4.0
            update(done, 9)
    assert pipe.getvalue().splitlines() == [
        "prefill: 3 of 9 tokens",
        "prefill: 6 of 9 tokens",
        "prefill: 9 of 9 tokens",
    ]
    pipe = io.StringIO()
    with reporter_for(pipe).phase("prefill", "tokens") as update:
        clock[0] += 11.0
        update(1, 2)
        update(2, 2)
    assert pipe.getvalue().splitlines() == ["prefill: 1 of 2 tokens", "prefill: 2 of 2 tokens"]


def test_quiet_says_nothing(clock: list[float]) -> None:
    pipe = io.StringIO()
    reporter = reporter_for(pipe, quiet=True)
    reporter.note("a sentence")
    with reporter.phase("prefill", "tokens") as update:
        clock[0] += 60.0
        update(1, 1)
    with show_stages(pipe, quiet=True) as start_stage:
        start_stage("stage", 1)()
    assert pipe.getvalue() == ""
