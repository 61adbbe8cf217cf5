"""How much of what a decode step gives reaches clients, by both doors, beside the step itself in the same run.

usage: python ops/bench/served/served_path.py [--model reader] [--tokens 8192] [--streams 1,16,64] [--phases plain]
       python ops/bench/served/served_path.py --model 8b --tokens 131072 --device cuda --folder DIR
           --streams 1,16,64,256 --phases step,plain,choices,beside

Regime: one context; `decode-engine serve` as a process, with its defaults but for `--max-sessions` where there are more
streams than 16 (`max_sessions` says); clients in `--processes` processes of their own, greedy, `--answer` tokens a
stream, `--method` in every request. A round of 16 tokens that is not counted comes before each figure: it loads,
compiles and captures. `8b` is a model of Llama-3.1-8B's shape with random weights (`first_minute.py`).

- `step`: whole steps in flight of that method by `decode_gpu.py`, a process before the server starts; on a GPU alone.
  Everywhere `server_step_s` is the mean time of a step by the server's own summaries.
- `plain`: tokens/s over the time in which all streams run, first tokens (median, 95th percentile, last), the longest
  gap between two messages of a stream; `of_server_step` and `of_step` are shares of what the steps alone would give.
- `choices`: 16 streams over gRPC with a JSON schema, a tool, five log probabilities, a frequency penalty, a bias, or
  least tokens, of all of them and of one of them; `to_plain` is the step's time beside that of plain ones.
- `beside`: a chat without a context while eight streams run: its first token, and their longest gap.

Streams that fail are counted (`failed`, and `error` of the first), which ends the benchmark with 1. One JSON line per
figure.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from first_minute import prefill, write_model, write_text
from harness.checks import CheckFailedError
from harness.doors import Ask, Asked, Door, Heard
from harness.report import Report, reporting

from decode_engine.rpc.client import Client
from index_store.models.conversation.messages import Message, Role, Tool

PHASES = ("step", "plain", "choices", "beside")
_DOORS: tuple[Door, ...] = ("grpc", "http")
_WARM_UP = 16
_SESSIONS = 16
_BESIDE = 8
_NAME = "text"
_LONG = {"type": "string", "minLength": 2000}

CHOICES: Mapping[str, Mapping[str, Any]] = {
    "json_schema": {"json_schema": {"type": "object", "properties": {"text": _LONG}, "required": ["text"]}},
    "tool": {
        "text": None,
        "messages": [Message(Role.USER, "Write it down.")],
        "tools": [
            Tool(
                "write",
                "",
                json.dumps({"type": "object", "properties": {"text": _LONG}, "required": ["text"]}),
            )
        ],
        "tool_choice": "required",
    },
    "logprobs": {"top_logprobs": 5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {100: 0.5, 101: -0.5}},
    "min_tokens": {"min_tokens": 8},
}


class Server:
    """A server as a process, and clients of it."""

    def __init__(
        self, pool: Executor, processes: int, doors: Mapping[Door, str], model: str, answer: int, method: str
    ) -> None:
        self.pool, self.processes, self.doors = pool, processes, doors
        self.model, self.answer, self.method = model, answer, method
        with Client(doors["grpc"]) as client:
            self.context = client.find_context(_NAME).name

    def ask(self, door: Door, number: int, tokens: int, **changes: Any) -> Ask:
        """A question of its own, which a stream of so many tokens answers. changes: None takes an option away."""
        prompt = f"\nChapter {number}. The"
        usual: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "method": self.method}
        usual |= {"text": prompt} if door == "grpc" else {"prompt": prompt, "model": self.model}
        options = {name: value for name, value in {**usual, **changes}.items() if value is not None}
        if "min_tokens" in changes:
            options["min_tokens"] = min(tokens, changes["min_tokens"])
        return Ask(door, self.doors[door], self.context, options)

    def run(self, door: Door, changes: Sequence[Mapping[str, Any]]) -> list[Heard]:
        """A stream for each, after a round that is not counted."""
        heard: list[Heard] = []
        for tokens in (_WARM_UP, self.answer):
            asks = [self.ask(door, number, tokens, **each) for number, each in enumerate(changes)]
            heard = Asked.at_once(self.pool, self.processes, asks).heard()
        return heard


def figures(heard: Sequence[Heard]) -> dict[str, Any]:
    """Of streams that were asked for at once."""
    good = [one for one in heard if not one.error and one.arrivals]
    failed = [one.error for one in heard if one.error]
    row: dict[str, Any] = {"failed": len(failed), **({"error": failed[0]} if failed else {})}
    if not good:
        return row
    begin, end = max(one.arrivals[0] for one in good), min(one.arrivals[-1] for one in good)
    within = sum(
        sum(begin < at <= end for at in one.arrivals) * one.tokens / len(one.arrivals) for one in good
    )
    firsts = sorted(one.arrivals[0] - one.asked for one in good)
    steps = [one.step_s for one in good if one.step_s is not None]
    return {
        **row,
        "tokens_per_s": within / (end - begin) if end > begin else None,
        "all_tokens_per_s": sum(one.tokens for one in good)
        / (max(one.arrivals[-1] for one in good) - min(one.asked for one in good)),
        "tokens_a_stream": statistics.mean(one.tokens for one in good),
        "first_p50_s": statistics.median(firsts),
        "first_p95_s": firsts[int(0.95 * (len(firsts) - 1))],
        "first_last_s": firsts[-1],
        "longest_gap_s": longest_gap(good),
        **({"server_step_s": statistics.median(steps)} if steps else {}),
    }


def longest_gap(heard: Sequence[Heard]) -> float:
    """Between two messages of any stream."""
    return max((gap for one in heard for gap in one.gaps_s), default=0.0)


def plain(
    report: Report,
    server: Server,
    streams: Sequence[int],
    steps: Mapping[int, float],
    told: Mapping[str, Any],
) -> None:
    """Both doors at every number of streams. The step of gRPC's round is what HTTP is compared with, too."""
    for count in streams:
        step_s = None
        for door in _DOORS:
            row = figures(server.run(door, [{}] * count))
            step_s = row.get("server_step_s", step_s)
            rate = row.get("tokens_per_s")
            shares = {"of_server_step": step_s, "of_step": steps.get(count)}
            row |= {name: rate * each / count for name, each in shares.items() if rate and each}
            report.add({"figure": "plain", "door": door, "streams": count, **told, **row})


