"""A door in a process of its own, as `serve --doors` starts it, in front of the engine of this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

import msgspec

from decode_engine.core.local import LocalCore
from decode_engine.core.service import EngineService
from decode_engine.errors import ShuttingDownError
from decode_engine.orders.events import event_of_error
from decode_engine.processes.attached import Serving, Setup, Stop, setup_line
from decode_engine.processes.link.host import EngineHost
from decode_engine.processes.supervisor import kept_addresses
from decode_engine.rpc.door.access import Sharing
from decode_engine.settings.config import ServeConfig
from index_store.cli.logs import LogLevel

HEAVY = ("torch", "triton", "numba", "llvmlite", "faiss", "zarr")
"""What no door imports, whatever it is asked."""

_DOOR = f"""
import sys
from decode_engine.processes import attached, door_process

def tell(code, end=attached.end_process):
    print("imported:", *(name for name in {HEAVY!r} if sys.modules.get(name) is not None), file=sys.stderr)
    end(code)

attached.end_process = tell
door_process.main()
"""


@dataclass(frozen=True)
class DoorBeside:
    """Its addresses and its process."""

    address: str
    url: str
    pid: int


@contextmanager
def door_beside(service: EngineService, config: ServeConfig) -> Iterator[DoorBeside]:
    """A door for both kinds of clients. Ends it in order, and asserts that nothing of HEAVY was imported there."""
    given = Setup(replace(config, http_port=0, doors=1), Sharing().key, Path(), LogLevel.INFO, True)
    with kept_addresses(given) as setup, TemporaryFile("w+") as log:
        host = EngineHost(setup.link)
        host.open(LocalCore(service))
        door = subprocess.Popen(
            [sys.executable, "-c", _DOOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        try:
            door.stdin.write(setup_line(setup))
            door.stdin.flush()
            msgspec.json.decode(door.stdout.readline(), type=Serving)
            host_name = setup.config.listen.rpartition(":")[0]
            yield DoorBeside(setup.config.listen, f"http://{host_name}:{setup.config.http_port}", door.pid)
            door.stdin.write(msgspec.json.encode(Stop(0.0)) + b"\n")
            door.stdin.flush()
            code = door.wait()
            log.seek(0)
            told = log.read()
            assert code == 0, told
            assert told.splitlines()[-1] == "imported:", told
        finally:
            door.kill()
            door.communicate()
            host.close(event_of_error(ShuttingDownError("the test is over")))
