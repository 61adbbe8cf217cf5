"""A store, a server on it, and a worker that works when a test tells it to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from prefill_worker.config import WorkerConfig
from prefill_worker.worker.queue_worker import QueueWorker
from tests.decode_engine.conftest import Library, make_library
from tests.support.serving.service import loaded
from tests.support.serving.workers import working

WORDS = "The keeper of the {} lighthouse counted ships and wrote them down. "


def document(name: str, times: int = 6) -> str:
    """A text that no other test has."""
    return WORDS.format(name) * times


def names(client: Client) -> set[str]:
    return {context.name for context in client.list_contexts()}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A store of this module alone, with a toy model."""
    library = make_library(tmp_path_factory.mktemp("shop"))
    library.prefill("first")  # makes the store
    return library


@pytest.fixture(scope="module")
def server(shop: Library) -> Iterator[DecodeServer]:
    with loaded(shop.config()) as started:
        yield started


def make_worker(shop: Library, chunk: int = 100) -> QueueWorker:
    return QueueWorker(WorkerConfig(store=shop.store, model=str(shop.model), chunk=chunk, device="cpu"))


@pytest.fixture(scope="module")
def worker(shop: Library) -> QueueWorker:
    """A worker that works when a test tells it to."""
    return make_worker(shop)


@pytest.fixture(name="working")
def _working(worker: QueueWorker) -> Iterator[None]:
    """The worker works beside the test."""
    with working(worker):
        yield
