"""Contexts and children made from command lines: by a server with a worker of its own, and by one without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from decode_engine.rpc.contexts import own_worker
from decode_engine.rpc.contexts.own_worker import LOWEST_PRIORITY, OwnWorker
from decode_engine.rpc.server import DecodeServer
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import JobRecord
from tests.decode_engine.cli.conftest import Run
from tests.decode_engine.conftest import Library
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
        assert "expected text files, or --messages" in refused.stderr
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


def test_what_servers_decide_is_refused(run: Run, book: Path) -> None:
    for wrong in (["--chunk", "64"], ["--model", "reader"], ["--salt", "a"]):
        command = [sys.executable, "-m", "prefill_worker", "run", "--server", "127.0.0.1:1"]
        done = subprocess.run(
            [*command, "--input", str(book), *wrong], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert f"{wrong[0]} does not go together with --server" in done.stderr
    for missing in (["--server", "127.0.0.1:1", str(book), "--ttl", "x"], ["no such file"]):
        assert run("contexts", "create", *missing).returncode == 2


@pytest.fixture
def serving(library: Library) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with a worker of its own, and its address."""
    listen = ("--listen", "127.0.0.1:0", "--no-warm-up", "--device", "cpu", "--threads", "1")
    model = ("--store", str(library.store), "--model", str(library.model))
    process = subprocess.Popen(
        [sys.executable, "-m", "decode_engine", "serve", "--prefill", *model, *listen, "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process, json.loads(process.stdout.readline())["address"]
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.usefixtures("lamp")
def test_a_server_makes_contexts_itself_and_its_worker_ends_with_it(
    serving: tuple[subprocess.Popen[str], str], book: Path
) -> None:
    server, address = serving
    command = [sys.executable, "-m", "prefill_worker", "run", "--server", address, "--input", str(book)]
    made = subprocess.run(
        [*command, "--format", "json", "--name", "south"], capture_output=True, text=True, check=True
    )
    told: dict[str, Any] = json.loads(made.stdout)
    assert (told["done"], told["error"]) == (True, None)
    assert told["context"]["display_name"] == "south"
    assert told["context"]["token_count"] == told["tokens_total"] == len(TEXT)
    server.kill()
    assert server.stderr is not None
    log = server.stderr.read()  # ends when the worker has ended, too, which writes there
    assert '"logger": "prefill_worker.worker.queue_worker"' in log


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


def test_a_context_is_continued_shown_and_removed(
    run: Run, server: DecodeServer, lamp: str, tmp_path: Path
) -> None:
    place = ("--server", server.address)
    text = tmp_path / "more.txt"
    text.write_text("Every winter the harbour froze. ")
    made = run("contexts", "extend", lamp, str(text), "--name", "winter", "--ttl", "1h", *place)
    assert made.returncode == 0, made.stderr
    assert "32 of them new" in made.stdout
    shown = json.loads(run("contexts", "show", "winter", "--format", "json", *place).stdout)
    assert (shown["parent"], shown["children"]) == (lamp, 0)
    assert shown["expire_time"] is not None
    lines = [line.split() for line in run("contexts", "show", "winter", *place).stdout.splitlines()]
    assert ["continues", f"{lamp.removeprefix('contexts/')},"] in [line[:2] for line in lines]
    other = tmp_path / "spring.txt"
    other.write_text("Every spring it thawed. ")
    assert run("contexts", "extend", lamp, str(other), *place).returncode == 0
    assert run("contexts", "show", "lamp", *place).returncode == 0
    assert run("contexts", "rm", "spring", *place).returncode == 0
    refused = run("contexts", "rm", lamp, *place)
    assert (refused.returncode, "--recursive" in refused.stderr) == (1, True)
    assert run("contexts", "rm", "winter", *place).returncode == 0


def test_a_text_that_cannot_be_read_is_told(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "more.txt"
    text.write_bytes(b"\xff\xfe")
    result = run("contexts", "extend", "lamp", str(text))
    assert (result.returncode, "is not UTF-8 text" in result.stderr) == (2, True)
