"""A server with tokens of two tenants, one of whom has contexts, and what each may send by both doors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import grpc
import httpx
import pytest
from google.longrunning import operations_pb2_grpc

from decode_engine.rpc.client import Client, Credentials
from decode_engine.rpc.door.access import TokenFile
from decode_engine.rpc.server import DecodeServer
from sparsekv.v1 import context_pb2_grpc, generation_pb2_grpc
from tests.decode_engine.conftest import TEXT, Library, make_library
from tests.support.serving.front import both_of
from tests.support.serving.service import loaded

RIGHTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "acme": ("acme", ()),
    "beta": ("beta", ()),
    "reader": ("beta", ("read",)),
    "creator": ("beta", ("read", "create")),
    "ops": ("ops", ("read", "create", "delete", "admin")),
}
"""Tenant and rights of each token, by its name."""


@dataclass
class Party:
    """Who shows a token, at both doors."""

    name: str
    secret: str
    address: str
    url: str
    _channels: list[grpc.Channel] = field(default_factory=list)

    @cached_property
    def client(self) -> Client:
        return Client(self.address, credentials=Credentials(self.secret))

    @cached_property
    def web(self) -> httpx.Client:
        shown = {"authorization": f"Bearer {self.secret}"}
        return httpx.Client(base_url=self.url, headers=shown, timeout=300)

    @cached_property
    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address)

    @property
    def shown(self) -> tuple[tuple[str, str], ...]:
        """Metadata of its calls."""
        return (("authorization", f"Bearer {self.secret}"),)

    @cached_property
    def contexts(self) -> context_pb2_grpc.ContextServiceStub:
        return context_pb2_grpc.ContextServiceStub(self.channel)  # type: ignore[no-untyped-call]

    @cached_property
    def generations(self) -> generation_pb2_grpc.GenerationServiceStub:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)  # type: ignore[no-untyped-call]

    @cached_property
    def operations(self) -> operations_pb2_grpc.OperationsStub:
        return operations_pb2_grpc.OperationsStub(self.channel)

    def close(self) -> None:
        for name in ("client", "web", "channel"):
            if name in self.__dict__:
                getattr(self, name).close()


@dataclass(frozen=True)
class House:
    """The server. secret: id of a context of acme's, which is called so. granted: of one that beta may read."""

    server: DecodeServer
    library: Library
    audit: Path
    secret: str
    granted: str
    parties: Mapping[str, Party]

    def __getitem__(self, name: str) -> Party:
        return self.parties[name]


@pytest.fixture(scope="package")
def house(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[House]:
    library = make_library(tmp_path_factory.mktemp("house"))
    secret = library.prefill("secret", salt="", tenant="acme")
    granted = library.prefill("granted", text=TEXT * 2, salt="", tenant="acme")
    folder = library.store.parent
    tokens, audit = TokenFile(folder / "tokens"), folder / "audit.jsonl"
    secrets = {name: tokens.create(name, *given) for name, given in RIGHTS.items()}
    config = library.config(tokens=folder / "tokens", audit_log=audit)
    with loaded(config) as server, both_of(server, pytestconfig) as (address, gateway):
        parties = {name: Party(name, each, address, gateway.url) for name, each in secrets.items()}
        parties["acme"].client.update_context(f"contexts/{granted}", readers=["beta"])
        yield House(server, library, audit, secret, granted, parties)
        for party in parties.values():
            party.close()
