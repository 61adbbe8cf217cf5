"""A command line made from a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from index_store.cli.options import SIZE, AtLeast, OneOf, Spelled, check_bounds, comma_separated, configured
from index_store.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Config:
    """Options of every kind."""

    name: Annotated[str, typer.Option(help="Required.")]
    files: Annotated[tuple[str, ...], typer.Option("--file", help="At least one.")]
    more: Annotated[tuple[str, ...], typer.Option(help="Any number.")] = ("as", "told")
    end: Annotated[tuple[str, ...] | None, typer.Option(help="Any number, or nothing said.")] = None
    memory: Annotated[int | None, typer.Option(metavar="SIZE"), SIZE, AtLeast(10)] = None
    lengths: Annotated[tuple[int, ...], typer.Option(), comma_separated("1,2", int)] = (1, 2)
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
        (["--lengths", " 3,,4 "], {"lengths": (3, 4)}),
        (["--lengths", ""], {"lengths": ()}),
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


def test_a_command_has_options_of_its_own() -> None:
    assert invoke(*REQUIRED, "--own")[1] is True


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--name", "a"),
        (*REQUIRED, "--colour", "blue"),
        (*REQUIRED, "--kind", "x"),
        (*REQUIRED, "--threads", "x"),
    ],
)
def test_wrong_usage_is_exit_code_two(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_bounds_name_the_flag() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^--wait-most is -1.0, expected at least 0$"):
        invoke(*REQUIRED, "--wait-most", "-1")
    with pytest.raises(InvalidArgumentError, match=r"^--memory is 9, expected at least 10$"):
        invoke(*REQUIRED, "--memory", "9")
    with pytest.raises(InvalidArgumentError, match="size is 'much', expected"):
        invoke(*REQUIRED, "--memory", "much")


def test_help_shows_what_people_write() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.replace("│", " ").split())
    assert "What the command does." in shown
    for part in (
        "[default: auto]",
        "[default: 1,2]",
        "[default: exact]",
        "[default: 0]",
        "dense|lists",
        "--own",
    ):
        assert part in shown
