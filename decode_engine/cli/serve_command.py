"""The command `serve`. What is slow to import is imported where it is needed."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from decode_engine.cli.logs import LogLevel, logging_to_stderr
from decode_engine.config import ServeConfig
from decode_engine.errors import AddressError
from index_store.cli.options import FormatOption, OutputFormat, configured
from index_store.errors import SparseKVError
from index_store.models.resolve import resolve_model
from index_store.store.catalog import Store

logger = logging.getLogger(__name__)

LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", help="What is logged to standard error: this and what is worse.")
]

if TYPE_CHECKING:
    from decode_engine.rpc.server import DecodeServer

_LOOK_S = 0.05

logger = logging.getLogger(__name__)


@configured(ServeConfig)
def serve(
    config: ServeConfig, log_level: LogLevelOption = LogLevel.INFO, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Serve a store's contexts over gRPC until interrupted.

    SIGINT, SIGTERM or SIGHUP end it in order. It prints the address once requests are taken: a sentence, or with
    --format json one object on one line. Logs go to standard error, as JSON lines with --format json.
    """
    as_json = output is OutputFormat.JSON
    with logging_to_stderr(log_level, as_json):
        try:
            _serve(config, as_json)
        except SparseKVError as error:
            if not as_json:
                raise
            logger.error(error.message, extra={"reason": error.reason})  # as all that programs read there
            raise typer.Exit(1) from None


def _serve(config: ServeConfig, as_json: bool) -> None:
    """Loads, tells the address, and serves until a signal comes."""
    _check_served(config)
    from decode_engine.rpc.server import DecodeServer

    with _signals() as stopping, DecodeServer(config) as server:
        _load(server, stopping)
        _say_serving(config, server.address, as_json)
        stopping.wait()
        server.stop(config.grace)


def _say_serving(config: ServeConfig, address: str, as_json: bool) -> None:
    if as_json:
        ready = {"address": address, "store": str(config.store), "model": config.model}
        typer.echo(json.dumps({"event": "serving", **ready}))
    else:
        typer.echo(f"Serving {config.store} with {config.model} at {address} (Ctrl-C stops)")
    sys.stdout.flush()


def _check_served(config: ServeConfig) -> None:
    """Looks whether store, model and address can be used, before what takes seconds to import is imported.

    Raises StoreError, ModelUnsupportedError or AddressError, as the server itself does later.
    """
    Store(config.store)
    resolve_model(config.model)
    host, _, port = config.listen.rpartition(":")
    try:
        places = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        for family, kind, protocol, _, place in places[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        raise AddressError.of(config.listen) from error


def _load(server: DecodeServer, stopping: threading.Event) -> None:
    """Loads the model on a thread of its own; who is told to stop meanwhile ends the process there and then.

    Loading cannot be interrupted where it compiles, reads or waits for a device. It changes nothing that would be left
    half done.
    """
    errors: list[BaseException] = []

    def load() -> None:
        try:
            server.load()
        except BaseException as error:
            errors.append(error)

    loading = threading.Thread(target=load, name="load", daemon=True)
    loading.start()
    while loading.is_alive() and not stopping.wait(_LOOK_S):
        pass
    if loading.is_alive():
        logger.info("told to stop while the model was being loaded")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if errors:
        raise errors[0]


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
