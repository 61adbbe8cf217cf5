"""HTTP from the command line: `serve --http-port` with tokens and encryption, as a process."""

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
def test_both_doors_of_a_guarded_server(library: Library, lamp: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    secret = TokenFile(tokens).create("alice")
    door = [
        *("--tokens", str(tokens)),
        *("--tls-cert", str(CERTIFICATES / "server.pem"), "--tls-key", str(CERTIFICATES / "server.key")),
    ]
    serve = ["serve", "--store", str(library.store), "--model", str(library.model), "--device", "cpu"]
    trusting = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
    shown = {"authorization": f"Bearer {secret}"}
    http = ["--http-port", "0", "--cors-origin", "https://example.org"]
    with running(*serve, "--listen", "127.0.0.1:0", *http, "--no-warm-up", *door) as served:
        credentials = Credentials(token=secret, ca_file=CERTIFICATES / "authority.pem")
        with Client(served["address"], credentials=credentials) as client:
            assert client.find_context("lamp").name == lamp
        with httpx.Client(base_url=served["url"], verify=trusting) as web:
            assert web.get("/v1/contexts").status_code == 401
            assert web.get("/v1/contexts/lamp", headers=shown).json()["name"] == lamp
            asking = {"origin": "https://example.org", "access-control-request-method": "POST"}
            allowed = web.options("/v1/models", headers=asking).headers
            assert allowed["access-control-allow-origin"] == "https://example.org"
