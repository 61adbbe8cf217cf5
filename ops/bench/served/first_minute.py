"""What a user waits for in the first minute: a prefill, a server's start, first tokens, and its end.

usage: python ops/bench/served/first_minute.py [--model reader] [--tokens 8192] [--device auto] [--folder DIR]
       python ops/bench/served/first_minute.py --model 8b --tokens 131000 --device cuda

Regime: every command in a process of its own, with its defaults, as a user would type it. `8b` is a model of
Llama-3.1-8B's shape with random weights, written into the folder first (16 GB), with the reader's tokenizer.

- `prefill`: `prefill-worker run` on so many tokens, and again with another text, when weights have been hashed.
- `serve`: `decode-engine serve` until it takes calls, from empty caches (compiled loops, kernels, verdicts) and with
  what that start left there. Then a first token by each method, the context cold and warm, and seconds from SIGTERM to
  the end of the process. `cold` is a first token on a context that is not in memory; its files are in the page cache,
  unless --from-disk asks the system to forget them.
- `gap`: the longest time between two tokens of eight streams of `full`, while nothing else is asked, while 8 and 48
  more join, while another method begins on their context, and while another context is brought into memory.

One JSON line per figure. The answers of cold and warm requests have to be the same, else nothing is reported.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.page_cache import cached_share, drop_from_page_cache, files_below
from harness.report import CheckFailedError, Report, reporting

from decode_engine.evaluation.tasks.documents import source_text
from decode_engine.rpc.client import Client
from index_store.models.resolve import resolve_model
from index_store.models.tokenizer import load_tokenizer

_METHODS = ("full", "refined")
_ANSWER = 8
_STREAMS = 8
_LONG = 1536
"""Tokens of a stream that goes on while other things happen."""
_PROMPT = "What is the access code of the overhead dairy?"


def write_model(folder: Path, layers: int = 32, device: str = "cuda") -> None:
    """The folder of a random 8B shape: weights in four files, and the reader's tokenizer."""
    from harness.made_up.contexts import make_model

    model, _ = make_model(layers, device, attention="sdpa", fused=False)
    model.config.max_position_embeddings = 2**18
    model.save_pretrained(folder, max_shard_size="4GB")
    reader = resolve_model("reader").path
    for file in (*reader.glob("tokenizer*.json"), *reader.glob("*.jinja")):
        shutil.copy(file, folder)


def write_text(file: Path, tokens: int, start: int) -> None:
    """So many tokens of the packaged novels, from a place on; again from their beginning where they end."""
    tokenizer = load_tokenizer(resolve_model("reader"))
    ids = tokenizer.encode(source_text(()))[start:]
    ids = (ids * (tokens // len(ids) + 1))[: tokens - len(tokenizer.prefix_ids)]
    file.write_text(tokenizer.decode(ids))


def prefill(model: str, store: Path, text: Path, device: str) -> dict[str, Any]:
    """A context by the command, with the report that it prints."""
    command = [sys.executable, "-m", "prefill_worker", "run", "--model", model, "--input", str(text)]
    command += ["--store", str(store), "--name", text.stem, "--device", device, "--format", "json"]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailedError(f"prefill-worker ended with {done.returncode}: {done.stderr[-2000:]}")
    told = json.loads(done.stdout)
    return {"wall_s": time.monotonic() - begin, "tokens": told.get("tokens"), **told.get("seconds", {})}


@contextmanager
def served(
    store: Path, model: str, device: str, environment: dict[str, str], ended: list[float]
) -> Iterator[tuple[float, Client]]:
    """A server with its defaults, and the seconds until it took calls. ended: gets those from SIGTERM to its end."""
    command = [sys.executable, "-m", "decode_engine", "serve", "--store", str(store), "--model", model]
    command += ["--device", device, "--listen", "127.0.0.1:0", "--format", "json"]
    begin = time.monotonic()
    log = store.parent / "serve.log"
    with (
        log.open("a") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **environment}
        ) as server,
    ):
        try:
            line = server.stdout.readline() if server.stdout else ""
            if not line:
                raise CheckFailedError(f"the server did not start: {log.read_text()[-2000:]}")
            ready = time.monotonic() - begin
            with Client(json.loads(line)["address"]) as client:
                yield ready, client
            begin = time.monotonic()
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            ended.append(time.monotonic() - begin)
        finally:
            if server.poll() is None:
                server.kill()


