"""The commands `serve` and `ask`. What is slow to import is imported where it is needed."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Annotated

import typer

from decode_engine.cli.device_option import DeviceOption, PlacementOption, PromptsOption
from decode_engine.config import (
    AUTO,
    DEFAULT_LISTEN,
    AskConfig,
    Compilation,
    Prompts,
    ServeConfig,
    available_cores,
    search_cores,
)
from decode_engine.rpc.client import Client, Generation, Summary
from index_store.cli.console import FormatOption, OutputFormat, StoreOption, print_json
from index_store.cli.entry import INTERRUPTED
from index_store.memory.memory_sizes import parse_size

ServerOption = Annotated[
    str, typer.Option("--server", envvar="SPARSEKV_SERVER", metavar="HOST:PORT", help="The server to ask.")
]

ContextOption = Annotated[
    str,
    typer.Option(
        "--context", help="Context: id, its first 6 or more digits, contexts/<id>, or display name."
    ),
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Continue the context by the text as it is, without chat template.")
]
KeepOption = Annotated[
    float | None, typer.Option("--keep", help="Fraction of the keys to keep, for example 0.02.")
]
MassOption = Annotated[
    float | None,
    typer.Option("--mass", help="Share of the attention weight that the kept keys hold, for example 0.99."),
]
TokensKeptOption = Annotated[
    int | None, typer.Option("--tokens-kept", help="Number of keys to keep, whatever the context's length.")
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",  # some versions of typer would call it as the metavar is written
        metavar="METHOD",
        help="Method, as PRESET[+REMAINDER][@OPTION], for example 'pq', 'oracle+centred' or 'pq@period=4'; the "
        "context's own by default.",
    ),
]
PeriodOption = Annotated[
    int,
    typer.Option(
        "--period", help="Decode steps that one search serves; 0 means what the method says, else 1."
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", help="End where this text would appear; repeatable. A question ends at a line break."
    ),
]
ShowTimingsOption = Annotated[
    bool,
    typer.Option("--show-timings", help="Tell on standard error what was touched and how long it took."),
]


def serve(
    store: StoreOption,
    model: Annotated[str, typer.Option(help="'reader', or the path of a Hugging Face model folder.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 picks a free one.")
    ] = DEFAULT_LISTEN,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Host memory for contexts, for example 8GiB; the least recently used go first, requests wait while "
            "those in use fill it. auto: 8GiB, or beside a GPU half of what is free once the model is loaded.",
        ),
    ] = AUTO,
    device_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="GPU memory for contexts, likewise. auto: half of what is free once the model is loaded.",
        ),
    ] = AUTO,
    placement: PlacementOption = AUTO,
    session_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory that requests in progress may come to need together for prompts and answers; others wait. "
            "auto: a quarter of what is free once the model is loaded.",
        ),
    ] = AUTO,
    max_sessions: Annotated[int, typer.Option(help="Requests in progress at once.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are refused.")] = 64,
    prompt_chunk: Annotated[
        int,
        typer.Option(
            min=0,
            help="Prompt tokens per step, of all prompts; answers pause for that long. 0: 256 on a CPU, 512 on a GPU.",
        ),
    ] = 0,
    prompts: PromptsOption = Prompts.AUTO,
    threads: Annotated[
        int, typer.Option(help="Threads of searches and matrix products; 0 means all cores.")
    ] = 0,
    search_threads: Annotated[
        int,
        typer.Option(
            min=0,
            help="Threads that search on the CPU beside a GPU, for contexts of placement host; each takes a core "
            "while a step runs. 0: all cores but two.",
        ),
    ] = 0,
    lanes: Annotated[
        int,
        typer.Option(
            help="Parts that a batch over contexts in host memory is split into. They run at once, so that one's rows "
            "are fetched, or searched for, while the GPU computes another. Each reads the model's weights for itself, "
            "and has slots of its own for rows."
        ),
    ] = 1,
    waves: Annotated[
        int,
        typer.Option(
            help="Parts, by KV heads, in which the lists of a layer come back in placement host: rows of one are "
            "fetched while threads search for the next. 0: two where a lane has one session, four where it has more."
        ),
    ] = 0,
    device: DeviceOption = AUTO,
    compilation: Annotated[
        Compilation,
        typer.Option(
            "--compile",
            help="Compile the model around the attention, on a GPU: faster steps for a start that takes minutes.",
        ),
    ] = Compilation.OFF,
    prefetch: Annotated[
        bool,
        typer.Option(
            "--prefetch",
            help="Fetch rows of contexts in host memory a layer ahead, for queries that are foretold from the layer "
            "before; where a GPU searches.",
        ),
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="Stored dtype of the contexts to serve; auto: the model's.")
    ] = "auto",
    grace: Annotated[float, typer.Option(help="Seconds for running requests when told to stop.")] = 10.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Serve a store's contexts over gRPC until interrupted (SIGINT, SIGTERM or SIGHUP).

    Prints the address once requests are taken: a sentence, or with --format json one object on one line. Logs go to
    standard error, as JSON lines with --format json.
    """
    config = ServeConfig(
        store=store,
        model=model,
        listen=listen,
        memory=None if memory == AUTO else parse_size(memory),
        device_memory=None if device_memory == AUTO else parse_size(device_memory),
        placement=placement,
        session_memory=None if session_memory == AUTO else parse_size(session_memory),
        max_sessions=max_sessions,
        max_waiting=max_waiting,
        prompt_chunk=prompt_chunk or None,
        prompts=prompts,
        threads=threads or available_cores(),
        search_threads=search_threads or search_cores(),
        lanes=lanes,
        waves=waves,
        device=device,
        compilation=compilation,
        prefetch=prefetch,
        dtype=dtype,
        grace=grace,
    )
    from decode_engine.cli.logs import logging_to_stderr
    from decode_engine.rpc.server import DecodeServer

    as_json = output is OutputFormat.JSON
    with logging_to_stderr(as_json), _signals() as stopping, DecodeServer(config) as server:
        server.load()
        if as_json:
            ready = {"event": "serving", "address": server.address, "store": str(store), "model": model}
            typer.echo(json.dumps(ready))
        else:
            typer.echo(f"Serving {store} with {model} at {server.address} (Ctrl-C stops)")
        sys.stdout.flush()
        stopping.wait()
        server.stop(grace)


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second one ends the process at once."""
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()
        signal.signal(number, signal.SIG_DFL)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ask(
    prompt: Annotated[str, typer.Argument(help="The question.")],
    context: ContextOption,
    server: ServerOption = DEFAULT_LISTEN,
    raw: RawOption = False,
    method: MethodOption = None,
    keep: KeepOption = None,
    mass: MassOption = None,
    tokens_kept: TokensKeptOption = None,
    period: PeriodOption = 0,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate; 256 by default.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Sample from this much probability.")] = None,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens; 0 means all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    stop: StopOption = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait for the whole answer.")] = None,
    show_timings: ShowTimingsOption = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Ask a stored context a question and stream the answer."""
    config = AskConfig(
        context=context,
        prompt=prompt,
        server=server,
        raw=raw,
        method=method,
        keep=keep,
        mass=mass,
        tokens_kept=tokens_kept,
        period=period,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop) if stop is not None else None,
        timeout=timeout,
    )
    write = _stream_text if output is OutputFormat.TEXT else _collect
    with Client(config.server) as client:
        found = client.find_context(config.context)
        with _generate(client, found.name, config) as generation:
            try:
                text, token_ids = write(generation)
            except KeyboardInterrupt:
                generation.cancel()
                raise typer.Exit(INTERRUPTED) from None
    summary = generation.summary
    if output is OutputFormat.JSON:
        print_json({"context": found.name, "text": text, "token_ids": token_ids, **asdict(summary)})
    if show_timings:
        for line in describe_summary(summary):
            typer.echo(line, err=True)


