"""What a cluster is told: the options of `ops/cluster up`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from decode_engine.settings.command_options import ModelOption
from index_store.cli.options import Address, AtLeast, Filled, InputFile, ObjectsOption, StoreOption

MaxSessionsOption = Annotated[int, "Requests in progress at once, of each engine.", AtLeast(1, 4096)]
ListenOption = Annotated[str, "Where front doors answer gRPC.", Address()]
HttpPortOption = Annotated[int, "And HTTP, at the same host.", AtLeast(1, 65535)]
TlsCertOption = Annotated[Path | None, "Encrypt at front doors, with this certificate (PEM).", InputFile()]
TlsKeyOption = Annotated[Path | None, "Its private key (PEM).", InputFile()]
TokenOption = Annotated[
    Path | None,
    Option("--token", metavar="FILE", help="A token with the right admin, where engines ask for tokens."),
    InputFile(),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """`ops/cluster down`, `status`: which cluster."""

    state: Annotated[
        Path,
        Option(
            "--state",
            metavar="DIR",
            help="A folder that says where a cluster of this machine runs, and has its logs.",
        ),
    ] = Path(".cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(StateConfig):
    """`ops/cluster up`: what runs."""

    store: StoreOption
    model: ModelOption
    objects: ObjectsOption = None
    replicas: Annotated[int, "Engines at least.", AtLeast(1, 1000)] = 1
    most_replicas: Annotated[
        int, "Engines at most, where requests wait or memory is full; 0: --replicas.", AtLeast(0, 1000)
    ] = 0
    down_after: Annotated[
        float, "Seconds that fewer engines have to be enough before one ends.", AtLeast(0)
    ] = 120.0
    max_sessions: MaxSessionsOption = 16
    workers: Annotated[int, "Prefill workers.", AtLeast(0, 1000)] = 1
    doors: Annotated[
        int, "Front doors, which share the ports: where one ends, another takes connections.", AtLeast(1, 16)
    ] = 2
    listen: ListenOption = "127.0.0.1:50051"
    http_port: HttpPortOption = 8000
    tls_cert: TlsCertOption = None
    tls_key: TlsKeyOption = None
    engine_config: Annotated[
        Path | None,
        Option("--engine-config", metavar="FILE", help="Further options of `decode-engine serve`, in TOML."),
        InputFile(),
    ] = None
    worker_config: Annotated[
        Path | None,
        Option("--worker-config", metavar="FILE", help="Further options of `prefill-worker serve`, in TOML."),
        InputFile(),
    ] = None
    token: TokenOption = None
    gpus: Annotated[float, "GPUs of each engine.", AtLeast(0, 16)] = 0.0
    cpus: Annotated[float, "Cores that Ray counts for each engine.", AtLeast(0, 1024)] = 0.0
    host: Annotated[
        str, "This machine's address for the cluster's other machines; by default there are none."
    ] = "127.0.0.1"
    grace: Annotated[float, "Seconds that running requests have when an engine ends.", AtLeast(0)] = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """`ops/cluster front`: one front door over engines that run already."""

    engine: Annotated[
        tuple[str, ...],
        Option(
            "--engine",
            metavar="[NAME=]HOST:PORT/HTTP-PORT",
            help="An engine's address for gRPC, and its port for HTTP; repeatable. Its name, which says what it holds, "
            "is engine-0 and on, by its place.",
        ),
        Filled(),
    ] = ()
    one_store: Annotated[bool, "Engines read one store: what one has, all have."] = False
    max_sessions: MaxSessionsOption = 16
    listen: ListenOption = "127.0.0.1:50051"
    http_port: HttpPortOption = 8000
    tls_cert: TlsCertOption = None
    tls_key: TlsKeyOption = None
    token: TokenOption = None
    grace: Annotated[float, "Seconds that running requests have at the end.", AtLeast(0)] = 30.0
