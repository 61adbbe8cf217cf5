"""How much of what a decode step gives reaches clients, by both doors, beside the step itself in the same run.

usage: python ops/bench/served/served_path.py [--model reader] [--tokens 8192] [--streams 1,16,64] [--phases plain]
       python ops/bench/served/served_path.py --model 8b --tokens 131072 --device cuda --folder DIR
           --streams 1,16,64,256 --phases step,plain,choices,beside
       python ops/bench/served/served_path.py --model smollm2 --tokens 2048 --contexts 8 --weights float32
           --phases beside

Regime: `--contexts` contexts; `decode-engine serve` as a process, with its defaults but for `--weights`, and for
`--max-sessions` where there are more streams than 16 (`max_sessions` says); clients in `--processes` processes of their
own, greedy, `--answer` tokens a stream, `--method` in every request. A round of 16 tokens that is not counted comes
before each figure: it loads, compiles and captures. `8b` is a model of Llama-3.1-8B's shape with random weights
(`first_minute.py`).

- `step`: whole steps in flight of that method by `decode_gpu.py`, a process before the server starts; on a GPU alone.
  Everywhere `server_step_s` is the mean time of a step by the server's own summaries.
- `plain`: tokens/s over the time in which all streams run, first tokens (median, 95th percentile, last), the longest
  gap between two messages of a stream; `of_server_step` and `of_step` are shares of what the steps alone would give.
- `choices`: 16 streams over gRPC with a JSON schema, a tool, five log probabilities, a frequency penalty, a bias, or
  least tokens, of all of them and of one of them; `to_plain` is the step's time beside that of plain ones.
- `beside`: by each door, a chat without a context, of `--chat` tokens, while eight streams run, each on a context of
  its own where there are as many (`--contexts`): its first token alone and beside them, their median and longest gap
  before and while its prompt is read, and `piece_s`, how long one piece of a prompt takes while nothing else runs. Its
  tokens have to be the same both times, and on a CPU those of transformers' `generate` with the same weights
  (`--weights`), else the benchmark fails.

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
from itertools import pairwise
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
from index_store.models.resolve import resolve_model

PHASES = ("step", "plain", "choices", "beside")
_DOORS: tuple[Door, ...] = ("grpc", "http")
_WARM_UP = 16
_SESSIONS = 16
_BESIDE = 8
_CHAT = 32
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
        self,
        pool: Executor,
        processes: int,
        doors: Mapping[Door, str],
        names: Sequence[str],
        answer: int,
        method: str,
    ) -> None:
        """names: of its contexts."""
        self.pool, self.processes, self.doors = pool, processes, doors
        self.answer, self.method = answer, method
        with Client(doors["grpc"]) as client:
            self.model = client.server_status().model
            self.contexts = [client.find_context(name).name for name in names]

    def ask(self, door: Door, number: int, tokens: int, **changes: Any) -> Ask:
        """A question of its own, which a stream of so many tokens answers. changes: None takes an option away."""
        prompt = f"\nChapter {number}. The"
        usual: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "method": self.method}
        usual |= {"text": prompt} if door == "grpc" else {"prompt": prompt, "model": self.model}
        options = {name: value for name, value in {**usual, **changes}.items() if value is not None}
        if "min_tokens" in changes:
            options["min_tokens"] = min(tokens, changes["min_tokens"])
        return Ask(door, self.doors[door], self.contexts[number % len(self.contexts)], options)

    def chat(self, door: Door, text: str) -> Ask:
        """The same without a context."""
        options: dict[str, Any] = {"temperature": 0, "max_tokens": _CHAT}
        if door == "grpc":
            return Ask(door, self.doors[door], "", {**options, "messages": [Message(Role.USER, text)]})
        messages = [{"role": "user", "content": text}]
        return Ask(door, self.doors[door], "", {**options, "messages": messages, "model": self.model})

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


class Chats:
    """Texts for a chat, and what transformers' `generate` says to them."""

    def __init__(self, model: str, text: str) -> None:
        from transformers import AutoTokenizer

        self.folder = resolve_model(model).path
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self._words = text.split()

    def ids(self, text: str) -> Any:
        """[1, tokens]: the prompt."""
        told = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        return told["input_ids"]

    def text(self, tokens: int, start: int) -> str:
        """Of words from a place on, whose prompt has so many tokens at most."""
        least, most = 1, tokens
        while least < most:
            middle = (least + most + 1) // 2
            if self.ids(" ".join(self._words[start : start + middle])).shape[1] <= tokens:
                least = middle
            else:
                most = middle - 1
        return " ".join(self._words[start : start + least])

    def generated(self, text: str, weights: str) -> list[int]:
        """Greedy tokens."""
        import torch
        from transformers import AutoModelForCausalLM

        dtype = "auto" if weights == "auto" else getattr(torch, weights)
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype)
        ids = self.ids(text)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=_CHAT, do_sample=False)
        return [int(id_) for id_ in out[0, ids.shape[1] :]]


