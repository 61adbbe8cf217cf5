"""One command line: how its help looks, its version, how it ends, and errors as one sentence."""

from __future__ import annotations

import errno
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, NoReturn, cast

import typer
import typer.core

from index_store.errors import InvalidArgumentError, MethodUnsupportedError, SparseKVError

WRONG_USAGE = 2

_ClickError = cast("type[Exception]", typer.BadParameter.__mro__[2])  # which typer itself does not name
_SHOWN_VERSIONS = ("torch", "transformers", "grpcio")


def new_app(help_text: str) -> typer.Typer:
    """A command line without commands."""
    app = new_group(help_text)
    app.callback()(_root)
    return app


def new_group(help_text: str) -> typer.Typer:
    """A group without commands. Its help is plain text that wraps like text, in pipes as on terminals."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


class GroupedCommand(typer.core.TyperCommand):
    """A command whose help has its options under the headings of `configured`, those without one first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            heading = getattr(parameter, "rich_help_panel", None) or usual
            groups.setdefault(heading, []).extend([record] if record else [])
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _print_version(context: typer.Context, asked: bool) -> None:
    if asked:
        libraries = ", ".join(f"{name} {_version_of(name)}" for name in _SHOWN_VERSIONS)
        typer.echo(
            f"{context.info_name} {_version_of('sparsekv')} (Python {platform.python_version()}, {libraries})"
        )
        raise typer.Exit


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _root(
    shown: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show versions of this program and what it uses.",
        ),
    ] = False,
) -> None:
    """Takes the options that stand before a command's name."""


def run_app(app: typer.Typer, name: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and exits: 0, 1 after an error, 2 for wrong usage; both say one sentence on standard error.

    name: of the program, as help and errors show it.
    """
    try:
        arguments = None if argv is None else list(argv)
        code = app(args=arguments, prog_name=name, standalone_mode=False)  # an int after typer.Exit
    except typer.Abort:  # how some versions of typer tell of an interrupt
        raise KeyboardInterrupt from None
    except _ClickError as error:
        _finish_output()
        _fail_usage(error)
    except SystemExit as ended:
        _finish_output()
        sys.exit(ended.code)
    except (InvalidArgumentError, MethodUnsupportedError) as error:
        fail(error.message, WRONG_USAGE)
    except SparseKVError as error:
        fail(error.message)
    except OSError as error:
        _finish_output()
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # the reader has gone, as with `| head`
        full = error.errno == errno.ENOSPC and "standard output or a file cannot be written"
        fail(f"{error.filename or full or 'system'}: {error.strerror or error}")
    _finish_output()
    sys.exit(code if isinstance(code, int) else 0)


def _finish_output() -> None:
    """Writes out what standard output still holds; exits with 1 and a sentence when it cannot, as on a full disk."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes once more when it ends, and would report the same error with a stack trace.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # the reader has gone, as with `| head`
        fail(f"standard output cannot be written: {error.strerror or error}")


def _fail_usage(error: Any) -> NoReturn:
    """Ends with what the command line's parser says, and where help is; with the help itself where nothing was said."""
    code = getattr(error, "exit_code", 1)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(code)
    said = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    hint = f" (`{context.command_path} --help` lists what is possible)" if context is not None else ""
    fail(f"{said[:1].lower()}{said[1:]}{hint}", code)


def fail(message: str, code: int = 1) -> NoReturn:
    """Prints the sentence on standard error and exits."""
    with suppress(OSError):
        typer.echo(f"error: {message}", err=True)
    sys.exit(code)
