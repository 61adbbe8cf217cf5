"""The options of a command that runs for long, by flags, variables and a file: one schema, which is that of the flags.

`--config FILE` names a file in TOML, whose keys are the flags without their dashes in front. A variable
`SPARSEKV_<OPTION>` counts before the file, and a flag before both. `--check-config` looks at all that can be judged
without a model, a port or a device, says what would be used and where it comes from, and ends.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import copy
from difflib import get_close_matches
from enum import Enum
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer
from typer.models import ParameterInfo

from index_store.cli.console import print_json
from index_store.errors import InvalidArgumentError

PREFIX = "SPARSEKV_"
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "variable", "DEFAULT_MAP": "file"}
_OWN = ("config", "check-config", "help")
_LARGEST = 1 << 20


def with_sources(parameters: Sequence[Parameter]) -> list[Parameter]:
    """A command's parameters, each with its variable, and those by which a file is named and checked."""
    own = (("context", typer.Context), ("config", _FileOption), ("check_config", _CheckOption))
    defaults = {"config": None, "check_config": False}
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=defaults.get(name, Parameter.empty))
        for name, kind in own
    ]
    return [*(_with_variable(each) for each in parameters), *added]


def _with_variable(parameter: Parameter) -> Parameter:
    kind, *marks = get_args(parameter.annotation)
    (info,) = (copy(mark) for mark in marks if isinstance(mark, ParameterInfo))
    if info.envvar is None:
        said = (info.default, *(info.param_decls or ()))
        flags = [each for each in said if isinstance(each, str) and each.startswith("--")]
        name = flags[0].partition("/")[0].removeprefix("--") if flags else parameter.name
        info.envvar, info.show_envvar = PREFIX + name.replace("-", "_").upper(), False
    return parameter.replace(annotation=Annotated.__class_getitem__((kind, info)))  # type: ignore[attr-defined]


def _options(context: typer.Context) -> dict[str, Any]:
    """The parser's options by their names in a file."""
    told = [parameter for parameter in context.command.params if parameter.expose_value]
    named = {max(parameter.opts, key=len).removeprefix("--"): parameter for parameter in told}
    return {name: parameter for name, parameter in named.items() if name not in _OWN}


def _take_file(context: typer.Context, path: Path | None) -> Path | None:
    """Has what a file says stand for defaults. Raises InvalidArgumentError, which names file and key."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            said = tomllib.loads(file.read(_LARGEST))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgumentError(
            f"--config is {str(path)!r}, which cannot be used ({error}); expected a file in TOML"
        ) from error
    options, values = _options(context), {}
    for key, value in said.items():
        name = key.replace("_", "-")
        if name not in options:
            near = get_close_matches(name, options, 1, 0.0)
            raise InvalidArgumentError(
                f"{path} has {key[:100]!r}, which is no option; the nearest is {near[0]!r}, and `--help` lists all"
            )
        if options[name].name in values:
            raise InvalidArgumentError(
                f"{path} has {name!r} twice, with dashes and without; expected it once"
            )
        values[options[name].name] = _value(options[name], value, f"{path}: {key}")
    context.default_map = values
    return path


def _value(option: Any, value: object, where: str) -> object:
    """What the parser reads, of the types that a file has."""
    if option.is_flag:
        fits, expected = isinstance(value, bool), "true or false"
    elif option.multiple:
        fits = isinstance(value, list) and all(isinstance(each, str | int | float) for each in value)
        value, expected = (
            [str(each) for each in value] if isinstance(value, list) else value,
            "a list of texts",
        )
    else:
        fits = isinstance(value, str | int | float) and not isinstance(value, bool)
        value, expected = str(value), "a text or a number"
    if not fits:
        raise InvalidArgumentError(f"{where} is {str(value)[:100]}, expected {expected}")
    return value


_FileOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar=f"{PREFIX}CONFIG",
        metavar="FILE",
        is_eager=True,
        callback=_take_file,
        help="Options in TOML, by their names here, such as `http-port = 8000`. Variables count before it "
        f"({PREFIX}HTTP_PORT), flags before both.",
    ),
]
_CheckOption = Annotated[
    bool,
    typer.Option(
        "--check-config",
        help="Look at all that can be judged without a model, port or device, say what would be used and where it "
        "comes from, and end: with 2 where something is wrong.",
    ),
]


def by_source(context: typer.Context, message: str) -> str:
    """What is said of options, each by the file and key, or the variable, that it comes from."""
    for name, option in _options(context).items():
        source = getattr(context.get_parameter_source(option.name), "name", "")
        said = {"ENVIRONMENT": option.envvar, "DEFAULT_MAP": f"{context.params['config']}: {name}"}.get(
            source
        )
        if said is not None:
            message = re.sub(rf"(?<![\w-])--{re.escape(name)}(?![\w-])", lambda _, by=said: by, message)  # type: ignore[misc]
    return message


def tell(context: typer.Context, values: Mapping[str, Any], problems: Sequence[str]) -> NoReturn:
    """Says what would be used, and what is wrong with it, and ends the command. values: of its options, as read."""
    rows = []
    for name, option in _options(context).items():
        source = context.get_parameter_source(option.name)
        rows.append((name, _plain(values[option.name]), _SOURCES.get(getattr(source, "name", ""), "default")))
    known = {option.envvar for option in _options(context).values()} | {f"{PREFIX}CONFIG"}
    others = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    if str(_plain(values.get("output"))) == "json":
        options = {name: {"value": value, "from": where} for name, value, where in rows}
        found = {"ok": not problems, "options": options, "problems": list(problems)}
        print_json({**found, "other_variables": others})
    else:
        width = max(len(name) for name, _, _ in rows)
        for name, value, where in rows:
            shown = value if isinstance(value, str) else "-" if value is None else json.dumps(value)
            typer.echo(f"{name:<{width}}  {where:<8}  {shown or '-'}")
        for name in others:
            typer.echo(f"{name} is of other commands, or of none", err=True)
        for problem in problems:
            typer.echo(f"error: {problem}", err=True)
    raise typer.Exit(2 if problems else 0)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