def choices(report: Report, server: Server, told: Mapping[str, Any]) -> None:
    """Sixteen streams, all or one of which have something that changes how tokens are chosen."""
    base = figures(server.run("grpc", [{}] * _SESSIONS))
    report.add({"figure": "choices", "choice": "plain", "of": _SESSIONS, **told, **base})
    for name, changes in CHOICES.items():
        for count in (_SESSIONS, 1):
            row = figures(server.run("grpc", [changes] * count + [{}] * (_SESSIONS - count)))
            if "server_step_s" in row and "server_step_s" in base:
                row["to_plain"] = row["server_step_s"] / base["server_step_s"]
            report.add({"figure": "choices", "choice": name, "of": count, **told, **row})


def beside(report: Report, server: Server, told: Mapping[str, Any]) -> None:
    """A chat without a context, while streams run; before that, the streams alone."""
    alone = server.run("grpc", [{}] * _BESIDE)
    middle_s = statistics.median(one.arrivals[-1] - one.asked for one in alone) / 2
    asks = [server.ask("grpc", number, server.answer) for number in range(_BESIDE)]
    said = {"messages": [Message(Role.USER, "Who are you?")], "max_tokens": 32, "temperature": 0}
    chat = Ask("grpc", server.doors["grpc"], "", said)
    running = Asked.at_once(server.pool, server.processes - 1, asks)
    told_chat = figures(Asked.at_once(server.pool, 1, [chat], middle_s).heard())
    heard = running.heard()
    row = {"first_s": told_chat.get("first_last_s"), "alone_longest_gap_s": longest_gap(alone)}
    report.add({"figure": "beside", "streams": _BESIDE, **told, **figures(heard), **row})


