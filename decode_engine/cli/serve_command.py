"""The command `serve`. What is slow to import is imported where it is needed."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from decode_engine.errors import AddressError
from decode_engine.processes.attached import end_process, stop_signals
from decode_engine.settings.config import ServeConfig
from index_store.cli.logs import LogLevel, LogLevelOption, logging_to_stderr
from index_store.cli.options import FormatOption, OutputFormat, configured
from index_store.errors import SparseKVError
from index_store.models.resolve import resolve_model

if TYPE_CHECKING:
    from decode_engine.rpc.contexts.own_worker import OwnWorker
    from decode_engine.rpc.server import DecodeServer
    from decode_engine.rpc.transport.starting import Phase

_LOOK_S = 0.05

logger = logging.getLogger(__name__)


GROUPS = {
    "Network": "listen http_port doors tls_cert tls_key tls_client_ca tokens quotas allow_remote max_connections "
    "max_streams idle_timeout unread_timeout",
    "Requests": "max_sessions max_waiting max_client_requests prompt_chunk prompts method audit_share grace",
    "Memory": "memory device_memory session_memory placement slot_share",
    "Computing": "device tensor_parallel threads search_threads weights dtype warm_up",
    "Making contexts": "prefill grown_share keep_beginnings keep_beginnings_after keep_beginnings_bytes",
    "Storing contexts": "store_bytes objects fetch_timeout",
}


@configured(ServeConfig, GROUPS, by_file=True)
def serve(
    config: ServeConfig, log_level: LogLevelOption = LogLevel.INFO, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Serve a store's contexts over gRPC until interrupted.

    SIGINT, SIGTERM or SIGHUP end it in order. Its ports answer at once, and say that it is starting; it prints the
    address once requests are taken: a sentence, or with --format json one object on one line. Logs go to standard
    error, as JSON lines with --format json.
    """
    as_json = output is OutputFormat.JSON
    config.check_devices()
    with logging_to_stderr(log_level, as_json):
        try:
            config = _check_served(config)
            if config.doors:
                _supervise(config, log_level, as_json)
            else:
                _serve(config, as_json)
        except SparseKVError as error:
            if not as_json:
                raise
            logger.error(error.message, extra={"reason": error.reason})  # as all that programs read there
            raise typer.Exit(1) from None


def _serve(config: ServeConfig, as_json: bool) -> None:
    """Binds the ports, loads, tells the address, and serves until a signal comes."""
    with stop_signals(config.grace) as stopping, ExitStack() as stack:
        from decode_engine.rpc.server import DecodeServer

        server = stack.enter_context(DecodeServer(config, log_json=as_json, on_drain=stopping.begin))
        url = None
        if config.http_port is not None:
            from decode_engine.gateway.serving import http_door

            gateway = stack.enter_context(http_door(config, server.grpc))
            url = None if gateway is None else gateway.url
        places = server.address if url is None else f"{server.address} and {url}"
        with _told(server.phase, places, as_json):
            served = _load(server, stopping)
        if served:
            _say_serving(config, server.address, url, as_json)
            stopping.wait()
            logger.info("draining, waiting up to %.3g s for running requests", stopping.left_s)
            server.drain(stopping)
        server.stop(0.0)
    end_process(0)


def _supervise(config: ServeConfig, log_level: LogLevel, as_json: bool) -> None:
    """The same, by an engine and doors in processes of their own."""
    from decode_engine.processes.attached import Setup
    from decode_engine.processes.supervisor import Supervisor, kept_addresses
    from decode_engine.rpc.door.access import Sharing
    from decode_engine.rpc.server import start_worker
    from decode_engine.rpc.transport.starting import Phase
    from index_store.jobs.job_queue import JobQueue

    config.warn_of_exposure()
    setup = Setup(config, Sharing().key, Path(), log_level, as_json)
    with stop_signals(config.grace) as stopping, kept_addresses(setup) as kept, ExitStack() as until_served:
        address, port = kept.config.listen, kept.config.http_port
        scheme = "http" if config.tls_cert is None else "https"
        url = None if port is None else f"{scheme}://{address.rpartition(':')[0]}:{port}"
        phase = Phase()
        until_served.enter_context(_told(phase, address if url is None else f"{address} and {url}", as_json))
        workers: list[OwnWorker] = []

        def note_serving(fingerprint: str) -> None:
            until_served.close()
            if config.prefill:
                workers.append(start_worker(config, as_json, JobQueue(config.store), fingerprint))
            _say_serving(config, address, url, as_json)

        def note_phase(text: str) -> None:
            what, _, how_far = text.partition(": ")
            phase.say(what, how_far)

        asyncio.run(Supervisor(kept, note_phase, note_serving).run(stopping))
        for worker in workers:
            worker.stop()
    end_process(0)


def _say_serving(config: ServeConfig, address: str, url: str | None, as_json: bool) -> None:
    if as_json:
        ready = {"address": address, "store": str(config.store), "model": config.model}
        places = {
            "url": url,
            "metrics": None if config.metrics is None else f"http://{config.metrics}/metrics",
        }
        ready |= {name: place for name, place in places.items() if place is not None}
        typer.echo(json.dumps({"event": "serving", **ready}))
    else:
        told = address if url is None else f"{address} and {url}"
        typer.echo(f"Serving {config.store} with {config.model} at {told} (Ctrl-C stops)")
    sys.stdout.flush()


def _check_served(config: ServeConfig) -> ServeConfig:
    """Looks whether store, model and addresses can be used, before what takes seconds to import is imported.

    Returns the configuration with a port for metrics where one was to be found. Raises StoreError,
    ModelUnsupportedError or AddressError, as the server itself does later.
    """
    store = config.open_store()
    if config.prefill:
        store.folders.check_writable()
    if config.objects is not None:
        from index_store.objects.tier import Tier

        _ = Tier.of(store).bucket  # refuses a URL that is none
    resolve_model(config.model)
    _probe(config.listen, "--listen")
    return config if config.metrics is None else replace(config, metrics=_probe(config.metrics, "--metrics"))


def _probe(address: str, flag: str) -> str:
    """The address, with a free port in place of 0. Raises AddressError where nobody can listen there."""
    host, _, port = address.rpartition(":")
    try:
        (family, kind, protocol, _, place), *_ = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            return f"{host}:{probe.getsockname()[1]}"
    except OSError as error:
        raise AddressError.of(address, flag) from error


def _load(server: DecodeServer, stopping: threading.Event) -> bool:
    """Loads the model on a thread of its own; False where it is told to stop meanwhile.

    Loading cannot be interrupted where it compiles, reads or waits for a device. It changes nothing that would be left
    half done, so it is left behind.
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
        logger.info("told to stop while it was starting (%s)", server.phase.text)
        return False
    if errors:
        raise errors[0]
    return True


@contextmanager
def _told(phase: Phase, places: str, as_json: bool) -> Iterator[None]:
    """Inside, phases of the start are told: in a line of a terminal, or else as log lines."""
    if as_json or not sys.stderr.isatty():
        logger.info("starting at %s", places)
        phase.listen(lambda text: logger.info("starting: %s", text))
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"Starting at {places}") as line:
        phase.listen(lambda text: line.update(f"Starting: {text}"), always=True)
        yield
