"""Time to first token on a context that is in memory: of a first and a second request, and of 16 at once.

usage: python ops/bench/prefill/first_token.py [--tokens 32768,131072]
       python ops/bench/prefill/first_token.py --at-once --tokens 131072 --prompt-tokens 64

On a GPU the model is transformers' Llama in the shape of Llama-3.1-8B with random weights, bfloat16; where there is
none, the packaged reader. Contexts are random and made in memory, with the indexes of all methods; how long stored ones
take to load is `first_minute.py`'s. A request is what the engine makes of one: a session, the prompt in pieces, the
likeliest token on the host. Everything has run once before, on another context, so that no kernel is compiled while it
is timed.

- `warm`: the first request of a kind and length, and `second`, the median of further ones.
- `together`: requests with prompts of their own that come at once, through the engine: the first and the last of their
  first tokens, and the mean. `alone_s` is one by itself, `apart_s` the last one where each prompt is read by itself, as
  those with seeds are. `passes` are the tokens of each pass over the model: one pass where all are read together.

`exact` prompts attend to everything, `sparse` ones to what one search selects for each piece of the prompt. Before a
time is reported, exact prompts in both placements, alone and together, and sparse ones with a budget of all keys, are
compared with exact attention in device memory. One JSON line per figure; the exit code is 1 when a check fails.

With `--at-once` only `together` of exact prompts is measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
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
    HOST_GB,
    PlacedContexts,
    make_model,
    make_ranges,
    release,
)
from harness.parsing import parse_counts, parse_method
from harness.report import compare, reporting
from harness.steps.prompts_at_once import (
    PromptRunner,
    Together,
    first_tokens,
    read_prompts,
    together_figures_of,
)
from torch import Tensor

from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import ATTENTION_NAME, register_attention
from decode_engine.settings.command_options import Prompts
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.loading import load_model, resolve_model
from index_store.selection.budgets import Ratio
from index_store.store.description.context_id import ModelIdentity

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLACEMENTS = (Placement.DEVICE, Placement.HYBRID)
PIECE = 512
"""Prompt tokens of one pass, as `serve` has them on a GPU."""
CHUNKS = {"cpu": 256, "cuda": 512}
"""Prompt tokens of one turn, likewise."""
TURNS = 4
CHECKED_PROMPT = 24


class Requests:
    """Requests on one context that is in memory."""

    def __init__(self, model: Any, context: ResidentContext) -> None:
        self._model, self._context = model, context

    def first_token(self, method: Method, ids: Sequence[int], prompts: Prompts) -> float:
        """Seconds from the request to its first token on the host."""
        begin = time.perf_counter()
        session = Session(self._context, method.on(self._context.manifest))
        int(self.read(session, ids, prompts).argmax())
        taken = time.perf_counter() - begin
        session.close()
        return taken

    def logits(self, method: Method, ids: Sequence[int], prompts: Prompts) -> Tensor:
        """After the prompt, [V] float32."""
        session = Session(self._context, method.on(self._context.manifest))
        found = self.read(session, ids, prompts)
        session.close()
        return found

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
        fitted = method.on(self._context.manifest)
        runner = PromptRunner(self._model, prompts)
        return first_tokens(runner, self._context, fitted, token_ids, CHUNKS[DEVICE.type], apart)


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


def warm_figures(
    requests: Requests, methods: Sequence[Method], lengths: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The first request of a kind and length, and the median of later ones."""
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
    requests: Requests, methods: Sequence[Method], token_ids: Sequence[Sequence[int]]
) -> Iterator[dict[str, Any]]:
    """Requests that come at once with these prompts; exact prompts, and those of the methods."""
    kinds = [(get_method("full"), Prompts.EXACT)]
    kinds += [(method, prompts) for method in methods for prompts in (Prompts.SPARSE, Prompts.EACH)]
    for method, prompts in kinds:
        yield {
            "figure": "together",
            "method": method.name,
            "budget": "" if method.budget is None else method.budget.label,
            "prompts": prompts.value,
            **together_figures_of(partial(requests.together, method, prompts), token_ids, TURNS),
        }


def several_prompts(length: int, count: int) -> list[list[int]]:
    """So many different ones."""
    return [[max(0, token - number) for token in prompt_of(length)] for number in range(count)]


def figures(
    model: Any,
    identity: ModelIdentity,
    tokens: int,
    methods: Sequence[Method],
    lengths: Sequence[int],
    host_gb: float,
    together: int = 16,
    placements: Sequence[Placement] = PLACEMENTS,
) -> Iterator[dict[str, Any]]:
    """All figures of one length. Without methods only exact prompts that come at once; checked, then timed."""
    full, token_ids = get_method("full"), several_prompts(lengths[0], together)
    placed = PlacedContexts(identity, [full, *methods], tokens, 1, DEVICE, make_ranges(host_gb))
    expected, expected_together = None, torch.empty(0)
    for placement in placements:
        (context,) = placed.make(placement)
        requests, where = Requests(model, context), {"placement": placement.value}
        differences, expected = check(requests, methods, expected, placement.value)
        if not len(expected_together):
            expected_together = torch.stack([requests.logits(full, ids, Prompts.EXACT) for ids in token_ids])
        sessions = [Session(context, full.on(context.manifest)) for _ in token_ids]
        found = torch.cat(read_prompts(model, sessions, token_ids, Prompts.EXACT))
        differences["together"] = compare(
            found, expected_together, of=f" of prompts together, {placement.value}"
        )
        yield {**where, "figure": "check", **differences}
        for row in warm_figures(requests, methods, lengths):
            yield {**where, **row}
        for row in together_figures(requests, methods, token_ids):
            yield {**where, **row}
        release([context])
    placed.release()


def main(
    tokens: Annotated[str, typer.Option(help="Lengths of contexts, comma-separated.")] = "32768,131072",
    methods: Annotated[
        str, typer.Option(help="NAME[:KEEP], comma-separated.")
    ] = "refined:0.01,squeezed:0.05",
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of prompts, comma-separated.")] = "64,512",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 32,
    together: Annotated[int, typer.Option(help="Requests that come at once.")] = 16,
    at_once: Annotated[bool, typer.Option("--at-once", help="Only requests that come at once.")] = False,
    host_gb: Annotated[float, typer.Option(help="Page-locked for contexts in host memory.")] = HOST_GB,
) -> None:
    """Times first tokens; one JSON line per figure."""
    parsed = [] if at_once else [parse_method(text) for text in methods.split(",")]
    lengths, on_gpu = parse_counts(prompt_tokens), DEVICE.type == "cuda"
    places = PLACEMENTS if on_gpu else PLACEMENTS[:1]
    with reporting("first_token", gpu=False) as report:
        model, identity = make_model(layers) if on_gpu else load_reader()
        # The first one compiles kernels and is not reported.
        for number, length in enumerate((4096, *parse_counts(tokens))):
            for row in figures(model, identity, length, parsed, lengths, host_gb, together, places):
                if number:
                    report.add({"tokens": length, "layers": identity.layers, **row})


if __name__ == "__main__":
    typer.run(main)
