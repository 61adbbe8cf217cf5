"""Time to first token: from a cold store, from a warm arena, for a second request on the same context, for 16 at once.

usage: python ops/bench/prefill/first_token.py [--tokens 32768,131072] [--no-cold]
       python ops/bench/prefill/first_token.py --only-cold --tokens 131072 --methods refined:0.01
       python ops/bench/prefill/first_token.py --at-once --tokens 131072 --prompt-tokens 64

On a GPU the model is transformers' Llama in the shape of Llama-3.1-8B with random weights, bfloat16; where there is
none, the packaged reader. Contexts are random, written as files by the store's own writer, with the indexes of all
methods. A request is what the engine makes of one: a lease on the context, a session, the prompt in pieces, the
likeliest token on the host. Everything has run once before, on another context, so that no kernel is compiled while it
is timed.

- `cold`: the store's files are not in the page cache, the arena is empty; the prompt runs behind the loading, as in
  `serve` when nobody else is served. `cached` is the same with the files in the page cache. `page_cache` is the share
  of the files that was in it before, as the system tells: 0 where dropping them is allowed.
- `load_s`: all layers into an empty arena, files in the page cache; then `warm`, the first request after that, and
  `second`, the median of further ones.
- `together`: requests with prompts of their own that come at once, through the engine: the first and the last of their
  first tokens, and the mean. `alone_s` is one by itself, `apart_s` the last one where each prompt is read by itself, as
  those with seeds are. `passes` are the tokens of each pass over the model: one pass where all are read together.
- `stream`: decode steps of full attention with keys and values in host memory, which every step reads all.

`exact` prompts attend to everything, `sparse` ones to what one search selects for each piece of the prompt. Before a
time is reported, exact prompts in both placements, and sparse ones with a budget of all keys, are compared with exact
attention in device memory. One JSON line per figure; the exit code is 1 when a check fails.

With `--only-cold` contexts are checked, loaded, and waited for; nothing else is measured.

With `--at-once` there is no store: contexts are made in memory, and only `together` of exact prompts is measured, after
the logits of prompts that are read together were compared with those of each by itself in device memory.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.made_up.contexts import (
    DTYPE,
    HOST_GB,
    QUERY_STD,
    PlacedContexts,
    make_model,
    make_ranges,
    release,
)
from harness.page_cache import cached_share, drop_from_page_cache, files_below, read_into_page_cache
from harness.parsing import parse_counts, parse_method
from harness.report import compare, reporting
from harness.steps.prompts_at_once import (
    PromptRunner,
    Together,
    first_tokens,
    read_prompts,
    together_figures_of,
)
from harness.timing import seconds
from torch import Tensor

from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import ATTENTION_NAME, register_attention
from decode_engine.model.warm_up import made_up_context
from decode_engine.settings.command_options import Prompts
from index_store.memory.arena import Arena
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.loading import load_model, resolve_model
from index_store.selection.budgets import Ratio
from index_store.store.catalog import Store
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLACEMENTS = (Placement.DEVICE, Placement.HYBRID)
DISTINCT = 2
"""Layers with contents of their own; the others repeat them, which no cache is large enough to profit from."""
PIECE = 512
"""Prompt tokens of one pass, as `serve` has them on a GPU."""
CHUNKS = {"cpu": 256, "cuda": 512}
"""Prompt tokens of one turn, likewise."""
TURNS = 4
STEPS = 6
CHECKED_PROMPT = 24
WRITERS = 8


def host_chunks(made: ResidentContext, layer: int) -> list[tuple[str, int, Tensor]]:
    """Array, KV head and contents of one layer's chunks."""
    arrays = {"kv": made.kv(layer)} | {
        f"index/{index.name}/{name}": array
        for index in made.manifest.indexes
        for name, array in made.index(index.name, layer).arrays().items()
    }
    return [(path, head, chunk.cpu()) for path, array in arrays.items() for head, chunk in enumerate(array)]


