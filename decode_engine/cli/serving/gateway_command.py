"""The command `gateway`: OpenAI's API over HTTP, in front of a server. What is slow to import is imported later."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated

import typer
from typer import Option

from decode_engine.processes.stopping import stop_signals
from decode_engine.rpc.door.options import (
    DEFAULT_LISTEN,
    AllowRemoteOption,
    ServerOption,
    TlsCertOption,
    TlsClientCaOption,
    TlsKeyOption,
    TokensOption,
    TrustOptions,
    certificates_of,
    check_door,
    warn_of_exposure,
)
from decode_engine.settings.request_bounds import LONGEST_WAIT_S
from index_store.cli.checks import Address, AtLeast, Filled
from index_store.cli.logs import LogLevel, LogLevelOption, logging_to_stderr
from index_store.cli.options import FormatOption, OutputFormat, check_bounds, configured

DEFAULT_HTTP = "127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(TrustOptions):
    """`decode-engine gateway`: where it listens, who may call, and the server behind it."""

    server: ServerOption = DEFAULT_LISTEN
    listen: Annotated[
        str,
        Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 picks a free one."),
        Address(),
    ] = DEFAULT_HTTP
    tls_cert: TlsCertOption = None
    tls_key: TlsKeyOption = None
    tls_client_ca: TlsClientCaOption = None
    tokens: TokensOption = None
    allow_remote: AllowRemoteOption = False
    cors_origin: Annotated[
        tuple[str, ...],
        Option(
            "--cors-origin",
            help="Let pages of this origin, such as https://example.org, ask from browsers; repeatable.",
        ),
        Filled(),
    ] = ()
    grace: Annotated[
        float, Option(help="Seconds for running requests when told to stop."), AtLeast(0, LONGEST_WAIT_S)
    ] = 10.0

    def __post_init__(self) -> None:
        check_bounds(self)
        check_door(self, {"--listen": self.listen})


@configured(GatewayConfig)
def gateway(
    config: GatewayConfig, log_level: LogLevelOption = LogLevel.INFO, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Serve OpenAI's API over HTTP, in front of a server.

    Who asks shows a token of their own, which the server is shown, too. SIGINT, SIGTERM or SIGHUP end it in order.
    """
    from decode_engine.gateway.serving import Gateway
    from decode_engine.rpc.door.rules import Door

    with (
        logging_to_stderr(log_level, output is OutputFormat.JSON),
        stop_signals(config.grace) as stopping,
        Door(config.tokens) as door,
        Gateway(
            config.listen,
            config.server,
            credentials=config.credentials(),
            door=door,
            certificates=certificates_of(config),
            cors_origins=config.cors_origin,
        ) as served,
    ):
        warn_of_exposure(config, config.listen)
        if output is OutputFormat.JSON:
            typer.echo(json.dumps({"event": "serving", "url": served.url, "server": config.server}))
        else:
            typer.echo(f"Serving {config.server} at {served.url} (Ctrl-C stops)")
        sys.stdout.flush()
        stopping.wait()
        served.stop(config.grace)
