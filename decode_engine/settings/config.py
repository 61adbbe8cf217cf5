"""What the server is told."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from decode_engine.rpc.door import options as door
from decode_engine.rpc.door.signed_tokens import JwtRules
from decode_engine.settings import command_options as shared
from decode_engine.settings.request_bounds import LONGEST_WAIT_S
from index_store.cli.options import (
    AUTO,
    SIZE,
    Address,
    AtLeast,
    Filled,
    ObjectsOption,
    OneOf,
    OutputFile,
    Spelled,
    StoreBytesOption,
    StoreOption,
    check_bounds,
)
from index_store.cli.quotas import QuotasOption
from index_store.cli.storing_checks import storing_checks
from index_store.errors import InvalidArgumentError
from index_store.family.parents import GROWN_SHARE
from index_store.memory.memory_sizes import parse_size
from index_store.store.catalog import Store
from index_store.store.description.dtypes import KV_DTYPES
from index_store.store.files.reading import available_cores

logger = logging.getLogger(__name__)

MAX_DOORS, MOST_DOORS_UNASKED = 64, 4
MAX_SLOT_SHARE = 64


def _doors(text: str) -> int:
    """How many doors a text means. Raises InvalidArgumentError."""
    if text == AUTO:
        return min(available_cores() // 4, MOST_DOORS_UNASKED)
    if not text.isdecimal():
        raise InvalidArgumentError(f"found {text!r}, expected a number, or {AUTO}")
    return int(text)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`decode-engine serve`: what its flags say, sizes in bytes.

    memory, device_memory: None for their defaults (`devices.memory_budget`). session_memory: None for a share of what
    is free. prompt_chunk: None for the device's default.
    """

    store: StoreOption
    model: shared.ModelOption
    listen: Annotated[str, "Where to listen; port 0 picks a free one.", Address()] = door.DEFAULT_LISTEN
    http_port: Annotated[
        int | None,
        Option(
            "--http-port",
            min=0,
            help="Serve OpenAI's API over HTTP, too, at this port of the same host; 0 picks a free one.",
        ),
        AtLeast(0, 65_535),
    ] = None
    cors_origin: Annotated[
        tuple[str, ...],
        "With --http-port: let pages of this origin, such as https://example.org, ask from browsers; "
        "repeatable.",
        Filled(),
    ] = ()
    doors: Annotated[
        int,
        Option(
            metavar="NUMBER",
            help="Processes that talk to clients, beside one of the engine. Those that end are started again, and no "
            "client's door is another one's. 0: the engine's process does it. auto: one for 4 cores, at most 4.",
        ),
        Spelled(AUTO, _doors),
        AtLeast(0, MAX_DOORS),
    ] = field(default_factory=lambda: _doors(AUTO))
    metrics: Annotated[
        str | None,
        "Answer Prometheus there; port 0 picks a free one. Without it nothing is counted.",
        Address(),
    ] = None
    metrics_alias: Annotated[bool, "With --metrics: under vLLM's names, too, for boards that have those."] = (
        False
    )
    kv_events: Annotated[
        str | None,
        "Publish there over ZeroMQ which contexts are held where, as vLLM does; the next port sends events "
        "again that were missed.",
        Address(),
    ] = None
    kv_events_topic: Annotated[str, "With --kv-events: what subscribers filter by."] = ""
    tls_cert: door.TlsCertOption = None
    tls_key: door.TlsKeyOption = None
    tls_client_ca: door.TlsClientCaOption = None
    tls_names: door.TlsNamesOption = False
    tokens: door.TokensOption = None
    jwt_keys: door.JwtKeysOption = None
    jwt_issuer: door.JwtIssuerOption = ""
    jwt_audience: door.JwtAudienceOption = ""
    jwt_tenant_claim: door.JwtTenantClaimOption = "tenant"
    jwt_rights_claim: door.JwtRightsClaimOption = "rights"
    quotas: QuotasOption = None
    audit_log: Annotated[
        Path | None,
        Option(
            "--audit-log",
            metavar="FILE",
            help="Append a line of JSON for every call: who asked for what, and whether they got it; no texts.",
        ),
        OutputFile(),
    ] = None
    allow_remote: door.AllowRemoteOption = False
    memory: Annotated[
        int | None,
        "Host memory for contexts, for example 8GiB; the least recently used go first, requests wait while "
        "those in use fill it. auto: 8GiB, or beside a GPU half of what is free once the model is loaded.",
        SIZE,
        AtLeast(1),
    ] = None
    device_memory: Annotated[
        int | None,
        "GPU memory for contexts, likewise. auto: half of what is free once the model is loaded.",
        SIZE,
        AtLeast(1),
    ] = None
    placement: shared.PlacementOption = AUTO
    session_memory: Annotated[
        int | None,
        "Memory that requests in progress may come to need together for prompts and answers; others wait. "
        "auto: a quarter of what is free once the model is loaded.",
        SIZE,
        AtLeast(1),
    ] = None
    max_sessions: Annotated[int, "Requests in progress at once.", AtLeast(1, 4096)] = 16
    max_waiting: Annotated[int, "Requests that may wait; more are refused.", AtLeast(0, 65_536)] = 64
    max_client_requests: Annotated[
        int | None,
        Option(
            min=0,
            help="Requests that one client address may have running or waiting. 0: all but a quarter of those that may "
            "wait.",
        ),
        Spelled(0, lambda requests: requests or None),
        AtLeast(1),
    ] = None
    max_connections: Annotated[int, "Connections at once; more are closed.", AtLeast(1)] = 4096
    max_streams: Annotated[int, "Calls at once on one connection; clients hold back more.", AtLeast(1)] = 256
    idle_timeout: Annotated[
        float, "Seconds after which a connection without calls is closed.", AtLeast(1)
    ] = 300.0
    unread_timeout: Annotated[
        float, "Seconds that a client may leave an answer unread; then its work ends.", AtLeast(1)
    ] = 60.0
    prompt_chunk: Annotated[
        int | None,
        "Prompt tokens per step, of all prompts, fewer where a method makes them cost more; answers pause for "
        "that long. 0: 256 on a CPU, 512 on a GPU.",
        Spelled(0, lambda tokens: tokens or None),
        AtLeast(1, 2**20),
    ] = None
    prompts: shared.PromptsOption = shared.Prompts.AUTO
    method: Annotated[
        str,
        "What a request gets that names no method: what takes less time, full attention or its context's own "
        "method, by steps that are timed while there are no requests (auto); always the context's own (context).",
        OneOf(AUTO, "context"),
    ] = AUTO
    audit_share: Annotated[
        float,
        Option(
            "--audit-share",
            metavar="SHARE",
            help="Compare the steps of this share of the answers, such as 0.01, by methods that search with full "
            "attention, which costs as many steps of that; metrics and `explain` tell the KL divergence.",
        ),
        AtLeast(0, 1),
    ] = 0.0
    threads: Annotated[
        int,
        "Threads of searches and matrix products; 0 means all cores.",
        Spelled(0, lambda threads: threads or available_cores()),
        AtLeast(1),
    ] = field(default_factory=available_cores)
    search_threads: Annotated[
        int,
        "Threads that search on the CPU beside a GPU, for contexts of placement host; each takes a core "
        "while a step runs. 0: all cores but two.",
        Spelled(0, lambda threads: threads or shared.search_cores()),
        AtLeast(1),
    ] = field(default_factory=shared.search_cores)
    slot_share: Annotated[
        int,
        "Of contexts in host memory, one row in so many has a slot in GPU memory. Fewer rows are fetched with "
        "more slots: 8 for four and more sessions on one context, 4 for sixteen.",
        AtLeast(1, MAX_SLOT_SHARE),
    ] = 16
    device: shared.DeviceOption = AUTO
    tensor_parallel: Annotated[
        int,
        Option(
            "--tensor-parallel",
            metavar="GPUS",
            help="Divide the model, and the KV heads of contexts, among so many GPUs (on a CPU, processes). Memory is "
            "that of each.",
        ),
        AtLeast(1, 64),
    ] = 1
    weights: shared.WeightsOption = AUTO
    dtype: Annotated[
        str, "Stored dtype of the contexts to serve; auto: the model's.", OneOf(AUTO, *KV_DTYPES)
    ] = AUTO
    warm_up: Annotated[
        bool,
        Option(
            "--warm-up/--no-warm-up",
            help="Prepare what the store's contexts name before requests are taken; without it, when a request first "
            "asks for it, which waits.",
        ),
    ] = True
    grown_share: Annotated[
        float,
        "With --prefill: share of a context's tokens from which on what continues it is made to stand alone; "
        "0: never.",
        AtLeast(0, 1000),
    ] = GROWN_SHARE
    store_bytes: StoreBytesOption = None
    objects: ObjectsOption = None
    fetch_timeout: Annotated[
        float,
        Option(
            metavar="SECONDS",
            help="With --objects: how long a request waits for its context to be fetched. Then it is told how far that "
            "is, and may ask again, or send the text.",
        ),
        AtLeast(0),
    ] = 60.0
    prefill: Annotated[
        bool,
        "Make the contexts that are ordered here, too, in a process of the lowest priority beside the server, "
        "on a CPU, and make the store where there is none. Otherwise `prefill-worker serve` does that.",
    ] = False
    keep_beginnings: Annotated[
        int,
        Option(
            metavar="TOKENS",
            help="Have beginnings of prompts that come again become contexts by themselves, from so many tokens on; "
            "they are made like contexts that are ordered. 0: never.",
        ),
        AtLeast(0),
    ] = 0
    keep_beginnings_after: Annotated[
        int, Option(metavar="REQUESTS", help="With --keep-beginnings: how often one has to come."), AtLeast(2)
    ] = 2
    keep_beginnings_bytes: Annotated[
        int,
        Option(
            metavar="SIZE",
            help="With --keep-beginnings: size of all that were kept; those not used for longest are removed.",
        ),
        Spelled("8GiB", parse_size),
        AtLeast(1),
    ] = 8 * 2**30
    grace: Annotated[float, "Seconds for running requests when told to stop.", AtLeast(0, LONGEST_WAIT_S)] = (
        10.0
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        self._check_door()
        self._check_divided()
        for name, place in (("metrics", self.metrics), ("kv_events", self.kv_events)):
            if place is not None and not (self.allow_remote or door.is_loopback(place)):
                raise InvalidArgumentError(
                    f"--{name.replace('_', '-')} is {place}, which other machines can reach, and there is neither "
                    "encryption nor any token; answer at 127.0.0.1, or add --allow-remote where a network or a proxy "
                    "keeps others out",
                    field=name,
                )
        cores = os.cpu_count() or 1
        for flag, threads in (("--threads", self.threads), ("--search-threads", self.search_threads)):
            if threads > cores:
                raise InvalidArgumentError(
                    f"{flag} is {threads}, expected at most {cores}, the cores of this machine; 0 leaves the number "
                    "to the program"
                )

    def _check_door(self) -> None:
        """Raises InvalidArgumentError for options that do not go together, and for an address that others reach without
        encryption and tokens, unless that is allowed."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgumentError(
                "expected both of --tls-cert and --tls-key, or neither", field="tls_cert"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgumentError(
                "--tls-client-ca is given without --tls-cert and --tls-key, which encryption needs",
                field="tls_client_ca",
            )
        if self.tls_names and self.tls_client_ca is None:
            raise InvalidArgumentError(
                "--tls-names is given without --tls-client-ca, which says whose certificates have names that count",
                field="tls_names",
            )
        if self.jwt_keys is not None and not (self.jwt_issuer and self.jwt_audience):
            raise InvalidArgumentError(
                "--jwt-keys is given without --jwt-issuer and --jwt-audience; without them a token that was made for "
                "another service would open this one",
                field="jwt_keys",
            )
        if self.jwt_keys is not None and self.jwt_keys.startswith("http://"):
            raise InvalidArgumentError(
                f"--jwt-keys is {self.jwt_keys!r}, expected a file or an https address: whoever is in between could "
                "make keys of their own",
                field="jwt_keys",
            )
        if self.unprotected and not (self.allow_remote or door.is_loopback(self.listen)):
            raise InvalidArgumentError(
                f"--listen is {self.listen}, which other machines can reach, and there {self.unprotected}. Listen at "
                "127.0.0.1, give --tls-cert, --tls-key and --tokens, or add --allow-remote where a network or a proxy "
                "keeps others out",
                field="listen",
            )

    @property
    def divided(self) -> bool:
        return self.tensor_parallel > 1

    @property
    def prepares(self) -> bool:
        """Whether methods are prepared before requests: those of a divided model are by the first ones."""
        return self.warm_up and not self.divided

    def _check_divided(self) -> None:
        """Raises InvalidArgumentError for options that a divided model cannot have."""
        if not self.divided:
            return
        for flag, wrong, instead in (
            (
                "--doors",
                self.doors == 0,
                "--doors 1 or more, so that clients are told when a GPU's process ends",
            ),
            ("--placement", self.placement not in (AUTO, "device"), "--placement device"),
            ("--weights", self.weights != AUTO, "--weights auto"),
        ):
            if wrong:
                raise InvalidArgumentError(
                    f"{flag} does not go with --tensor-parallel {self.tensor_parallel}; expected {instead}",
                    field=flag.removeprefix("--"),
                )

    def open_store(self) -> Store:
        """The store, in front of its object store if there is one. Raises StoreError."""
        from index_store.objects.tier import open_store

        create = self.prefill or self.objects is not None
        return open_store(self.store, create, self.objects, self.store_bytes, self.fetch_timeout)

    @property
    def unprotected(self) -> str:
        """What is not protected at the port, as a sentence goes on after "there"; "" where all is."""
        asks = self.tokens is not None or self.jwt_keys is not None or self.tls_names
        if self.tls_cert is None and not asks:
            return (
                "is neither encryption nor any token: who reaches it may read what is sent, and question and delete "
                "every context"
            )
        if self.tls_cert is None:
            return "is no encryption: who listens in may read what is sent, tokens included"
        return "" if asks else "are no tokens: who reaches it may question and delete every context"

    def warn_of_exposure(self) -> None:
        """Says in the log what is not protected, where other machines reach the port."""
        if self.unprotected and not door.is_loopback(self.listen):
            logger.warning("other machines can reach %s, and there %s", self.listen, self.unprotected)

    def jwt_rules(self) -> JwtRules | None:
        """Which JWT are taken; None for none."""
        if self.jwt_keys is None:
            return None
        claims = (self.jwt_tenant_claim, self.jwt_rights_claim)
        return JwtRules(self.jwt_keys, self.jwt_issuer, self.jwt_audience, *claims)

    def certificates(self) -> door.Certificates | None:
        """Those to show, None where nothing is encrypted. Raises CertificateError."""
        return door.Certificates.given(self.tls_cert, self.tls_key, self.tls_client_ca)

    def checks(self) -> Iterator[Callable[[], object]]:
        """What can be looked at before a model is loaded and a port opened; each raises a SparseKVError."""
        from decode_engine.rpc.door.access import TokenFile
        from decode_engine.rpc.door.signed_tokens import SignedTokens

        yield self.certificates
        yield lambda: None if self.tokens is None else TokenFile(self.tokens).read()
        rules = self.jwt_rules()
        yield lambda: None if rules is None or rules.remote else SignedTokens(rules)
        create = self.prefill or self.objects is not None
        yield from storing_checks(self.store, self.objects, self.quotas, create=create)

    @property
    def places(self) -> int:
        """Requests that may be running or waiting at once."""
        return self.max_sessions + self.max_waiting

    def check_devices(self) -> None:
        """Refuses what the devices of this machine cannot do. Imports torch, which doors do without.

        Raises InvalidArgumentError.
        """
        shared.check_device(self.device)
        shared.check_placement(self.placement, self.device, self.device_memory)
        shared.check_prefill(self.prefill, self.device)
        shared.check_weights(self.weights, self.device)
