"""The commands serve, ask and methods: as processes where signals matter, else within this one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from decode_engine.__main__ import main
from decode_engine.cli.ask_command import summary_lines
from decode_engine.errors import ShuttingDownError
from decode_engine.rpc.client import Client, SelectionFigures, Summary, Timings
from decode_engine.rpc.server import DecodeServer
from tests.decode_engine.conftest import Library

COMMAND = [sys.executable, "-m", "decode_engine"]


@dataclass(frozen=True)
class Result:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process."""

    def run_here(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["decode-engine", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return Result(int(caught.value.code or 0), captured.out, captured.err)

    return run_here


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and the first line that it prints."""
    process = subprocess.Popen(
        [*COMMAND, "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def serve_arguments(library: Library) -> list[str]:
    return ["--store", str(library.store), "--model", str(library.model), "--listen", "127.0.0.1:0"]


@pytest.mark.slow
def test_serve_ask_and_stop(run: Run, library: Library, lamp: str) -> None:
    arguments = [*serve_arguments(library), "--memory", "64MiB", "--threads", "1", "--format", "json"]
    with serving(*arguments) as (process, line):
        ready = json.loads(line)
        assert ready["event"] == "serving"
        address = ready["address"]
        asking = ["ask", "Who?", "--context", "lamp", "--max-tokens", "7", "--format", "json"]
        answer = run(*asking, "--server", address)
        assert answer.returncode == 0, answer.stderr
        report = json.loads(answer.stdout)
        assert report["context"] == lamp
        assert report["method"] == "csattention"
        assert report["completion_tokens"] == len(report["token_ids"]) <= 7
        process.send_signal(signal.SIGTERM)
        output, logs = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output == ""
    entries = [json.loads(line) for line in logs.splitlines()]
    calls = [(entry["rpc"], entry["reason"]) for entry in entries if "rpc" in entry]
    assert calls == [("ListContexts", "OK"), ("Generate", "OK")]
    assert all(entry["milliseconds"] > 0 for entry in entries if "rpc" in entry)


@pytest.mark.slow
def test_a_request_that_the_grace_does_not_suffice_for_is_told_so(library: Library, lamp: str) -> None:
    arguments = [*serve_arguments(library), "--threads", "1", "--grace", "0.1", "--format", "json"]
    with serving(*arguments) as (process, line), Client(json.loads(line)["address"]) as client:
        with client.generate(lamp, text="Who?", max_tokens=3400, method="oracle") as generation:
            pieces = iter(generation)
            next(pieces)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(ShuttingDownError, match="shut down before this request finished"):
                list(pieces)
        _, logs = process.communicate(timeout=60)
        assert process.returncode == 0
    entries = [json.loads(line) for line in logs.splitlines()]
    messages = [entry["message"] for entry in entries]
    assert "shutting down, waiting up to 0.1 s for running requests: 1" in messages
    assert "0.1 s are over, ending unfinished requests: 1" in messages
    assert [entry["reason"] for entry in entries if "rpc" in entry] == ["SHUTTING_DOWN"]


@pytest.mark.slow
def test_serve_as_text_ends_well_on_interrupt(library: Library, lamp: str) -> None:
    with serving(*serve_arguments(library)) as (process, line):
        assert line.startswith("Serving ")
        assert "127.0.0.1:" in line
        process.send_signal(signal.SIGINT)
        _, logs = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in logs


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"--store": "nowhere"}, 1, "nowhere"),
        ({"--model": "nothing"}, 1, "nothing"),
        ({"--memory": "much"}, 1, "8GiB"),
        ({"--placement": "disk"}, 1, "expected auto, device, hybrid, host"),
        ({"--placement": "hybrid", "--device": "cpu"}, 1, "use --placement auto"),
        ({"--device-memory": "1GiB", "--device": "cpu"}, 1, "use --memory"),
        ({"--listen": "here"}, 1, "HOST:PORT"),
        ({"--max-sessions": "0"}, 1, "--max-sessions"),
        ({"--max-sessions": "x"}, 2, "max-sessions"),
        ({"--device": "gpu"}, 1, "--device is 'gpu', expected auto, cpu or cuda"),
        ({"--threads": "100000"}, 1, "--threads is 100000, expected at most"),
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


def test_evaluate_refuses_a_device_with_a_sentence(run: Run, tmp_path: Path) -> None:
    result = run("evaluate", "--out", str(tmp_path / "out"), "--device", "gpu")
    assert result.returncode == 1
    assert result.stderr.startswith("error: --device is 'gpu', expected auto, cpu or cuda")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["serve", "evaluate", "tune"])
def test_help_says_which_device_decodes(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    assert "auto (a GPU if there is one), cpu or cuda" in " ".join(result.stdout.replace("│", " ").split())


def test_ask_streams_text(run: Run, server: DecodeServer, lamp: str) -> None:
    arguments = [
        "--context",
        lamp,
        "--raw",
        "--max-tokens",
        "30",
        "--method",
        "full",
        "--server",
        server.address,
    ]
    arguments += ["--temperature", "1", "--seed", "5", "--show-timings"]
    result = run("ask", "Who lit it?", *arguments)
    assert result.returncode == 0, result.stderr
    again = run("ask", "Who lit it?", *arguments, "--format", "json")
    assert result.stdout == json.loads(again.stdout)["text"].lstrip() + "\n"
    assert "method full: no layer searches, 100.00% over all layers" in result.stderr
    assert "tokens: 544 context, 11 prompt, 30 answer (length)" in result.stderr


def test_ask_ends_questions_at_line_breaks_unless_told_otherwise(
    run: Run, server: DecodeServer, lamp: str
) -> None:
    arguments = ["ask", "Who?", "--context", lamp, "--server", server.address, "--format", "json"]
    arguments += ["--max-tokens", "600", "--temperature", "3", "--seed", "2"]
    default = json.loads(run(*arguments).stdout)
    assert default["finish_reason"] == "stop"
    assert "\n" not in default["text"]
    other = json.loads(run(*arguments, "--stop", "never ever").stdout)
    assert other["finish_reason"] == "length"
    assert other["text"].startswith(default["text"] + "\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--context", "no such book"], 1, "no such book"),
        (["--context", "lamp", "--method", "guesswork"], 1, "guesswork"),
        (["--context", "lamp", "--keep", "7"], 1, "keep_ratio is 7"),
        (["--context", "lamp", "--mass", "1.5"], 1, "target_mass is 1.5"),
        (["--context", "lamp", "--tokens-kept", "0"], 1, "token_budget is 0"),
        (["--context", "lamp", "--keep", "0.1", "--mass", "0.9"], 1, "--keep and --mass are given"),
        (["--context", "lamp", "--method", "csattention+sixpole"], 1, "expected one of dropped, monopole"),
        (["--context", "lamp", "--server", "127.0.0.1:1"], 1, "no server answers"),
        (["--context", "lamp", "--server", "?"], 1, "HOST:PORT"),
        (["--context", "lamp", "--timeout", "-1"], 1, "--timeout is -1, expected more than 0"),
        (["--context", "lamp", "--timeout", "nan"], 1, "--timeout is nan, expected more than 0"),
        ([], 2, "--context"),
    ],
)
def test_ask_fails_with_a_sentence(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    server: DecodeServer,
    lamp: str,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setenv("SPARSEKV_SERVER", server.address)
    result = run("ask", "Who?", *arguments)
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_the_parts_of_the_time_add_up() -> None:
    parts = {"load_ns": 1, "queue_ns": 2, "search_ns": 3, "gather_ns": 4, "attend_ns": 5, "append_ns": 6}
    others = {"prompt_ns": 20, "first_token_ns": 25, "decode_steps": 2, "decode_ns": 8}
    times = Timings(**{name: value * 10**6 for name, value in parts.items()}, **others, total_ns=40 * 10**6)
    keys = SelectionFigures(1, 1, 1, 1, fraction_sparse=0.25, fraction_all=0.5)
    # 40 ms in all, 21 of them in parts
    summary = Summary("stop", 9, 2, 3, times, keys, method="pq", budget="2.00%", remainder="centred", seed=0)
    first, *_, last = summary_lines(summary)
    assert first == (
        "method pq (2.00%, remainder centred): 25.00% of the keys in the layers that search, 50.00% over all layers"
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
    listed = json.loads(run("methods", "--format", "json").stdout)
    assert (listed["head_dim"], listed["dtype"]) == (128, "bfloat16")
    assert lines[0].split() == ["method", "index", "keeps", "remainder", "bytes"]
    rows = {line.split()[0]: line for line in lines[1 : 1 + len(listed["methods"])]}
    assert rows.keys() == {method["name"] for method in listed["methods"]}
    assert rows["pq"].split("  ")[-1].strip() == "112.5"
    assert "centred over remainder_clusters, if stored" in rows["pq"]
    assert "0.9 of the mass" in rows["tactic"]
    assert "for heads of 128 dimensions. Keys and values in bfloat16 take 512." in "\n".join(lines)
    assert "  search: coarse_keep 0.5" in lines


def test_methods_of_a_model_and_a_server_at_once_are_refused(run: Run) -> None:
    result = run("methods", "--model", "reader", "--server", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr == "error: --server and --model are given, expected at most one of them\n"


def test_help_lists_all_commands(run: Run) -> None:
    result = run("--help")
    assert result.returncode == 0
    for name in ("serve", "ask", "methods", "evaluate", "make-document"):
        assert f" {name} " in result.stdout
    assert "--questions" in run("make-document", "--help").stdout