def step_times(tokens: int, streams: Sequence[int], method: str) -> dict[int, float]:
    """Seconds of a whole step in flight by sessions on one context, in a process of its own."""
    script = Path(__file__).resolve().parents[1] / "whole_model" / "decode_gpu.py"
    shapes = ",".join(f"{tokens}x{count}@1" for count in streams)
    command = [sys.executable, str(script), "--methods", method, "--shapes", shapes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [row for row in rows if "flight_ms" in row]
    if len(found) != len(streams):
        raise CheckFailedError(f"decode_gpu.py ended with {done.returncode}: {done.stderr[-2000:]}")
    return {count: row["flight_ms"] / 1e3 for count, row in zip(streams, found, strict=True)}


@contextmanager
def served(store: Path, model: str, device: str, sessions: int) -> Iterator[dict[Door, str]]:
    """The addresses of a server's doors."""
    command = [sys.executable, "-m", "decode_engine", "serve", "--store", str(store), "--model", model]
    command += ["--device", device, "--listen", "127.0.0.1:0", "--http-port", "0", "--format", "json"]
    command += ["--max-sessions", str(sessions)] if sessions > _SESSIONS else []
    log = store.parent / "serve.log"
    with (
        log.open("a") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ)
        ) as process,
    ):
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise CheckFailedError(f"the server did not start: {log.read_text()[-2000:]}")
            told = json.loads(line)
            http = next(value for value in told.values() if str(value).startswith("http"))
            yield {"grpc": told["address"], "http": http.removeprefix("http://").rstrip("/")}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def main(
    model: Annotated[str, typer.Option(help="A model, or 8b for a random one of that shape.")] = "reader",
    tokens: Annotated[int, typer.Option(help="Of the context.")] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    streams: Annotated[str, typer.Option(help="Numbers of streams.")] = "1,16,64",
    answer: Annotated[int, typer.Option(help="Tokens of a stream.")] = 256,
    phases: Annotated[str, typer.Option(help=f"Of {','.join(PHASES)}.")] = "plain,choices,beside",
    processes: Annotated[int, typer.Option(help="Of clients.", min=2)] = 4,
    method: Annotated[str, typer.Option(help="Of steps and requests.")] = "refined",
    folder: Annotated[
        Path | None,
        typer.Option(help="For model and store, used again if there; a temporary one if not given."),
    ] = None,
) -> None:
    """Reports tokens per second, first tokens and gaps by both doors, beside the step's."""
    wanted, counts = phases.split(","), [int(count) for count in streams.split(",")]
    if unknown := set(wanted) - set(PHASES):
        raise typer.BadParameter(f"phases has {sorted(unknown)}, expected some of {', '.join(PHASES)}")
    with reporting("served_path", gpu="step" in wanted) as report, tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        steps = step_times(tokens, counts, method) if "step" in wanted else {}
        for count, step_s in steps.items():
            report.add({"figure": "step", "streams": count, "step_s": step_s, "tokens_per_s": count / step_s})
        if model == "8b":
            model = str(place / "model")
            if not Path(model).exists():
                write_model(Path(model))
        store, text = place / "store", place / f"{_NAME}.txt"
        if not store.exists():
            write_text(text, tokens, 0)
            prefill(model, store, text, device)
        sessions = max(_SESSIONS, *counts)
        spawned = get_context("spawn")
        with (
            served(store, model, device, sessions) as doors,
            ProcessPoolExecutor(processes, mp_context=spawned) as pool,
        ):
            with Client(doors["grpc"]) as client:
                name = client.server_status().model
            server, told = Server(pool, processes, doors, name, answer, method), {"max_sessions": sessions}
            if "plain" in wanted:
                plain(report, server, counts, steps, told)
            if "choices" in wanted:
                choices(report, server, told)
            if "beside" in wanted:
                beside(report, server, told)


if __name__ == "__main__":
    typer.run(main)
