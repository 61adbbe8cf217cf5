"""The commands serve, ask and methods: as processes where signals matter, else within this one."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode_engine.cli.ask_command import summary_lines
from decode_engine.cli.serve_command import GROUPS
from decode_engine.model.preparing import Preparation
from decode_engine.model.runner import ModelRunner
from decode_engine.rpc import server as server_module
from decode_engine.rpc.client import Client, Credentials, SelectionFigures, Summary, Timings
from decode_engine.rpc.door.access import TokenFile
from decode_engine.rpc.server import DecodeServer
from decode_engine.settings.config import ServeConfig
from index_store.cli.logs import LogLevel, logging_to_stderr
from tests.decode_engine.cli.conftest import Run
from tests.decode_engine.conftest import Library
from tests.support.serving.serve_process import serving
from tests.support.serving.service import loaded

COMMAND = [sys.executable, "-m", "decode_engine"]


def serve_arguments(library: Library) -> list[str]:
    served = ["--store", str(library.store), "--model", str(library.model), "--listen", "127.0.0.1:0"]
    return [*served, "--doors", "0"]  # `tests/decode_engine/processes` has others


@pytest.mark.nightly
def test_serve_as_text_ends_well_on_interrupt(library: Library, lamp: str) -> None:
    with serving(library, "--no-warm-up", "--format", "text") as server:
        line = server.process.stdout.readline()
        assert line.startswith("Serving ")
        assert "127.0.0.1:" in line
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(120) == 0
        server.kill()
        assert "Traceback" not in "".join(server.other)


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"--store": "nowhere"}, 1, "nowhere"),
        ({"--model": "nothing"}, 1, "nothing"),
        ({"--placement": "hybrid", "--device": "cpu"}, 2, "use --placement auto"),
        ({"--device-memory": "1GiB", "--device": "cpu"}, 2, "use --memory"),
        ({"--listen": "0.0.0.0:0"}, 2, "add --allow-remote"),
    ],
)
def test_serve_refuses_with_a_sentence(
    run: Run, library: Library, lamp: str, changes: dict[str, str], code: int, message: str
) -> None:
    arguments = serve_arguments(library)
    given = {**dict(zip(arguments[::2], arguments[1::2], strict=True)), **changes}
    result = run("serve", *(part for pair in given.items() for part in pair))
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_taken_port_is_told_before_anything_slow_begins(
    run: Run, library: Library, lamp: str, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.setattr(server_module, "DecodeServer", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("serve", *serve_arguments(library)[:4], "--listen", address, "--format", output)
    assert (result.returncode, result.stdout) == (1, "")
    if output == "json":
        entry = json.loads(result.stderr)
        assert (entry["level"], entry["reason"]) == ("error", "ADDRESS_UNUSABLE")
        assert entry["message"].startswith(f"cannot listen at {address}: the port is taken")
    else:
        assert result.stderr.startswith(f"error: cannot listen at {address}: the port is taken")


def test_a_taken_port_of_the_gateway_is_told_by_its_flag(run: Run, library: Library, lamp: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", *serve_arguments(library), "--http-port", str(port))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith(f"error: cannot listen at 127.0.0.1:{port}: ")
    assert "choose another one with --http-port" in result.stderr


def test_serving_and_making_needs_a_store_to_write_to(
    run: Run, library: Library, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may do everything
    result = run("serve", *serve_arguments(library), "--device", "cpu", "--prefill")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {library.store}: nothing may be written here")


def test_attention_of_prompts_is_prepared_by_the_thread_that_reads_them(
    library: Library, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    read = ModelRunner.read

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            threads.append(f"{work.__name__}: {threading.current_thread().name}")
            return work(*args, **options)

        return wrapped

    monkeypatch.setattr(Preparation, "prepare_all", lambda *_: [])
    monkeypatch.setattr("decode_engine.model.preparing.warm_method", lambda *_, **__: True)
    monkeypatch.setattr(ModelRunner, "prepare_prompts", noted(ModelRunner.prepare_prompts))
    monkeypatch.setattr(ModelRunner, "read", noted(read))
    with loaded(library.config(warm_up=True)) as server, Client(server.address) as client:
        client.generate(lamp, text="Who?", max_tokens=1).read()
    assert threads[:2] == ["prepare_prompts: decode-engine", "read: decode-engine"]


def test_ask_streams_text(run: Run, server: DecodeServer, lamp: str) -> None:
    arguments = ["--context", lamp, "--server", server.address, "--raw", "--method", "full", "--show-timings"]
    arguments += ["--max-tokens", "30", "--temperature", "1", "--seed", "5"]
    result = run("ask", "Who lit it?", *arguments)
    assert result.returncode == 0, result.stderr
    again = run("ask", "Who lit it?", *arguments, "--format", "json")
    assert result.stdout == json.loads(again.stdout)["text"].lstrip() + "\n"
    assert "method full: no layer searches, 100.00% over all layers" in result.stderr
    assert "tokens: 544 context, 11 prompt, 30 answer (length)" in result.stderr


def test_the_parts_of_the_time_add_up() -> None:
    parts = {"load_ns": 1, "queue_ns": 2, "search_ns": 3, "gather_ns": 4, "attend_ns": 5, "append_ns": 6}
    others = {"prompt_ns": 20, "first_token_ns": 25, "decode_steps": 2, "decode_ns": 8}
    times = Timings(**{name: value * 10**6 for name, value in parts.items()}, **others, total_ns=40 * 10**6)
    keys = SelectionFigures(1, 1, 1, 1, fraction_sparse=0.25, fraction_all=0.5)
    # 40 ms in all, 21 of them in parts
    summary = Summary(
        "stop",
        9,
        2,
        3,
        timings=times,
        selection=keys,
        method="csattention",
        budget="2.00%",
        remainder="centred",
        seed=0,
    )
    first, *_, last = summary_lines(summary)
    assert first == (
        "method csattention (2.00%, remainder centred): 25.00% of the keys in the layers that search, "
        "50.00% over all layers"
    )
    assert last.startswith("of it, in sum over all layers and steps: load 1.0, queue 2.0, search 3.0,")
    assert last.endswith("the rest of the model and waiting 19.0 ms")
    assert len(summary_lines(summary)) == 4
    moved = replace(times, host_bytes_read=3 * 2**20, rows_reused=5, device_wait_for_host_ns=2 * 10**6)
    line = summary_lines(replace(summary, timings=moved))[-2]
    assert "3.0 MiB read from host memory in steps, 5 rows found on the device, which waited 2.0 ms" in line


def test_methods_of_program_and_server_agree(run: Run, library: Library, server: DecodeServer) -> None:
    own = json.loads(run("methods", "--format", "json", "--model", str(library.model)).stdout)
    asked = json.loads(run("methods", "--format", "json", "--server", server.address).stdout)
    assert own == asked
    assert (own["head_dim"], own["kv_bytes_per_token"]) == (32, 256)


def test_methods_are_shown_with_parameters_and_sizes(run: Run) -> None:
    lines = run("methods").stdout.splitlines()
    assert any(line.startswith("refined is the default of contexts") for line in lines)
    listed = json.loads(run("methods", "--format", "json").stdout)
    assert (listed["head_dim"], listed["dtype"]) == (128, "bfloat16")
    assert lines[0].split() == ["method", "index", "keeps", "remainder", "bytes"]
    rows = {line.split()[0]: line for line in lines[1 : 1 + len(listed["methods"])]}
    assert rows.keys() == {method["name"] for method in listed["methods"]}
    assert rows["refined"].split("  ")[-1].strip() == "136.0"
    assert "centred over remainder_clusters, if stored" in rows["csattention"]
    assert "0.9 of the mass" in rows["tactic"]
    assert "for heads of 128 dimensions. Keys and values in bfloat16 take 512." in "\n".join(lines)
    assert "  search: coarse_keep 0.5" in lines


def test_options_of_serve_stand_under_headings(run: Run) -> None:
    parts = re.split(r"\n(\w[\w ]*):\n", run("serve", "--help").stdout)
    headings = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(headings) == [
        *("Options", "Network", "Memory", "Requests", "Computing", "Making contexts", "Storing contexts"),
    ]
    assert "--store DIR" in headings["Options"]
    assert "--slot-share" in headings["Memory"]
    assert {name for names in GROUPS.values() for name in names.split()} <= {
        field.name for field in fields(ServeConfig)
    }


CERTIFICATES = Path(__file__).parents[2] / "support" / "certificates"


@pytest.mark.nightly
def test_both_doors_of_a_guarded_server(library: Library, lamp: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    secret = TokenFile(tokens).create("alice")
    door = [
        *("--tokens", str(tokens)),
        *("--tls-cert", str(CERTIFICATES / "server.pem"), "--tls-key", str(CERTIFICATES / "server.key")),
    ]
    trusting = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
    shown = {"authorization": f"Bearer {secret}"}
    with serving(library, "--cors-origin", "https://example.org", "--no-warm-up", *door) as server:
        served = server.wait_until_served()
        credentials = Credentials(token=secret, ca_file=CERTIFICATES / "authority.pem")
        with Client(served["address"], credentials=credentials) as client:
            assert client.find_context("lamp").name == lamp
        with httpx.Client(base_url=served["url"], verify=trusting) as web:
            assert web.get("/v1/contexts").status_code == 401
            assert web.get("/v1/contexts/lamp", headers=shown).json()["name"] == lamp
            asking = {"origin": "https://example.org", "access-control-request-method": "POST"}
            allowed = web.options("/v1/models", headers=asking).headers
            assert allowed["access-control-allow-origin"] == "https://example.org"
        server.stop()


@pytest.mark.parametrize(("level", "told"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
def test_log_levels(capsys: pytest.CaptureFixture[str], level: str, told: int) -> None:
    logger = logging.getLogger("decode_engine.rpc.server")
    with logging_to_stderr(LogLevel(level), as_json=True):
        logger.warning("one")
        logger.info("two")
        logger.debug("three")
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["one", "two", "three"][:told]


def test_methods_of_a_model_and_a_server_at_once_are_refused(run: Run) -> None:
    result = run("methods", "--model", "reader", "--server", "127.0.0.1:1")
    assert result.returncode == 2
    assert result.stderr == "error: --server and --model are given, expected at most one of them\n"
