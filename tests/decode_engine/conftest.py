"""A toy model, a store with contexts in every state, and a server over them, made once for all tests here."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from decode_engine.settings.config import ServeConfig
from index_store.cli.console import LineReporter
from index_store.methods.presets import METHODS
from index_store.store.catalog import Store
from prefill_worker.config import PrefillConfig, WorkerConfig
from prefill_worker.jobs.job import run_job
from prefill_worker.worker.queue_worker import QueueWorker
from sparsekv.v1 import context_pb2_grpc, generation_pb2_grpc
from tests.support.models import write_model_folder
from tests.support.serving.chat import WITH_TOOLS
from tests.support.serving.front import grpc_of
from tests.support.serving.service import loaded
from tests.support.serving.workers import working
from tests.support.store import flip

TEXT = "The lamp of the grey harbour was lit by a keeper who counted ships. " * 8
MAX_POSITIONS = 4096


@pytest.fixture(scope="session", autouse=True)
def _patient() -> Iterator[None]:
    """Servers and clients that wait for longer: a machine that has much to do is no fault of what a test asks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode_engine.engine.sampling.constraints._TRIAL_S", 60.0)
        patch.setattr("decode_engine.engine.sampling.grammar._MASK_S", 60.0)
        patch.setattr("decode_engine.rpc.client.clients.HEALTH_TIMEOUT_S", 60.0)
        yield


@dataclass(frozen=True)
class Library:
    """A store and the model that its contexts belong to."""

    model: Path
    store: Path

    def prefill(
        self,
        name: str,
        *,
        text: str = TEXT,
        model: Path | None = None,
        method: tuple[str, ...] = ("csattention",),
        index: tuple[str, ...] = (),
        ttl: str | None = None,
        dtype: str = "auto",
        salt: str | None = None,
        tenant: str = "",
    ) -> str:
        """Stores a context of that display name, distinct from all others, and returns its id."""
        document = self.store.parent / f"{name}.txt"
        document.write_text(text)
        config = PrefillConfig(
            model=str(model or self.model),
            store=self.store,
            input=(document,),
            name=name,
            method=method,
            index=index,
            dense_layers="0",
            ttl=ttl,
            dtype=dtype,
            salt=name if salt is None else salt,
            device="cpu",
            tenant=tenant,
        )
        return run_job(config, LineReporter(io.StringIO())).manifest.id

    def chunk(self, id_: str, array: str = "kv") -> Path:
        """A chunk file of a stored context."""
        files = (self.store / "contexts" / id_ / array / "c").rglob("*")
        return next(path for path in sorted(files) if path.is_file())

    def damage(self, id_: str) -> None:
        """Flips a bit of a stored context's keys and values."""
        flip(self.chunk(id_), 100)

    def worker(self, **options: Any) -> QueueWorker:
        """One that makes contexts in this store; it works when a test tells it to, or inside of `working`."""
        return QueueWorker(WorkerConfig(store=self.store, model=str(self.model), device="cpu", **options))

    def config(self, **changes: object) -> ServeConfig:
        """A server over this store on a free port, which is not warmed up: that takes seconds for all methods."""
        settings: dict[str, object] = {
            "store": self.store,
            "model": str(self.model),
            "listen": "127.0.0.1:0",
            "memory": 2**28,
            "max_sessions": 16,
            "max_waiting": 8,
            "prompt_chunk": 64,
            "threads": 2,
            "device": "cpu",
            "method": "context",
            "warm_up": False,
        }
        return ServeConfig(**{**settings, **changes})  # type: ignore[arg-type]


def make_library(folder: Path, **tokenizer: str) -> Library:
    """A library with an empty store and a toy model that never ends by itself, so that lengths are known.

    tokenizer: settings of its tokenizer, such as another `chat_template`.
    """
    model = write_model_folder(
        folder / "model", "llama", head_dim=32, max_positions=MAX_POSITIONS, eos_token_id=None
    )
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, **tokenizer}))
    Store(folder / "store", create=True)
    return Library(model, folder / "store")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="session")
def lamp(library: Library) -> str:
    """The resource name of a context with the indexes of both searching methods."""
    return "contexts/" + library.prefill("lamp", method=("csattention", "csattention-paper"))


@pytest.fixture(scope="session")
def shelf(library: Library) -> str:
    """The resource name of a context with the indexes of all methods."""
    return "contexts/" + library.prefill("shelf", method=tuple(METHODS))


@pytest.fixture(scope="session")
def server(library: Library, lamp: str) -> Iterator[DecodeServer]:
    with loaded(library.config(warm_up=True)) as started:
        yield started


@pytest.fixture
def client(server: DecodeServer, pytestconfig: pytest.Config) -> Iterator[Client]:
    with grpc_of(server, pytestconfig) as address, Client(address) as connected:
        yield connected


CALLING = WITH_TOOLS.replace("<tool_call>", "~~~").replace("</tool_call>", "~~~")
"""A template with tools, whose calls begin with a mark that a bias has the toy model say."""


@pytest.fixture(scope="session")
def tool_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """An empty store, and a toy model whose chat template has tools."""
    return make_library(tmp_path_factory.mktemp("tools"), chat_template=CALLING)


@pytest.fixture(scope="session")
def tool_server(tool_library: Library) -> Iterator[DecodeServer]:
    """A server beside a worker that makes contexts."""
    with loaded(tool_library.config()) as started, working(tool_library.worker()):
        yield started


@dataclass(frozen=True)
class Stubs:
    """The generated stubs, for what the client does not let through."""

    channel: grpc.Channel
    contexts: context_pb2_grpc.ContextServiceStub
    generations: generation_pb2_grpc.GenerationServiceStub


@pytest.fixture
def stubs(server: DecodeServer, pytestconfig: pytest.Config) -> Iterator[Stubs]:
    with grpc_of(server, pytestconfig) as address, grpc.insecure_channel(address) as channel:
        yield Stubs(
            channel,
            context_pb2_grpc.ContextServiceStub(channel),  # type: ignore[no-untyped-call]
            generation_pb2_grpc.GenerationServiceStub(channel),  # type: ignore[no-untyped-call]
        )