def first_token(client: Client, context: str, method: str) -> tuple[float, float, tuple[int, ...]]:
    """Seconds until the first token and of each further one, and the tokens."""
    begin = time.monotonic()
    times: list[float] = []
    tokens: list[int] = []
    with client.generate(context, text=_PROMPT, method=method, max_tokens=_ANSWER, temperature=0) as heard:
        for piece in heard:
            times.append(time.monotonic() - begin)
            tokens += piece.token_ids
    return times[0], (times[-1] - times[0]) / max(1, len(tokens) - 1), tuple(tokens)


def gap_figures(report: Report, client: Client, names: Sequence[str]) -> None:
    """Runs eight streams, and asks for other things beside them."""
    one, other = (client.find_context(name).name for name in names)
    steps: list[tuple[float, float]] = []

    def stream(tokens: int, note: bool) -> None:
        last = None
        with client.generate(one, text=_PROMPT, method="full", max_tokens=tokens, temperature=0) as heard:
            for _ in heard:
                now = time.monotonic()
                if note and last is not None:
                    steps.append((now, now - last))
                last = now

    def join(count: int) -> None:
        with ThreadPoolExecutor(count) as more:
            list(more.map(lambda _: stream(32, False), range(count)))

    with ThreadPoolExecutor(_STREAMS) as pool:
        running = [pool.submit(stream, _LONG, True) for _ in range(_STREAMS)]
        while len(steps) < 16 * _STREAMS and not running[0].done():
            time.sleep(0.01)
        spans = []
        for event, work in (
            ("nothing", lambda: stream(64, False)),
            ("8 more join", lambda: join(8)),
            ("48 more join", lambda: join(48)),
            ("refined begins", lambda: first_token(client, one, "refined")),
            ("another context is loaded", lambda: first_token(client, other, "refined")),
        ):
            begin = time.monotonic()
            work()
            spans.append((event, begin, time.monotonic()))
        if any(each.done() for each in running):
            raise CheckFailedError("the streams ended before all that was to happen beside them")
        for each in running:
            each.result()
    median = statistics.median(gap for _, gap in steps)
    for event, begin, end in spans:
        longest = max((gap for at, gap in steps if begin <= at <= end + median), default=0.0)
        report.add({"figure": "gap", "beside": event, "median_s": median, "longest_s": longest})


def start_figures(
    report: Report, store: Path, model: str, device: str, names: Sequence[str], caches: Path, forget: bool
) -> None:
    """Starts from empty caches, and with them."""
    folder = {"XDG_CACHE_HOME": str(caches), "TRITON_CACHE_DIR": str(caches / "triton")}
    folder["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    for label in ("empty", "filled"):
        files = files_below(store)
        if forget:
            drop_from_page_cache(files)
        share = cached_share(files)
        ended: list[float] = []
        with served(store, model, device, folder, ended) as (ready, client):
            report.add({"figure": "ready", "caches": label, "seconds": ready, "page_cache": share})
            for method, name in zip(_METHODS, names, strict=True):
                context = client.find_context(name).name
                cold, _, tokens = first_token(client, context, method)
                warm, gap, again = first_token(client, context, method)
                if tokens != again:
                    raise CheckFailedError(f"{method}: {tokens} cold, {again} warm")
                row = {"figure": "first_token", "caches": label, "method": method, "cold_s": cold}
                report.add({**row, "warm_s": warm, "token_s": gap})
        report.add({"figure": "stop", "caches": label, "seconds": ended[0]})
    with served(store, model, device, folder, []) as (_, client):
        gap_figures(report, client, names)


def main(
    model: Annotated[str, typer.Option(help="A model, or 8b for a random one of that shape.")] = "reader",
    tokens: Annotated[int, typer.Option(help="Of each of the contexts.")] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    folder: Annotated[
        Path | None, typer.Option(help="For model and store; a temporary one if not given.")
    ] = None,
    from_disk: Annotated[
        bool, typer.Option(help="The page cache forgets the store before each start.")
    ] = False,
) -> None:
    """Reports seconds of prefill, start, first tokens and end."""
    with reporting("first_minute", gpu=False) as report, tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        if model == "8b":
            model = str(place / "model")
            if not Path(model).exists():
                write_model(Path(model))
        names = [f"text-{number}" for number in range(len(_METHODS))]
        for number, name in enumerate(names):
            text = place / f"{name}.txt"
            write_text(text, tokens, number * 1000)
            report.add(
                {"figure": "prefill", "number": number, **prefill(model, place / "store", text, device)}
            )
        start_figures(report, place / "store", model, device, names, place / "caches", from_disk)


if __name__ == "__main__":
    typer.run(main)