def write_context(store: Store, made: ResidentContext, id_: str, distinct: int) -> Manifest:
    """Writes a made-up context into the store, several chunks at a time; its first layers take turns over all."""
    manifest = replace(made.manifest, id=id_)
    entries = {entry.path: entry for entry in manifest.arrays}
    with store.writer(id_) as writer, ThreadPoolExecutor(WRITERS) as pool:
        writer.write_tokens(made.tokens())
        for entry in entries.values():
            if entry.path != "tokens":
                writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
        held = [host_chunks(made, layer) for layer in range(min(distinct, manifest.model.layers))]
        done = [
            pool.submit(writer.write_chunk, path, (layer, head), chunk)
            for layer in range(manifest.model.layers)
            for path, head, chunk in held[layer % distinct]
        ]
        for each in done:
            each.result()
        return writer.publish(manifest)


class Requests:
    """Requests on one context, in one placement."""

    def __init__(self, model: Any, store: Store, manifest: Manifest, placement: Placement) -> None:
        self._model = model
        self._store = store
        self._id = manifest.id
        room = MemoryBytes(2**40, 2**40)
        self.arena = Arena(room, device=DEVICE, placement=placement)

    def lease(self, early: bool = False) -> AbstractContextManager[ResidentContext]:
        """The context, as long as it is wanted."""
        return self.arena.acquire(self._store, self._id, early=early)

    def first_token(self, method: Method, ids: Sequence[int], prompts: Prompts, early: bool = False) -> float:
        """Seconds from the request to its first token on the host."""
        begin = time.perf_counter()
        with self.lease(early) as context:
            session = Session(context, method.on(context.manifest))
            int(self.read(session, ids, prompts).argmax())
            taken = time.perf_counter() - begin
            session.close()
        return taken

    def logits(self, method: Method, ids: Sequence[int], prompts: Prompts) -> Tensor:
        """After the prompt, [V] float32."""
        with self.lease() as context:
            session = Session(context, method.on(context.manifest))
            found = self.read(session, ids, prompts)
            session.close()
        return found

    def step_seconds(self, method: Method, ids: Sequence[int]) -> float:
        """Median seconds of a decode step after a prompt, by the general path."""
        with self.lease() as context:
            session = Session(context, method.on(context.manifest))
            token, times = int(self.read(session, ids, Prompts.EXACT).argmax()), []
            for _ in range(STEPS):
                begin = time.perf_counter()
                token = int(self.read(session, [token], Prompts.EXACT).argmax())
                times.append(time.perf_counter() - begin)
            session.close()
        return statistics.median(times[1:])

    def read(self, session: Session, ids: Sequence[int], prompts: Prompts) -> Tensor:
        """Logits [V] float32 after the tokens, which are fed in pieces like the engine's."""
        logits = torch.empty(0)
        for start in range(0, len(ids), PIECE):
            (logits,) = read_prompts(self._model, [session], [ids[start : start + PIECE]], prompts)
        return logits[-1]

    def together(
        self, method: Method, prompts: Prompts, token_ids: Sequence[Sequence[int]], apart: bool
    ) -> Together:
        """Requests that come at once. apart: each prompt is read by itself."""
        runner = PromptRunner(self._model, prompts)
        with self.lease() as context:
            fitted = method.on(context.manifest)
            return first_tokens(runner, context, fitted, token_ids, CHUNKS[DEVICE.type], apart)


class HeldRequests(Requests):
    """Requests on a context that is in memory."""

    def __init__(self, model: Any, context: ResidentContext) -> None:
        self._model, self._context = model, context

    def lease(self, early: bool = False) -> AbstractContextManager[ResidentContext]:
        return nullcontext(self._context)


def check(
    requests: Requests, methods: Sequence[Method], expected: Tensor | None, where: str
) -> tuple[dict[str, float], Tensor]:
    """Differences of prompts from the expected logits, by default those of exact prompts here; and those logits."""
    ids = prompt_of(CHECKED_PROMPT)
    exact = requests.logits(get_method("full"), ids, Prompts.EXACT)
    wanted = exact if expected is None else expected
    found = {"exact": compare(exact, wanted, of=f" of exact prompts, {where}")}
    for method in methods:
        if isinstance(method.budget, Ratio):
            whole = replace(method, budget=Ratio(1.0))
            label = f"sparse_{method.name}"
            found[label] = compare(
                requests.logits(whole, ids, Prompts.SPARSE), wanted, of=f" of {label}, {where}"
            )
    return found, wanted


def load_reader() -> tuple[Any, ModelIdentity]:
    """The packaged reader, on the CPU."""
    register_attention()
    loaded = load_model(resolve_model("reader"), ATTENTION_NAME, device=torch.device("cpu"))
    return loaded.model, loaded.identity