def _generate(client: Client, name: str, config: AskConfig) -> Generation:
    return client.generate(
        name,
        text=config.prompt if config.raw else None,
        question=None if config.raw else config.prompt,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed,
        stop=config.stop_strings,
        method=config.method,
        keep_ratio=config.keep,
        target_mass=config.mass,
        token_budget=config.tokens_kept,
        search_period=config.period,
        timeout_s=config.timeout,
    )


def _stream_text(generation: Generation) -> tuple[str, list[int]]:
    """Writes the answer as it arrives, without the blanks that it begins with."""
    begun = False
    try:
        for piece in generation:
            text = piece.text if begun else piece.text.lstrip()
            begun = begun or bool(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    finally:
        if begun:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return "", []


def _collect(generation: Generation) -> tuple[str, list[int]]:
    pieces = list(generation)
    return "".join(piece.text for piece in pieces), [id_ for piece in pieces for id_ in piece.token_ids]


def describe_summary(summary: Summary) -> list[str]:
    """What a generation touched and took, in a few lines."""
    times, keys = summary.timings, summary.selection
    sparse = (
        "no layer searches"
        if keys.fraction_sparse is None
        else f"{keys.fraction_sparse:.2%} of the keys in the layers that search"
    )
    budget = f" ({summary.budget}, remainder {summary.remainder})" if summary.budget else ""
    per_token = times.decode_ns / max(times.decode_steps, 1) / 1e6
    parts = {
        "load": times.load_ns,
        "queue": times.queue_ns,
        "search": times.search_ns,
        "gather": times.gather_ns,
        "attend": times.attend_ns,
        "append": times.append_ns,
    }
    rest = max(0, times.total_ns - sum(parts.values()))
    moved = []
    if times.host_bytes_read or times.rows_reused:
        moved = [
            f"keys and values: {times.host_bytes_read / 2**20:.1f} MiB read from host memory in steps, "
            f"{times.rows_reused} rows found on the device, which waited {times.device_wait_for_host_ns / 1e6:.1f} ms "
            "for the host"
        ]
    listed = ", ".join(f"{name} {spent / 1e6:.1f}" for name, spent in parts.items())
    return [
        f"method {summary.method}{budget}: {sparse}, {keys.fraction_all:.2%} over all layers",
        f"tokens: {summary.context_tokens} context, {summary.prompt_tokens} prompt, "
        f"{summary.completion_tokens} answer ({summary.finish_reason})",
        f"time: {times.total_ns / 1e6:.1f} ms, first token after {times.first_token_ns / 1e6:.1f} ms, "
        f"{per_token:.1f} ms per token",
        *moved,
        f"of it, in sum over all layers and steps: {listed}, the rest of the model and waiting {rest / 1e6:.1f} ms",
    ]
