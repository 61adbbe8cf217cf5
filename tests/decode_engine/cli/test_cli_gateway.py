"""HTTP from the command line: `serve --http-port`, `gateway`, tokens and encryption, as processes."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode_engine.rpc.client import Client, Credentials
from decode_engine.rpc.door.tokens import TokenFile
from tests.decode_engine.cli.conftest import Run
from tests.decode_engine.conftest import Library

CERTIFICATES = Path(__file__).parents[2] / "support" / "certificates"


@contextmanager
def running(*arguments: str) -> Iterator[dict[str, Any]]:
    """A command that serves, and what it says when it does; told to stop at the end, which has to go well."""
    command = [sys.executable, "-m", "decode_engine", *arguments, "--format", "json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield json.loads(line)
    finally:
        process.send_signal(signal.SIGTERM)
        _, logs = process.communicate(timeout=120)
    assert process.returncode == 0, logs
    assert "Traceback" not in logs


@pytest.mark.slow
def test_a_guarded_server_with_a_gateway_and_one_beside_it(
    library: Library, lamp: str, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    secret = TokenFile(tokens).create("alice")
    door = [
        *("--tokens", str(tokens)),
        *("--tls-cert", str(CERTIFICATES / "server.pem"), "--tls-key", str(CERTIFICATES / "server.key")),
    ]
    serve = ["serve", "--store", str(library.store), "--model", str(library.model), "--device", "cpu"]
    trusting = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
    shown = {"authorization": f"Bearer {secret}"}
    with running(*serve, "--listen", "127.0.0.1:0", "--http-port", "0", "--no-warm-up", *door) as inside:
        credentials = Credentials(token=secret, ca_file=CERTIFICATES / "authority.pem")
        with Client(inside["address"], credentials=credentials) as client:
            assert client.find_context("lamp").name == lamp
        with httpx.Client(base_url=inside["url"], verify=trusting) as web:
            assert web.get("/v1/contexts").status_code == 401
            assert web.get("/v1/contexts/lamp", headers=shown).json()["name"] == lamp
        gateway = ["gateway", "--server", inside["address"], "--listen", "127.0.0.1:0"]
        with running(*gateway, "--ca-file", str(CERTIFICATES / "authority.pem")) as beside:
            assert httpx.get(f"{beside['url']}/health").status_code == 200
            assert httpx.get(f"{beside['url']}/v1/contexts").status_code == 401
            assert httpx.get(f"{beside['url']}/v1/contexts/lamp", headers=shown).json()["name"] == lamp


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--listen", "0.0.0.0:0"], "--listen is 0.0.0.0:0, which other machines can reach"),
        (["--listen", "here"], "--listen is 'here', expected HOST:PORT"),
        (["--tls-cert", str(CERTIFICATES / "server.pem")], "expected both of --tls-cert and --tls-key"),
        (
            ["--client-cert", str(CERTIFICATES / "client.pem")],
            "expected both of --client-cert and --client-key",
        ),
    ],
)
def test_wrong_options_are_told_in_a_sentence(run: Run, arguments: list[str], sentence: str) -> None:
    result = run("gateway", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr


def test_a_port_that_is_taken_is_told(run: Run) -> None:
    from decode_engine.gateway.serving import Gateway

    with Gateway("127.0.0.1:0", "127.0.0.1:1") as gateway:
        result = run("gateway", "--listen", gateway.address)
    assert result.returncode == 1
    assert f"cannot listen at {gateway.address}" in result.stderr
