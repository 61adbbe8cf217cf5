"""Services that recordings are played at, each with both doors, over a store of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from decode_engine.core.housekeeping import Housekeeping
from decode_engine.rpc.server import DecodeServer
from decode_engine.settings.config import ServeConfig
from index_store.methods.presets import METHODS
from index_store.models.resolve import resolve_model
from tests.decode_engine.conftest import CALLING, Library, make_library
from tests.support.models import write_model_folder
from tests.support.serving.door_beside import door_beside
from tests.support.serving.front import both_of
from tests.support.serving.service import loaded, wait_until

ABSENT = "0" * 64
READER_TEXT = (
    "The lighthouse of the grey harbour was built in 1848. The access code of the overhead dairy is 4821. "
    "Its keeper counted ships and wrote their names down. "
)

OPEN_TEXT = "The open gate of the white harbour is watched by nobody. " * 6
"""Of a context that is found where a prompt begins with it: all others have a salt."""


@dataclass(frozen=True)
class Service:
    """Both doors of a server. names: of contexts, by which recordings mean them. work: does what is queued."""

    channel: grpc.Channel
    web: httpx.Client
    names: dict[str, str]
    work: Callable[[], None]


Reach = Callable[[DecodeServer, ServeConfig], AbstractContextManager[tuple[str, str]]]
"""Both doors of a server: the address of gRPC and the URL of HTTP."""


@contextmanager
def _reach(
    given: pytest.Config, apart: bool, server: DecodeServer, config: ServeConfig
) -> Iterator[tuple[str, str]]:
    """apart: through a door in a process of its own."""
    if apart:
        with door_beside(server.backend, config) as door:
            yield door.address, door.url
    else:
        with both_of(server, given) as (address, http):
            yield address, http.url


@contextmanager
def _serve(library: Library, names: dict[str, str], reach: Reach, **changes: object) -> Iterator[Service]:
    worker = library.worker(chunk=100)

    def work() -> None:
        while worker.work_once():
            pass

    config = library.config(**changes)
    with (
        loaded(config) as server,
        reach(server, config) as (address, url),
        grpc.insecure_channel(address) as channel,
        httpx.Client(base_url=url, timeout=600) as web,
    ):
        yield Service(channel, web, {"absent": ABSENT, **names}, work)


@contextmanager
def _toy(folder: Path, reach: Reach) -> Iterator[Service]:
    """A model whose template has tools, and contexts of every state."""
    library = make_library(folder, chat_template=CALLING)
    names = {
        "lamp": library.prefill("lamp", method=("csattention", "csattention-paper")),
        "shelf": library.prefill("shelf", method=tuple(METHODS)),
        "open": library.prefill("open", text=OPEN_TEXT, salt=""),
        "damaged": library.prefill("damaged"),
        "unreadable": library.prefill("unreadable"),
        "foreign": library.prefill(
            "foreign", model=write_model_folder(folder / "other", head_dim=32, seed=1)
        ),
        "half": library.prefill("half", dtype="float16"),
    }
    library.damage(names["damaged"])
    (library.store / "contexts" / names["unreadable"] / "manifest.json").write_text("{")
    with _serve(library, names, reach) as service:
        late = service.names["late"] = library.prefill("late", ttl="1s")
        wait_until(lambda: service.web.get(f"/v1/contexts/{late}").json()["state"] == "EXPIRED")
        yield service


@contextmanager
def _plain(folder: Path, reach: Reach) -> Iterator[Service]:
    """A model whose template knows no tools, one session at a time."""
    library = make_library(folder)
    with _serve(library, {"lamp": library.prefill("lamp")}, reach, max_sessions=1, max_waiting=0) as service:
        yield service


@contextmanager
def _reader(folder: Path, reach: Reach) -> Iterator[Service]:
    """The trained model that the package brings."""
    library = Library(resolve_model("reader").path, folder / "store")
    book = library.prefill("book", text=READER_TEXT * 8, method=("refined",))
    with _serve(library, {"book": book}, reach) as service:
        yield service


SERVICES = {"toy": _toy, "plain": _plain, "reader": _reader}


@pytest.fixture(scope="module", autouse=True)
def _untidied() -> Iterator[None]:
    """Servers leave alone what has expired: which requests still find it would depend on time."""
    begun = Housekeeping.__init__

    def begin(self: Housekeeping, *given: Any) -> None:
        begun(self, *given, every_s=86_400.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Housekeeping, "__init__", begin)
        yield


Services = Callable[[str, bool], Service]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Services]:
    """Services by their names and whether their door is apart, each started when it is first asked for."""
    started: dict[tuple[str, bool], Service] = {}
    with ExitStack() as stack:

        def service(name: str, apart: bool) -> Service:
            if (name, apart) not in started:
                folder = tmp_path_factory.mktemp(name)
                started[name, apart] = stack.enter_context(
                    SERVICES[name](folder, partial(_reach, pytestconfig, apart))
                )
            return started[name, apart]

        yield service
