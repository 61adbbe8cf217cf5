"""`index-store`: the command's entry point; see `command_line`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from index_store.cli.entry import run_command

if TYPE_CHECKING:
    from typer import Typer


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line: exit code 0 done, 1 an error told in one sentence, 2 wrong usage, 130 interrupted."""
    run_command("index-store", _app, argv)


def _app(word: str) -> Typer:
    from index_store.cli.command_line import app

    return app


if __name__ == "__main__":
    main()
