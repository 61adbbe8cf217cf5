"""Options by file, variable and flag: which counts, what is refused, and what `--check-config` tells."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from index_store.cli.options import SIZE, AtLeast, FormatOption, OneOf, OutputFormat, check_bounds, configured
from index_store.errors import InvalidArgumentError, StoreError


@dataclass(frozen=True, slots=True)
class Config:
    """Options of every kind."""

    store: Annotated[Path, typer.Option("--store", envvar="SPARSEKV_STORE")]
    most_calls: Annotated[int, typer.Option(), AtLeast(1)] = 16
    share: Annotated[float, typer.Option("--audit-share"), AtLeast(0, 1)] = 0.0
    memory: Annotated[int | None, typer.Option(metavar="SIZE"), SIZE, AtLeast(10)] = None
    origins: Annotated[tuple[str, ...], typer.Option("--origin")] = ()
    warm_up: Annotated[bool, typer.Option("--warm-up/--no-warm-up")] = True
    kind: Annotated[str, typer.Option(), OneOf("exact", "muse")] = "exact"

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.most_calls == 13:
            raise InvalidArgumentError("--most-calls is 13, expected a luckier number")

    def checks(self) -> Iterator[Callable[[], object]]:
        """As commands have them."""

        def look() -> None:
            if self.store.name == "gone":
                raise StoreError("no store here")

        yield look
        yield look


app = typer.Typer()
told: list[Config] = []


@app.command()
@configured(Config, by_file=True)
def run(config: Config, output: FormatOption = OutputFormat.TEXT) -> None:
    """What the command does."""
    told.append(config)


def invoke(*arguments: str, variables: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, arguments, env=variables, catch_exceptions=True)


def made(*arguments: str, variables: dict[str, str] | None = None) -> Config:
    done = invoke(*arguments, variables=variables)
    if done.exception is not None:
        raise done.exception
    return told.pop()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text(
        f'store = "{tmp_path}"\nmost-calls = 4\naudit_share = 0.5\nmemory = "1KiB"\norigin = ["a", "b"]\n'
        'warm-up = false\nkind = "muse"\n'
    )
    return path


def test_flags_count_before_variables_before_the_file_before_defaults(file: Path) -> None:
    whole = Config(file.parent, 4, 0.5, 1024, ("a", "b"), False, "muse")
    assert made("--config", str(file)) == whole
    assert made(variables={"SPARSEKV_CONFIG": str(file)}) == whole
    others = {"SPARSEKV_MOST_CALLS": "5", "SPARSEKV_ORIGIN": "c d", "SPARSEKV_WARM_UP": "true"}
    read = made("--config", str(file), "--most-calls", "6", variables=others)
    assert read == Config(file.parent, 6, 0.5, 1024, ("c", "d"), True, "muse")
    assert made("--store", "x", variables={"SPARSEKV_AUDIT_SHARE": "1"}) == Config(Path("x"), share=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("most-cals = 3", r"serve.toml has 'most-cals', which is no option; the nearest is 'most-calls'"),
        ("config = 'x'", "has 'config', which is no option"),
        ("most-calls = 3\nmost_calls = 4", "has 'most-calls' twice"),
        ("most-calls = true", r"serve.toml: most-calls is True, expected a text or a number"),
        ("warm-up = 1", "warm-up is 1, expected true or false"),
        ("origin = 'a'", "origin is a, expected a list of texts"),
        ("[store]\npath = 'x'", "store is .*, expected a text or a number"),
        ("most-calls = ", r"serve.toml', which cannot be used .*; expected a file in TOML"),
        ("audit-share = 2", r"serve.toml: audit-share is 2.0, expected 0 to 1"),
        ("kind = 'other'", r"serve.toml: kind is 'other', expected exact or muse"),
        ("memory = 'much'", r"serve.toml: memory: size is 'much'"),
        ("most-calls = 13", r"serve.toml: most-calls is 13, expected a luckier number"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(f"{text}\n" if "store" in text else f"store = 'x'\n{text}\n")
    with pytest.raises(InvalidArgumentError, match=message):
        made("--config", str(path))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AUDIT_SHARE", "2", "SPARSEKV_AUDIT_SHARE is 2.0, expected 0 to 1"),
        ("KIND", "other", "SPARSEKV_KIND is 'other', expected exact or muse"),
        ("MEMORY", "much", "SPARSEKV_MEMORY: size is 'much'"),
        ("MOST_CALLS", "13", "SPARSEKV_MOST_CALLS is 13, expected a luckier number"),
    ],
)
def test_what_is_wrong_in_a_variable_is_named(name: str, value: str, message: str) -> None:
    """Also beside a file; and a flag is named as a flag."""
    variables = {f"SPARSEKV_{name}": value}
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        made("--store", "x", variables=variables)
    _, found = checked("--store", "x", variables=variables)
    assert any(each.startswith(message) for each in found["problems"])
    flag = f"--{name.lower().replace('_', '-')}"
    with pytest.raises(InvalidArgumentError, match=f"^{message.replace(f'SPARSEKV_{name}', flag)}"):
        made("--store", "x", flag, value, variables=variables)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"none.toml', which cannot be used"):
        made("--config", str(tmp_path / "none.toml"))


def checked(*arguments: str, variables: dict[str, str] | None = None) -> tuple[int, Any]:
    done = invoke(*arguments, "--check-config", "--format", "json", variables=variables)
    return done.exit_code, json.loads(done.stdout)


def test_a_check_says_what_would_be_used_and_from_where(file: Path) -> None:
    variables = {"SPARSEKV_ORIGIN": "c", "SPARSEKV_STRAY": "1"}
    code, found = checked("--config", str(file), "--most-calls", "6", variables=variables)
    assert (code, found["ok"], found["problems"]) == (0, True, [])
    assert {name: tuple(each.values()) for name, each in found["options"].items()} == {
        "store": (str(file.parent), "file"),
        "most-calls": (6, "flag"),
        "audit-share": (0.5, "file"),
        "memory": ("1KiB", "file"),
        "origin": (["c"], "variable"),
        "warm-up": (False, "file"),
        "kind": ("muse", "file"),
        "format": ("json", "flag"),
    }
    assert "SPARSEKV_STRAY" in found["other_variables"]
    assert not {"SPARSEKV_ORIGIN", "SPARSEKV_CONFIG"}.intersection(found["other_variables"])
    assert told == []
    text = invoke("--config", str(file), "--check-config").stdout
    assert "most-calls   file      4\n" in text
    assert "warm-up      file      false\n" in text


def test_a_check_names_all_that_is_wrong_and_ends_with_two() -> None:
    bad = ("--most-calls", "0", "--audit-share", "7", "--kind", "other", "--memory", "much")
    code, found = checked("--store", "x", *bad)
    assert (code, found["ok"], len(found["problems"])) == (2, False, 4)
    code, found = checked("--store", "x", "--most-calls", "13")
    assert (code, found["problems"]) == (2, ["--most-calls is 13, expected a luckier number"])
    code, found = checked("--store", "gone")
    assert (code, found["problems"]) == (2, ["no store here"] * 2)
    done = invoke("--store", "gone", "--check-config")
    assert (done.exit_code, done.stderr) == (2, "error: no store here\n" * 2)
