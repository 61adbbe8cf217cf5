"""`ops/cluster`: starts Ray and the application on this machine, says how they are, and ends them.

One process watches Ray's head and begins all of it anew where that ends. On one machine everything listens on loopback,
and Ray's own ports ask for a token of this cluster's.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from decode_engine.processes.cluster.cluster_config import ClusterConfig, FrontConfig, StateConfig
from index_store.cli.app import new_app
from index_store.cli.entry import run_command
from index_store.cli.options import configured
from index_store.errors import InvalidArgumentError, SparseKVError

app = new_app("Run engines, prefill workers and front doors on Ray.")

_LOOPBACK = "127.0.0.1"
_START_S = 900.0
_LOOK_S = 0.2
_AGAIN_S = 1.0
_END_S = 10.0
_OBJECT_BYTES = 100 * 2**20  # nothing of ours lies in Ray's store
_MODULE = "decode_engine.processes.cluster.command"


@app.command()
@configured(ClusterConfig)
def up(config: ClusterConfig) -> None:
    """Start a cluster on this machine, and return when it serves."""
    state = _State(config.state)
    if state.pid is not None:
        raise InvalidArgumentError(
            f"a cluster runs already, by {config.state}; end it with `ops/cluster down` first"
        )
    if (config.tls_cert is None) != (config.tls_key is None):
        raise InvalidArgumentError("--tls-cert and --tls-key belong together, one of them is missing")
    _need_ray()
    state.make()
    log = state.folder / "log"
    with open(log, "a") as output:
        watching = subprocess.Popen(
            [sys.executable, "-m", _MODULE, "watch", *sys.argv[2:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    until = time.monotonic() + _START_S
    while not state.serving:
        if watching.poll() is not None or time.monotonic() > until:
            raise InvalidArgumentError(f"the cluster does not start; {log} says why")
        time.sleep(_LOOK_S)
    typer.echo(
        f"Serving {config.store} with {config.model} at {config.listen} and HTTP port {config.http_port}"
    )


@app.command()
@configured(StateConfig)
def down(config: StateConfig) -> None:
    """Let running requests end, and end the cluster."""
    state = _State(config.state)
    if state.pid is None:
        typer.echo(f"no cluster runs by {config.state}")
        return
    os.kill(state.pid, signal.SIGTERM)
    while state.pid is not None:
        time.sleep(_LOOK_S)


@app.command()
@configured(StateConfig)
def status(config: StateConfig) -> None:
    """Tell who serves, as JSON."""
    state = _State(config.state)
    if state.pid is None:
        raise InvalidArgumentError(f"no cluster runs by {config.state}; start one with `ops/cluster up`")
    typer.echo(json.dumps(state.ask("tell", config.state), indent=2))


@app.command()
@configured(FrontConfig)
def front(config: FrontConfig) -> None:
    """Serve a front door over engines that run already, without Ray."""
    from decode_engine.processes.cluster.fixed import serve_front

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    serve_front(config)


@app.command(hidden=True)
@configured(ClusterConfig)
def watch(config: ClusterConfig) -> None:
    """Keep Ray's head running, and what runs on it."""
    stopping = _told_to_stop()
    _adopt_orphans()
    state = _State(config.state)
    (state.folder / "pid").write_text(str(os.getpid()))
    served = False
    try:
        while not stopping:
            with _Head(config, state) as head:
                head.keep(sys.argv[2:], stopping, served)
            served, state.serving = served or state.serving, False
            if not stopping:
                time.sleep(_AGAIN_S)
    finally:
        _end_below()
        state.clear()


@app.command(hidden=True)
@configured(ClusterConfig)
def keep(config: ClusterConfig) -> None:
    """Keep what is wanted running on a head that runs."""
    from decode_engine.processes.cluster import application

    state = _State(config.state)
    _connect(state)
    stopping = _told_to_stop()  # Ray has taken the signals, too
    application.keep(config, lambda: bool(stopping), (state.folder / "serving").touch)


@app.command(hidden=True)
@configured(StateConfig)
def tell(config: StateConfig) -> None:
    """The replicas, and what else runs."""
    import ray

    from decode_engine.processes.cluster.application import roster

    _connect(_State(config.state))
    told = roster()
    replicas, workers = ray.get([told.replicas.remote(), told.workers.remote()])
    doors = [name for name in ray.util.list_named_actors() if name.startswith("door-")]
    found = {"replicas": [asdict(each) for each in replicas], "workers": workers, "doors": sorted(doors)}
    typer.echo(json.dumps(found))


