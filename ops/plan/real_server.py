"""One server on this machine under a Zipf load: what each request found, and the figures that predict it."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import numpy as np
from harness.report import CheckFailedError
from harness.served import Shelf, serving

from decode_engine.rpc.client import Client
from index_store.memory.context_loading import placed_bytes
from index_store.store.catalog import Store

ANSWER = 16
_SESSIONS = 4
_ALONE = 12


def ask(address: str, name: str) -> dict[str, Any]:
    """One greedy answer: seconds to its first token and to its end, and whether the context was in memory."""
    with Client(address, timeout_s=300) as client:
        began = time.monotonic()
        options: dict[str, Any] = {
            "text": "In that year the keeper",
            "max_tokens": ANSWER,
            "min_tokens": ANSWER,
        }
        with client.generate(name, method="full", explain=True, patience_s=60.0, **options) as generation:
            first = 0.0
            for _ in generation:
                first = first or time.monotonic() - began
            why = generation.summary.explanation
        if why is None:
            raise CheckFailedError("the server explains nothing")
        return {"first_s": first, "end_s": time.monotonic() - began, "hit": why.tier in ("host", "device")}


def record(folder: Path, contexts: int, tokens: int, seconds: float, rate: float) -> None:
    """Writes trace.jsonl and figures.json into the folder. Figures are those of requests one or four at a time."""
    shutil.rmtree(folder / "store", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    shelf = Shelf(folder / "store", ("full", "refined"))
    names = [
        f"contexts/{shelf.add_slice(str(number), tokens, number, contexts).id}" for number in range(contexts)
    ]
    nbytes = max(placed_bytes(each).total for each in Store(folder / "store").list())
    memory = nbytes * (contexts // 3) + nbytes // 2
    random = np.random.default_rng(0)
    shares = 1 / np.arange(1, contexts + 1)
    asked = random.choice(contexts, int(rate * seconds), p=shares / shares.sum())
    times = np.cumsum(random.exponential(1 / rate, len(asked)))
    with serving(folder / "store", "--memory", str(memory), "--max-sessions", str(_SESSIONS)) as server:
        for name in names:
            ask(server.address, name)  # compiles, and reads every file once
        figures = alone(server.address, names, tokens, 1 / rate)
        found: list[dict[str, Any]] = [{} for _ in asked]
        began = time.monotonic()

        def one(number: int) -> None:
            found[number] = ask(server.address, names[asked[number]])

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(asked))]
        for thread, at in zip(threads, times, strict=True):
            time.sleep(max(0.0, began + at - time.monotonic()))
            thread.start()
        for thread in threads:
            thread.join()
    if not all(found):
        raise CheckFailedError(f"{found.count({})} of {len(found)} requests failed")
    rows = [
        {"at_s": float(at), "context": int(context), **each}
        for at, context, each in zip(times, asked, found, strict=True)
    ]
    (folder / "trace.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sizes = {"contexts": contexts, "tokens": tokens, "context_bytes": nbytes, "device": memory}
    told = {
        **sizes,
        "sessions": _SESSIONS,
        "answer": ANSWER,
        "host_rate": nbytes / figures.pop("load_s"),
        **figures,
    }
    (folder / "figures.json").write_text(json.dumps(told, indent=2) + "\n")


def alone(address: str, names: list[str], tokens: int, pause_s: float) -> dict[str, float]:
    """Medians: a context's loading, a prompt's reading, and a step's parts, from 1 and 4 sessions at once.

    pause_s: before each, as in the run: a server that is asked without pauses answers several times as fast where other
    processes use the cores.
    """

    def rested(name: str) -> dict[str, Any]:
        time.sleep(pause_s)
        return ask(address, name)

    hits = [rested(names[0]) for _ in range(_ALONE + 1)][1:]
    misses = [each for each in map(rested, names[1 : _ALONE + 1]) if not each["hit"]]
    if not all(each["hit"] for each in hits) or not misses:
        raise CheckFailedError("memory holds what it should not, or does not hold what it should")
    some = names[1 : _SESSIONS + 1]
    for name in some:
        ask(address, name)
    with ThreadPoolExecutor(_SESSIONS) as pool:
        together = [each for _ in range(3) for each in pool.map(partial(ask, address), some)]
    one, four = (
        statistics.median((each["end_s"] - each["first_s"]) / (ANSWER - 1) for each in timed)
        for timed in (hits, together)
    )
    first, later = (statistics.median(each["first_s"] for each in timed) for timed in (hits, misses))
    token_s = max(0.0, four - one) / ((_SESSIONS - 1) * tokens)
    step_s = one - token_s * tokens
    if min(later - first, first - one, step_s) <= 0:
        raise CheckFailedError("what was timed alone does not add up: the machine is too busy; try again")
    return {"load_s": later - first, "prompt_s": first - one, "step_s": step_s, "token_s": token_s}
