"""The command `serve`. What is slow to import is imported where it is needed."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from decode_engine.config import ServeConfig
from index_store.cli.options import FormatOption, OutputFormat, configured


@configured(ServeConfig)
def serve(config: ServeConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """Serve a store's contexts over gRPC until interrupted (SIGINT, SIGTERM or SIGHUP).

    Prints the address once requests are taken: a sentence, or with --format json one object on one line. Logs go to
    standard error, as JSON lines with --format json.
    """
    from decode_engine.cli.logs import logging_to_stderr
    from decode_engine.rpc.server import DecodeServer

    as_json = output is OutputFormat.JSON
    with logging_to_stderr(as_json), _signals() as stopping, DecodeServer(config) as server:
        server.load()
        if as_json:
            ready = {"address": server.address, "store": str(config.store), "model": config.model}
            typer.echo(json.dumps({"event": "serving", **ready}))
        else:
            typer.echo(f"Serving {config.store} with {config.model} at {server.address} (Ctrl-C stops)")
        sys.stdout.flush()
        stopping.wait()
        server.stop(config.grace)


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second one ends the process at once."""
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()
        signal.signal(number, signal.SIG_DFL)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
