"""Contexts and children made from command lines, and `fetch-model` against an imitation of the hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from decode_engine.rpc.client import Client, Keep
from decode_engine.rpc.contexts import own_worker
from decode_engine.rpc.contexts.own_worker import LOWEST_PRIORITY, OwnWorker
from decode_engine.rpc.server import DecodeServer
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import JobRecord
from index_store.models.resolve import resolve_model
from index_store.models.tokenizer import load_tokenizer
from tests.decode_engine.cli.conftest import Run
from tests.decode_engine.conftest import Library
from tests.support.models import write_model_folder
from tests.support.serving.serve_process import serving
from tests.support.waiting import wait_until

TEXT = "The keeper of the southern lighthouse painted ships. " * 8


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "southern book.txt"
    path.write_text(TEXT)
    return path


def test_an_order_without_waiting_says_which_operation_it_is(
    run: Run, server: DecodeServer, library: Library, book: Path
) -> None:
    line = ("contexts", "create", "--server", server.address, "--no-wait", "--ttl", "2d", "--priority", "3")
    done = run(*line, "--request-id", "one", str(book), "--format", "json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["done"], told["phase"], told["context"]) == (0, False, "queued", None)
    queue = JobQueue(library.store)
    job = queue.get(told["name"].removeprefix("operations/"))
    assert isinstance(job, JobRecord)
    assert (job.order.name, job.order.ttl, job.priority) == ("southern book", 172_800, 3)
    again = run(*line, "--request-id", "one", str(book))
    assert again.stdout == f"{told['name']} makes {told['context_name']}\n"
    queue.cancel(job.id)
    ended = run(*line[:4], "--ttl", "2d", "--priority", "3", "--request-id", "one", str(book))
    assert ended.returncode == 1
    assert ended.stderr.endswith("the operation was cancelled\n")


def test_a_conversation_is_ordered_from_a_file(
    run: Run, server: DecodeServer, library: Library, tmp_path: Path
) -> None:
    said = tmp_path / "talk.json"
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "I see."}]
    said.write_text(json.dumps({"messages": messages}))
    line = ("contexts", "create", "--server", server.address, "--no-wait", "--format", "json")
    done = run(*line, "--messages", str(said))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    job = JobQueue(library.store).get(told["name"].removeprefix("operations/"))
    assert job.order.conversation
    assert job.order.name == "talk"
    for wrong in (("--messages", str(said), str(said)), ()):
        refused = run(*line, *wrong)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "expected one of text files, --messages with a conversation" in refused.stderr
    JobQueue(library.store).cancel(job.id)


def test_a_child_with_labels_is_ordered_and_followed(
    run: Run, server: DecodeServer, library: Library, lamp: str, book: Path
) -> None:
    on = ("--server", server.address, "--format", "json")
    labels = ("--label", "team=sea", "--label", "shelf=2")
    ordered = run("contexts", "create", *on, "--parent", "lamp", *labels, "--no-wait", str(book))
    assert ordered.returncode == 0, ordered.stderr
    name = json.loads(ordered.stdout)["name"]
    job = JobQueue(library.store).get(name.removeprefix("operations/"))
    assert (f"contexts/{job.order.parent}", job.order.labels) == (lamp, {"team": "sea", "shelf": "2"})
    listed = json.loads(run("operations", "ls", *on).stdout)["operations"]
    assert name in [operation["name"] for operation in listed]
    shown = dict(line.split("  ", 1) for line in run("operations", "show", *on[:2], name).stdout.splitlines())
    assert shown["name"].strip() == name
    assert shown["state"].strip().startswith("queued")
    early = run("operations", "rm", *on, name)
    assert (early.returncode, "has not ended" in early.stderr) == (1, True)
    cancelled = run("operations", "cancel", *on, job.id)
    assert json.loads(cancelled.stdout)["error"]["reason"] == "CANCELLED"
    waited = run("operations", "wait", *on, name)
    assert (waited.returncode, "was cancelled" in waited.stderr) == (1, True)
    assert "cancelled" in run("operations", "ls", *on[:2]).stdout
    assert json.loads(run("operations", "rm", *on, name).stdout) == {"removed": [name]}
    gone = run("operations", "show", *on, name)
    assert (gone.returncode, "there is no operation" in gone.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--label", "team"), "KEY=VALUE"),
        (("--label", "team-"), "no labels to remove"),
        (("--label", "a=1", "--label", "a=2"), "given twice"),
        (("--parent", "lamp", "--method", "quest"), "does not go with --parent"),
    ],
)
def test_wrong_labels_and_parents_are_refused(
    run: Run, book: Path, words: tuple[str, ...], said: str
) -> None:
    refused = run("contexts", "create", "--server", "127.0.0.1:1", *words, str(book))
    assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr


def test_name_and_expiry_are_changed(run: Run, server: DecodeServer, library: Library) -> None:
    library.prefill("passing")
    on = ("--server", server.address, "--format", "json")
    changed = json.loads(run("contexts", "update", *on, "passing", "--name", "lasting", "--ttl", "2h").stdout)
    assert changed["display_name"] == "lasting"
    left = datetime.fromisoformat(changed["expire_time"]) - datetime.now(UTC)
    assert timedelta(minutes=110) < left <= timedelta(hours=2)
    rows = run("contexts", "update", *on[:2], "lasting", "--ttl", "never").stdout
    assert [line.split()[1] for line in rows.splitlines() if line.startswith("expires")] == ["never"]
    for wrong in ((), ("--ttl", "soon")):
        assert run("contexts", "update", *on, "lasting", *wrong).returncode == 2


def test_what_is_missing_is_refused(run: Run, book: Path) -> None:
    for missing in (["--server", "127.0.0.1:1", str(book), "--ttl", "x"], ["no such file"]):
        assert run("contexts", "create", *missing).returncode == 2


@pytest.mark.nightly
@pytest.mark.usefixtures("lamp")
def test_a_server_makes_contexts_itself_and_its_worker_ends_with_it(library: Library, book: Path) -> None:
    with serving(library, "--prefill", "--no-warm-up", "--device", "cpu") as server:
        address = server.wait_until_served()["address"]
        command = [sys.executable, "-m", "decode_engine", "contexts", "create", "--server", address]
        made = subprocess.run(
            [*command, str(book), "--format", "json", "--name", "south"],
            capture_output=True,
            text=True,
            check=True,
        )
        told: dict[str, Any] = json.loads(made.stdout)
        assert (told["done"], told["error"]) == (True, None)
        assert told["context"]["display_name"] == "south"
        assert told["context"]["token_count"] == told["tokens_total"] == len(TEXT)
        server.kill()  # and its worker, which writes there, too, has ended
        assert "prefill_worker.worker.queue_worker" in {line["logger"] for line in server.logs}


def test_a_worker_that_ends_is_followed_by_another(tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    line = "{os.getpriority(0, 0)} {os.environ['OMP_NUM_THREADS']}"
    script = f'import os; print(f"{line}", file=open({str(beats)!r}, "a"))'
    worker = OwnWorker([sys.executable, "-c", script], 3)
    worker.start()
    wait_until(lambda: beats.exists() and len(beats.read_text().splitlines()) > 1, 200)
    worker.stop()
    worker.stop()
    assert set(beats.read_text().splitlines()) <= {f"{LOWEST_PRIORITY} 3", f"{os.getpriority(0, 0)} 3"}


def test_a_worker_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_worker, "_LEAST_S", 0.01)
    program, made = tmp_path / "program", tmp_path / "made"
    worker = OwnWorker([str(program)], 1)
    worker.start()
    wait_until(lambda: "could not be started" in caplog.text)
    assert worker.pid is None
    made.write_text("#!/bin/sh\nexec cat\n")
    made.chmod(0o755)
    made.rename(program)
    wait_until(lambda: worker.pid is not None)
    worker.stop()


def test_a_worker_is_stopped(tmp_path: Path) -> None:
    worker = OwnWorker([sys.executable, "-c", "import sys; sys.stdin.read()"], 1)
    worker.start()
    wait_until(lambda: worker.pid is not None, 200)
    pid = worker.pid
    assert pid is not None
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == LOWEST_PRIORITY)  # set when it has begun
    worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_context_that_is_continued_is_shown_and_removed(
    run: Run, server: DecodeServer, client: Client, lamp: str
) -> None:
    place = ("--server", server.address)
    keep = Keep("winter", timedelta(hours=1), prompt_only=True)
    client.generate(lamp, text="Every winter the harbour froze. ", method="full", keep=keep).read()
    shown = json.loads(run("contexts", "show", "winter", "--format", "json", *place).stdout)
    assert (shown["parent"], shown["children"]) == (lamp, 0)
    assert shown["expire_time"] is not None
    lines = [line.split() for line in run("contexts", "show", "winter", *place).stdout.splitlines()]
    assert ["continues", f"{lamp.removeprefix('contexts/')},"] in [line[:2] for line in lines]
    refused = run("contexts", "rm", lamp, *place)
    assert (refused.returncode, "--recursive" in refused.stderr) == (1, True)
    assert run("contexts", "rm", "winter", *place).returncode == 0


def test_a_text_that_cannot_be_read_is_told(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "more.txt"
    text.write_bytes(b"\xff\xfe")
    result = run("contexts", "create", str(text))
    assert (result.returncode, "is not UTF-8 text" in result.stderr) == (2, True)


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
