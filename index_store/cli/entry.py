"""Where the commands begin: signals end them in order from the first moment on, before anything slow is imported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from typer import Typer

INTERRUPTED = 130  # what shells report for Ctrl-C
_AGAIN_S = 0.1


def run_command(name: str, make_app: Callable[[str], Typer], argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line under a program's name and exits as `index_store.cli.app` says.

    make_app: imports and makes it, and is told the first word of what was typed, "" without.

    An interrupt exits with 130, a termination request or a closed terminal with 128 and the signal's number, after
    all clean-ups. `argv`: arguments; the process's own by default.
    """
    try:
        _open_what_is_closed()
        end_in_order()
        app = make_app(next(iter(sys.argv[1:] if argv is None else argv), ""))
        from index_store.cli.app import run_app

        run_app(app, name, argv)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _open_what_is_closed() -> None:
    """Gives a process that was started without some of its standard streams (`>&-`) empty ones."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  as long as the process


def end_in_order() -> None:
    """Lets SIGTERM and SIGHUP (the terminal was closed) leave through the clean-ups that an interrupt goes through."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _exit)
    sys.unraisablehook = _exit_again


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _exit_again(unraisable: sys.UnraisableHookArgs) -> None:
    """An exit that began in a finalizer or a callback, where Python drops it, begins once more a moment later."""
    error = unraisable.exc_value
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)