def _told_to_stop() -> list[int]:
    found: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: found.append(number))
    return found


def _adopt_orphans() -> None:
    """Has processes of Ray's whose parent ends become this one's children, so that none outlives it."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _end_below() -> None:
    """Ends all children, and theirs, which are children then."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _END_S
        while time.monotonic() < until:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            tasks = Path("/proc/self/task").glob("*/children")
            below = [int(pid) for task in tasks for pid in task.read_text().split()]
            if not below:
                return
            for pid in below:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(_LOOK_S)


def _need_ray() -> None:
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise InvalidArgumentError(
            "a cluster needs Ray; install it with `pip install 'sparsekv[ray]'`"
        ) from error


def _connect(state: _State) -> None:
    import ray

    os.environ.update(state.environment)
    host = state.told["host"]
    ray.init(
        address=f"{host}:{state.told['port']}",
        namespace="sparsekv",
        _node_ip_address=host,
        log_to_driver=False,
        logging_level="warning",
    )


class _State:
    """What the folder of a cluster says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def make(self) -> None:
        """The folder, its owner's alone, with a token for Ray's ports."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        token = self.folder / "ray-token"
        if not token.exists():
            token.touch(0o600)
            token.write_text(secrets.token_hex(32))

    def clear(self) -> None:
        for name in ("pid", "serving", "head.json"):
            (self.folder / name).unlink(missing_ok=True)

    @property
    def pid(self) -> int | None:
        """Of the process that watches, None where there is none."""
        try:
            pid = int((self.folder / "pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if _MODULE.encode() in command else None

    @property
    def serving(self) -> bool:
        return (self.folder / "serving").exists()

    @serving.setter
    def serving(self, value: bool) -> None:
        (self.folder / "serving").touch() if value else (self.folder / "serving").unlink(missing_ok=True)

    @property
    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "head.json").read_text())
        return found

    @property
    def environment(self) -> Mapping[str, str]:
        """Of Ray's processes, and of those that connect to them."""
        host = self.told["host"]
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray-token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            # By this Ray leaves 127.0.0.1 as it is, and listens nowhere else.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if host == _LOOPBACK else "1",
        }

    def ask(self, command: str, state: Path) -> dict[str, Any]:
        """What one of the hidden commands says, which is a process because it connects to Ray. Raises SparseKVError."""
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, command, "--state", str(state)],
            capture_output=True,
            text=True,
            env={**os.environ, **self.environment},
            check=False,
        )
        if done.returncode:
            raise SparseKVError(f"Ray does not answer: {done.stderr[-500:]}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


class _Head:
    """Ray's head on this machine, while the block runs."""

    def __init__(self, config: ClusterConfig, state: _State) -> None:
        self._config, self._state = config, state
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""

    def __enter__(self) -> _Head:
        # Sockets of the system have short names, so their folder has, too.
        self._folder = tempfile.mkdtemp(prefix="skv-")
        host = self._config.host
        port, client_port = _free_port(host), _free_port(host)
        (self._state.folder / "head.json").write_text(json.dumps({"host": host, "port": port}))
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", "--head", "--block", f"--node-ip-address={host}", f"--port={port}"]
        command += [
            f"--ray-client-server-port={client_port}",
            "--include-dashboard=false",
            "--disable-usage-stats",
        ]
        command += [f"--temp-dir={self._folder}", f"--object-store-memory={_OBJECT_BYTES}"]
        # Beside engines Ray's own processes take no core for themselves; what engines take is `--cpus`.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self._state.environment},
            start_new_session=True,
        )
        return self

    def __exit__(self, *raised: object) -> None:
        process = self._process
        if process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def keep(self, arguments: list[str], stopping: list[int], served: bool) -> None:
        """Has the application kept running there until the head ends, or all is to end. served: it was once."""
        while self.runs and not stopping:
            with subprocess.Popen(
                [sys.executable, "-m", _MODULE, "keep", *arguments],
                env={**os.environ, **self._state.environment},
            ) as keeping:
                while keeping.poll() is None and self.runs and not stopping:
                    time.sleep(_LOOK_S)
                keeping.terminate()
            if not (served or self._state.serving or stopping):
                stopping.append(0)  # it cannot begin; the log says why
            time.sleep(_AGAIN_S)


def _free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
    return port


def main() -> None:
    run_command("ops/cluster", lambda word: app)


if __name__ == "__main__":
    main()