def prompt_of(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    ids: list[int] = torch.randint(0, 4096, (count,), generator=generator).tolist()
    return ids


def cold_figure(
    requests: Requests, method: Method, ids: Sequence[int], files: Sequence[Path]
) -> dict[str, Any]:
    """The first request after a start, with files read from the disk and from the page cache; the arena is empty."""
    row: dict[str, Any] = {"figure": "cold", "method": method.name, "prompts": Prompts.EXACT.value}
    for label, prepare in (("cold", drop_from_page_cache), ("cached", read_into_page_cache)):
        prepare(files)
        row[f"{label}_page_cache"] = cached_share(files)
        row[f"{label}_s"] = requests.first_token(method, ids, Prompts.EXACT, early=True)
        requests.arena.clear()
    return row


def warm_figures(
    requests: Requests, methods: Sequence[Method], lengths: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Requests on a context that is in the arena: the first one of a kind and length, and the median of later ones."""
    for method in methods:
        for prompts in (Prompts.EXACT, Prompts.SPARSE):
            for length in lengths:
                ids = prompt_of(length)
                times = [requests.first_token(method, ids, prompts)]
                turns = TURNS if times[0] < 1.0 else 1
                times += [requests.first_token(method, ids, prompts) for _ in range(turns)]
                yield {
                    "figure": "warm",
                    "method": method.name,
                    "budget": "" if method.budget is None else method.budget.label,
                    "prompts": prompts.value,
                    "prompt_tokens": length,
                    "warm_s": times[0],
                    "second_s": statistics.median(times[1:]),
                }


def together_figures(
    requests: Requests, methods: Sequence[Method], length: int, count: int
) -> Iterator[dict[str, Any]]:
    """So many requests that come at once, with prompts of one length; exact prompts, and those of the methods."""
    kinds = [(get_method("full"), Prompts.EXACT)]
    kinds += [(method, prompts) for method in methods for prompts in (Prompts.SPARSE, Prompts.EACH)]
    for method, prompts in kinds:
        read = partial(requests.together, method, prompts)
        yield {
            "figure": "together",
            "method": method.name,
            "budget": "" if method.budget is None else method.budget.label,
            "prompts": prompts.value,
            **together_figures_of(read, several_prompts(length, count), TURNS),
        }


def several_prompts(length: int, count: int) -> list[list[int]]:
    """So many different ones."""
    return [[max(0, token - number) for token in prompt_of(length)] for number in range(count)]


def at_once_figures(
    model: Any, identity: ModelIdentity, tokens: int, length: int, count: int, host_gb: float
) -> Iterator[dict[str, Any]]:
    """Exact prompts that come at once on a context made in memory, in both placements; checked, then timed."""
    full, token_ids = get_method("full"), several_prompts(length, count)
    placed = PlacedContexts(identity, [full], tokens, 1, DEVICE, make_ranges(host_gb))
    expected = torch.empty(0)
    for placement in PLACEMENTS:
        (context,) = placed.make(placement)
        requests = HeldRequests(model, context)
        if not len(expected):
            expected = torch.stack([requests.logits(full, ids, Prompts.EXACT) for ids in token_ids])
        sessions = [Session(context, full.on(context.manifest)) for _ in token_ids]
        found = torch.cat(read_prompts(model, sessions, token_ids, Prompts.EXACT))
        yield {
            "figure": "at_once",
            "placement": placement.value,
            "logits_difference": compare(found, expected, of=f" of prompts together, {placement.value}"),
            **together_figures_of(partial(requests.together, full, Prompts.EXACT), token_ids, TURNS),
        }
        release([context])
    placed.release()


def figures(
    model: Any,
    identity: ModelIdentity,
    tokens: int,
    methods: Sequence[Method],
    lengths: Sequence[int],
    folder: Path | None,
    cold: bool = True,
    together: int = 16,
    placements: Sequence[Placement] = PLACEMENTS,
    warm: bool = True,
) -> Iterator[dict[str, Any]]:
    """All figures of one length. cold, warm: whether requests wait for files, and for nothing."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        store = Store(Path(temporary) / "store", create=True)
        first, *others = methods
        made = made_up_context(
            identity, DTYPE, first, tokens, also=others, distinct=DISTINCT, device=DEVICE, seed=tokens,
            calibrated_for=QUERY_STD,
        )  # fmt: skip
        begin = time.perf_counter()
        manifest = write_context(store, made, "0" * 64, DISTINCT)
        written_s = time.perf_counter() - begin
        made.release()
        del made
        torch.cuda.empty_cache()
        nbytes = sum(path.stat().st_size for path in files_below(store.path / "contexts"))
        yield {"figure": "written", "written_s": written_s, "gb": nbytes / 1e9}
        files, expected = files_below(store.path / "contexts"), None
        for placement in placements:
            where = {"placement": placement.value}
            requests = Requests(model, store, manifest, placement)
            load_s = seconds(partial(load, requests, store, manifest), DEVICE)
            stats = requests.arena.stats()
            differences, expected = check(requests, methods, expected, placement.value)
            yield {**where, "figure": "check", **differences}
            yield {
                **where,
                "figure": "load",
                "load_s": load_s,
                "host_gb": stats.used.host / 1e9,
                "device_gb": stats.used.device / 1e9,
                "page_locked_gb": stats.page_locked_bytes / 1e9,
            }
            for row in warm_figures(requests, methods, lengths) if warm else ():
                yield {**where, **row}
            for row in together_figures(requests, methods, lengths[0], together) if warm else ():
                yield {**where, **row}
            if warm and placement is Placement.HYBRID:
                yield {**where, **stream_figure(requests, manifest, lengths[0])}
            requests.arena.clear()
            if cold:
                yield {**where, **cold_figure(requests, methods[0], prompt_of(lengths[0]), files)}


def stream_figure(requests: Requests, manifest: Manifest, prompt: int) -> dict[str, Any]:
    """Decode steps of full attention, each of which reads all keys and values from host memory."""
    step_s = requests.step_seconds(get_method("full"), prompt_of(prompt))
    return {
        "figure": "stream",
        "method": "full",
        "step_s": step_s,
        "tokens_per_s": 1.0 / step_s,
        "gb_per_s": manifest.kv_bytes / 1e9 / step_s,
    }


def load(requests: Requests, store: Store, manifest: Manifest) -> None:
    """Brings the whole context into the arena."""
    with requests.arena.acquire(store, manifest.id):
        pass


def main(
    tokens: Annotated[str, typer.Option(help="Lengths of contexts, comma-separated.")] = "32768,131072",
    methods: Annotated[
        str, typer.Option(help="NAME[:KEEP], comma-separated.")
    ] = "refined:0.01,squeezed:0.05",
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of prompts, comma-separated.")] = "64,512",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 32,
    folder: Annotated[Path | None, typer.Option(help="Where contexts are written.")] = None,
    cold: Annotated[bool, typer.Option(help="Also time requests that wait for files to be read.")] = True,
    only_cold: Annotated[
        bool, typer.Option("--only-cold", help="Only requests that wait for files to be read.")
    ] = False,
    together: Annotated[int, typer.Option(help="Requests that come at once.")] = 16,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Only requests that come at once, on contexts made in memory.")
    ] = False,
    host_gb: Annotated[float, typer.Option(help="Page-locked for these in host memory.")] = HOST_GB,
) -> None:
    """Times first tokens; one JSON line per figure."""
    parsed, lengths = [parse_method(text) for text in methods.split(",")], parse_counts(prompt_tokens)
    on_gpu = DEVICE.type == "cuda"
    places = PLACEMENTS if on_gpu else PLACEMENTS[:1]
    with reporting("first_token", gpu=False) as report:
        model, identity = make_model(layers) if on_gpu else load_reader()
        for length in parse_counts(tokens) if at_once else ():
            for row in at_once_figures(model, identity, length, lengths[0], together, host_gb):
                report.add({"tokens": length, "layers": identity.layers, **row})
        if at_once:
            return
        # The first one compiles kernels and is not reported.
        for number, length in enumerate((4096, *parse_counts(tokens))):
            for row in figures(
                model,
                identity,
                length,
                parsed,
                lengths,
                folder,
                (cold or only_cold) and number > 0,
                together,
                places,
                not only_cold or number == 0,
            ):
                if number:
                    report.add({"tokens": length, "layers": identity.layers, **row})


if __name__ == "__main__":
    typer.run(main)
