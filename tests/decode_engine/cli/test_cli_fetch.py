"""`fetch-model` against an imitation of the hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from index_store.models.resolve import resolve_model
from index_store.models.tokenizer import load_tokenizer
from tests.support.models import write_model_folder

COMMIT = "c" * 40


class Hub:
    """Repositories as files by name. asked: paths of files that were sent."""

    def __init__(self, repositories: dict[str, dict[str, bytes]], missing: int = 0) -> None:
        self.repositories, self.asked = repositories, list[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def _answer(self, body: bool) -> None:
                _, *parts = self.path.split("?")[0].split("/")
                if parts[:2] == ["api", "models"]:
                    files = hub.repositories.get("/".join(parts[2:4]))
                    siblings = [{"rfilename": n, "size": len(data)} for n, data in (files or {}).items()]
                    told = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings}
                    self._send(404 if files is None else 200, json.dumps(told).encode(), body)
                    return
                data = hub.repositories.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
                if body and parts[2:3] == ["resolve"]:
                    hub.asked.append(parts[-1])
                self._send(404 if data is None else 200, data or b"", body)

            def _send(self, status: int, data: bytes, body: bool) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                if status == 404:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                if body:
                    self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    model = write_model_folder(tmp_path / "model", "llama", head_dim=32)
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    other = {"README.md": b"x", "pytorch_model.bin": b"x", "onnx/model.safetensors": b"x"}
    gguf = {"small.Q4.gguf": b"GGUF small", "small.Q8.gguf": b"GGUF large"}
    made = Hub(
        {
            "toys/toy": {**files, **other},
            "toys/gguf": gguf,
            "toys/pickled": {"config.json": b"{}", "pytorch_model.bin": b"x"},
        }
    )
    yield made
    made.server.shutdown()


def fetch(hub: Hub, home: Path, *arguments: str, free: int | None = None) -> subprocess.CompletedProcess[str]:
    """free: bytes that the disk says it has."""
    settings = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    full = (
        ""
        if free is None
        else f"import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(9, 9, {free}); "
    )
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"{full}from decode_engine.__main__ import main; main()",
            "fetch-model",
            *arguments,
        ],
        env={**os.environ, **settings},
        capture_output=True,
        check=False,
        text=True,
    )


def test_what_is_loaded_is_fetched_once_and_found_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    full = fetch(hub, home, "toys/toy", free=1000)
    assert (full.returncode, full.stdout) == (1, "")
    assert "the disk of" in full.stderr
    assert hub.asked == []
    done = fetch(hub, home, "toys/toy", "--format", "json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    loaded = set(hub.repositories["toys/toy"]) - {"README.md", "pytorch_model.bin", "onnx/model.safetensors"}
    assert set(told["files"]) == set(hub.asked) == loaded
    assert told["fetched"] == told["size"] == sum(len(hub.repositories["toys/toy"][name]) for name in loaded)
    assert "which" in done.stderr
    folder = resolve_model(told["path"])
    assert folder.name == "toy"
    assert load_tokenizer(folder).encode("a lamp")
    hub.asked.clear()
    again = fetch(hub, home, "toys/toy")
    assert again.stdout == f"{told['path']}\n"
    assert f"--model {told['path']}" in again.stderr
    assert hub.asked == []
    hub.server.shutdown()
    hub.server.server_close()
    away = fetch(hub, home, "toys/toy", "--format", "json")
    assert json.loads(away.stdout) == {**told, "fetched": 0}
    (Path(told["path"]) / "model.safetensors").unlink()
    lacking = fetch(hub, home, "toys/toy")
    assert lacking.returncode == 1
    assert "the hub cannot be reached" in lacking.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["toys/none"], "cannot be fetched"),
        (["toys/pickled"], "pickled weights can run code"),
        (["toys/gguf"], "name one of them with --file: small.Q4.gguf, small.Q8.gguf"),
        (["toys/gguf", "--file", "other.gguf"], "has no GGUF file 'other.gguf'"),
    ],
)
def test_what_cannot_be_fetched_is_refused(hub: Hub, tmp_path: Path, arguments: list[str], why: str) -> None:
    done = fetch(hub, tmp_path / "home", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert why in done.stderr
    assert hub.asked == []


def test_one_gguf_file_is_fetched(hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path / "home", "toys/gguf", "--file", "small.Q4.gguf")
    assert Path(done.stdout.strip()).read_bytes() == b"GGUF small", done.stderr
    assert hub.asked == ["small.Q4.gguf"]
