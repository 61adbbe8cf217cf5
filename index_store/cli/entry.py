"""Where the commands begin: signals end them in order from the first moment on, before anything slow is imported."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # what shells report for Ctrl-C


def run_command(module: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the typer application `app` of a module and exits, as `index_store.cli.console.run_app` does.

    An interrupt exits with 130, a termination request or a closed terminal with 128 and the signal's number, after
    all clean-ups. `argv`: arguments; the process's own by default.
    """
    try:
        end_in_order()
        app = import_module(module).app
        from index_store.cli.console import run_app

        run_app(app, argv)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def end_in_order() -> None:
    """Lets SIGTERM and SIGHUP (the terminal was closed) leave through the clean-ups that an interrupt goes through."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