def beside(
    report: Report,
    server: Server,
    chats: Chats,
    tokens: int,
    piece: int,
    weights: str,
    told: Mapping[str, Any],
) -> None:
    """A chat without a context, while streams run; before that, the streams alone and the chat alone.

    tokens: of the chat's prompt. piece: of a piece of a prompt. weights: as `generate` has them; "" compares nothing.
    """
    for door in _DOORS:
        short, text = server.chat(door, chats.text(piece, 0)), chats.text(tokens, piece)
        chat = server.chat(door, text)
        first_pieces = [_heard(server, short).first_s for _ in range(3)]
        alone = _heard(server, chat)
        before = server.run(door, [{}] * _BESIDE)
        middle_s = statistics.median(one.arrivals[-1] - one.asked for one in before) / 4
        asks = [server.ask(door, number, server.answer) for number in range(_BESIDE)]
        running = Asked.at_once(server.pool, server.processes - 1, asks)
        chatted = _heard(server, chat, middle_s)
        heard = running.heard()
        begin, end = chatted.asked, chatted.arrivals[0]
        if end > min(one.arrivals[-1] for one in heard):
            raise CheckFailedError(
                "the streams ended before the chat's prompt was read: ask for a longer --answer"
            )
        if (chatted.token_ids, chatted.text) != (alone.token_ids, alone.text):
            raise CheckFailedError(f"the chat beside streams said {chatted.text!r}, alone {alone.text!r}")
        expected = chats.generated(text, weights) if weights else None
        if expected and door == "grpc" and list(chatted.token_ids) != expected:
            raise CheckFailedError(f"the chat said {chatted.token_ids}, generate {expected}")
        if (
            expected
            and door == "http"
            and chatted.text != chats.tokenizer.decode(expected, skip_special_tokens=True)
        ):
            raise CheckFailedError(f"the chat said {chatted.text!r}, generate {expected}")
        row = {
            "chat_tokens": int(chats.ids(text).shape[1]),
            "first_s": chatted.first_s,
            "alone_first_s": alone.first_s,
            "piece_s": statistics.median(first_pieces),
            **_gaps("streams_alone", before),
            **_gaps("prompt_read", heard, begin, end),
            "as_generate": None if expected is None else True,
        }
        report.add({"figure": "beside", "door": door, "streams": _BESIDE, **told, **row})


def _heard(server: Server, ask: Ask, after_s: float = 0.0) -> Heard:
    """One chat's answer. Raises CheckFailedError where there is none."""
    heard = Asked.at_once(server.pool, 1, [ask], after_s).heard()[0]
    if heard.error or not heard.arrivals:
        raise CheckFailedError(f"a chat failed: {heard.error or 'no token came'}")
    return heard


def _gaps(
    name: str, heard: Sequence[Heard], begin: float = 0.0, end: float = float("inf")
) -> dict[str, float]:
    """Median and longest time between two messages of a stream, of those that lie within a time at least in part."""
    pairs = [pair for one in heard for pair in pairwise(one.arrivals)]
    gaps = [after - before for before, after in pairs if after > begin and before < end]
    return {f"{name}_gap_s": statistics.median(gaps), f"{name}_longest_gap_s": max(gaps)}


def step_times(tokens: int, streams: Sequence[int], method: str, answer: int) -> dict[int, float]:
    """Seconds of a whole step in flight by sessions on one context, in a process of its own.

    It is the median of as many steps as an answer has, since a step takes longer with what sessions have said.
    """
    script = Path(__file__).resolve().parents[1] / "whole_model" / "decode_gpu.py"
    shapes = ",".join(f"{tokens}x{count}@1" for count in streams)
    command = [sys.executable, str(script), "--methods", method, "--shapes", shapes, "--turns", str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [row for row in rows if "flight_ms" in row]
    if len(found) != len(streams):
        raise CheckFailedError(f"decode_gpu.py ended with {done.returncode}: {done.stderr[-2000:]}")
    return {count: row["flight_ms"] / 1e3 for count, row in zip(streams, found, strict=True)}


@contextmanager
def served(store: Path, model: str, device: str, weights: str, sessions: int) -> Iterator[dict[Door, str]]:
    """The addresses of a server's doors."""
    command = [sys.executable, "-m", "decode_engine", "serve", "--store", str(store), "--model", model]
    command += ["--device", device, "--listen", "127.0.0.1:0", "--http-port", "0", "--format", "json"]
    command += [] if weights == "auto" else ["--weights", weights]
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
    contexts: Annotated[int, typer.Option(help="Which streams take in turns.", min=1)] = 1,
    chat: Annotated[int, typer.Option(help="Tokens of the chat's prompt.")] = 1024,
    weights: Annotated[str, typer.Option(help="auto, float32 or bfloat16, on a CPU.")] = "auto",
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
        steps = step_times(tokens, counts, method, answer) if "step" in wanted else {}
        for count, step_s in steps.items():
            report.add({"figure": "step", "streams": count, "step_s": step_s, "tokens_per_s": count / step_s})
        if model == "8b":
            model = str(place / "model")
            if not Path(model).exists():
                write_model(Path(model))
        store, names = place / "store", [f"text{number}" for number in range(contexts)]
        if not store.exists():
            for number, name in enumerate(names):
                write_text(text := place / f"{name}.txt", tokens, number * tokens)
                prefill(model, store, text, device)
        sessions = max(_SESSIONS, *counts)
        spawned = get_context("spawn")
        with (
            served(store, model, device, weights, sessions) as doors,
            ProcessPoolExecutor(processes, mp_context=spawned) as pool,
        ):
            server, told = Server(pool, processes, doors, names, answer, method), {"max_sessions": sessions}
            if "plain" in wanted:
                plain(report, server, counts, steps, told)
            if "choices" in wanted:
                choices(report, server, told)
            if "beside" in wanted:
                on_gpu = device == "cuda"
                chats = Chats(model, (place / f"{names[-1]}.txt").read_text())
                beside(report, server, chats, chat, 256 if on_gpu else 128, "" if on_gpu else weights, told)


if __name__ == "__main__":
    typer.run(main)
