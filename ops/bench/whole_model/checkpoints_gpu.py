"""Checkpoints of random weights as they are served from a folder: what is stored of a text, and what it is asked in.

usage: python ops/bench/whole_model/checkpoints_gpu.py --shapes qwen3-next --tokens 131072 --layers 12
       python ops/bench/whole_model/checkpoints_gpu.py --shapes 8b,8b-float8 --tokens 32768 --layers 16

Each shape is written to a folder, read by a prefill, and served from the store: nothing is made in memory alone.

- `qwen3-next`: three layers of linear attention, then one that sees all keys, as often as `--layers` has it; 64 experts
  in place of 512, ten of which a token takes, as in the large one.
- `8b`: Llama-3.1-8B. `8b-float8`: the same weights in float8, by transformers' own quantizer.

Figures:

- `stored`: bytes of rows, of states and of indexes, and the seconds of the prefill by its phases.
- `first_token`: from the request to the token on the host, of a first and a second request.
- `step`: milliseconds of a token through the engine, in flight, with so many sessions, each on a copy of the context of
  its own. Before, logits of captured steps are compared with those of the general path, and those of methods with a
  budget of all keys with full attention's.
- `weights`: KL of the next token from the 8 bits of the weights alone (both with `full`), and beside it that of the
  method alone (same weights), over the same answer.
- `native`: what transformers says when it is to compute in float8 itself.
- `products`: milliseconds of all of a step's projections, in bfloat16 and by torch's own products of float8 in blocks.

One JSON line per figure; the exit code is 1 when a check fails.
"""

from __future__ import annotations

import io
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.parsing import parse_counts, parse_method
from harness.report import TOLERANCE, CheckFailedError, Report, compare, failure, reporting
from harness.steps.answers import ask
from harness.steps.captured_steps import tidy_up
from harness.timing import graph_us
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, Qwen3NextConfig

from decode_engine.engine.engine import Engine
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.orders.order import Order
from index_store.cli.console import LineReporter
from index_store.memory.arena import Arena
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.loading import identify, resolve_model
from index_store.models.model_folder import first_line
from index_store.selection.budgets import Ratio
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from prefill_worker.build.stages import Clock
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import carry_out
from prefill_worker.jobs.prepared_job import job_over_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROOM = MemoryBytes(2**36, 2**36)
QUIET = LineReporter(io.StringIO())
PROMPT = 64
POSITIONS = 2**18
BLOCK = 128
"""Rows and columns of a weight that share a scale."""
CHECKED = 4
ROUTED = 0.2
"""In place of `TOLERANCE` where rounding chooses other experts here and there."""
DISTINCT = 3
"""Layers' worth of weights that are multiplied in turn: more than a cache holds."""


def config_of(shape: str, layers: int) -> Any:
    """The configuration of so many layers."""
    common = {"num_hidden_layers": layers, "max_position_embeddings": POSITIONS, "eos_token_id": None}
    if shape == "qwen3-next":
        return Qwen3NextConfig(num_experts=64, **common)
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=None,
        **common,
    )


def write_folder(folder: Path, config: Any) -> None:
    """Random weights in bfloat16, and the reader's tokenizer, which nothing is asked with."""
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    _add_tokenizer(folder)


def write_float8(folder: Path, source: Path) -> None:
    """The weights of another folder in float8."""
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", device_map=str(DEVICE), quantization_config=FineGrainedFP8Config()
    )
    model.save_pretrained(folder)
    _add_tokenizer(folder)


def _add_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("reader").path / name, folder)


@dataclass(frozen=True)
class Prefilled:
    """A context in a store, and what its prefill took."""

    store: Store
    manifest: Manifest
    seconds: dict[str, float]
    total_s: float

    @classmethod
    def make(cls, folder: Path, home: Path, tokens: int, methods: Sequence[Method]) -> Prefilled:
        """Of random tokens, with the indexes of the methods."""
        config = PrefillConfig(
            model=str(folder),
            store=home,
            input=(Path("-"),),
            method=tuple(method.name for method in methods),
            dense_layers="none",
            device=DEVICE.type,
        )
        resolved, generator = resolve_model(str(folder)), torch.Generator().manual_seed(1)
        ids = torch.randint(identify(resolved).vocab_size, (tokens,), generator=generator).tolist()
        begin, clock = time.perf_counter(), Clock()
        store = Store(home, create=True)
        manifest = carry_out(job_over_tokens(config, resolved, ids, "text"), QUIET, clock).manifest
        return cls(store, manifest, clock.seconds, time.perf_counter() - begin)

    def figures(self) -> dict[str, Any]:
        """Bytes by what they are, and seconds by phase."""
        entries: dict[str, list[Any]] = {"rows": [self.manifest.kv], "states": [self.manifest.state]}
        entries["indexes"] = [entry for index in self.manifest.indexes for entry in index.arrays]
        sizes = {
            f"{name}_mb": sum(entry.nbytes for entry in own if entry is not None) / 1e6
            for name, own in entries.items()
        }
        return {"figure": "stored", **sizes, "total_s": self.total_s, "seconds": self.seconds}


class Served:
    """A model, and as many copies of one context in memory as sessions will be."""

    def __init__(self, folder: Path, prefilled: Prefilled, copies: int) -> None:
        self._stack = ExitStack()
        self.runner = ModelRunner(resolve_model(str(folder)), DEVICE)
        self.manifest = prefilled.manifest
        self.contexts: list[ResidentContext] = []
        for _ in range(copies):
            arena = Arena(ROOM.host) if DEVICE.type == "cpu" else Arena(ROOM, device=DEVICE)
            self.contexts.append(self._stack.enter_context(arena.acquire(prefilled.store, self.manifest.id)))

    def close(self) -> None:
        """Lets go of everything."""
        self._stack.close()
        self.runner.close()

    def start(self, method: Method, prompt: Sequence[int]) -> tuple[Session, Tensor]:
        """A session that has read the prompt, and the logits [V] after it."""
        session = self.runner.start(self.contexts[0], method.on(self.manifest))
        return session, self.runner.read([session], [prompt])[0][-1]

    def check(self, methods: Sequence[Method], prompt: Sequence[int]) -> dict[str, float]:
        """Differences of steps, with a budget of all keys, from full attention by the general path, which is exact.

        Raises CheckFailedError where one is too large.
        """
        tolerance = ROUTED if self.manifest.model.states is not None else TOLERANCE
        session, _ = self.start(get_method("full"), prompt)
        expected = torch.cat([self.runner.forward([session], [[token]])[0] for token in prompt[:CHECKED]])
        session.close()
        differences = {}
        for method in methods:
            session, _ = self.start(replace(method, budget=Ratio(1.0)) if method.sparse else method, prompt)
            found = torch.cat([self.runner.feed(session, token) for token in prompt[:CHECKED]])
            differences[method.name] = compare(found, expected, tolerance, f" of {method.name}")
            differences[f"{method.name}_captured"] = float(self.runner.has_graph(session))
            session.close()
        return differences

    def first_tokens(self, method: Method, prompt: Sequence[int]) -> list[float]:
        """Seconds of requests one after the other."""
        taken = []
        for _ in range(4):
            begin = time.perf_counter()
            session, logits_V = self.start(method, prompt)
            int(logits_V.argmax())
            taken.append(time.perf_counter() - begin)
            session.close()
        return taken

    def step_ms(self, method: Method, sessions: int, prompt: Sequence[int], tokens: int) -> float:
        """Median of a token's milliseconds, of three times as many answers as sessions."""
        fitted = method.on(self.manifest)
        self.runner.prepare(fitted, sessions, Placement.DEVICE)
        engine: Engine[Session] = Engine(self.runner, max_sessions=sessions)
        order = Order(max_tokens=tokens)
        on = [(context, fitted) for context in self.contexts[:sessions]]
        prompts = [[token + row for token in prompt] for row in range(sessions)]
        ask(engine, self.runner, on, prompts, order)  # the first of a kind compiles
        answers = [each for _ in range(3) for each in ask(engine, self.runner, on, prompts, order)]
        return statistics.median(each.token_ms for each in answers)

    def answer(
        self, method: Method, prompt: Sequence[int], said: Sequence[int] | None, count: int
    ) -> tuple[list[int], Tensor]:
        """Tokens and log probabilities [count, V] float32 on the host. said: tokens to be fed; greedy ones else."""
        session, logits_V = self.start(method, prompt)
        tokens: list[int] = []
        rows = [logits_V]
        while len(rows) < count:
            tokens.append(int(rows[-1].argmax()) if said is None else said[len(tokens)])
            rows.append(self.runner.feed(session, tokens[-1])[-1])
        session.close()
        return tokens, torch.stack(rows).log_softmax(-1).cpu()


def divergence(expected_TV: Tensor, found_TV: Tensor) -> float:
    """Mean KL(expected || found) in nats."""
    expected_TV, found_TV = expected_TV.double(), found_TV.double()
    return float((expected_TV.exp() * (expected_TV - found_TV)).sum(-1).mean())


def linear_ms(kind: str, rows: int, layers: int) -> float:
    """Of so many layers' projections of the 8B shape for so many rows, in one CUDA graph."""
    sizes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    works = [product_of(kind, rows, high, wide) for _ in range(DISTINCT) for high, wide in sizes]
    return graph_us(works) * len(sizes) * layers / 1e3


def product_of(kind: str, rows: int, high: int, wide: int) -> Callable[[], Tensor]:
    """A product of inputs [rows, wide] and a weight [high, wide]; of float8 both have scales, and inputs get theirs."""
    weight = torch.randn(high, wide, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(rows, wide, device=DEVICE, dtype=torch.bfloat16)
    if kind == "bfloat16":
        return lambda: torch.nn.functional.linear(x, weight)
    coded = weight.to(torch.float8_e4m3fn)
    scales = torch.ones(high // BLOCK, wide // BLOCK, device=DEVICE)

    def product() -> Tensor:
        blocks = x.view(rows, wide // BLOCK, BLOCK)
        own = blocks.abs().amax(-1).float().clamp(min=1e-12) / 448
        input8 = (blocks / own[..., None]).to(torch.float8_e4m3fn).view(rows, wide)
        by_column = own.t().contiguous().t()
        return torch._scaled_mm(input8, coded.t(), by_column, scales.t(), out_dtype=torch.bfloat16)

    return product


def products(layers: int) -> Iterator[dict[str, Any]]:
    """Of 1, 4, 16 and 64 sessions."""
    for rows in (1, 4, 16, 64):
        line: dict[str, Any] = {"figure": "products", "rows": rows, "layers": layers}
        for kind in ("bfloat16", "float8"):
            try:
                line[f"{kind}_ms"] = linear_ms(kind, rows, layers)
            except Exception as error:  # a build of torch that lacks them
                line[f"{kind}_error"] = first_line(error)
            tidy_up()
        yield line


def native(folder: Path) -> dict[str, Any]:
    """What comes of a checkpoint in float8 whose weights transformers leaves as they are."""
    line: dict[str, Any] = {"figure": "native"}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=str(DEVICE))
        with torch.inference_mode():
            found = model(torch.tensor([[5, 6, 7]], device=DEVICE)).logits
        return {**line, "finite": bool(found.isfinite().all())}
    except Exception as error:
        return {**line, "refused": first_line(error)}


def shape_figures(
    folder: Path, home: Path, tokens: int, methods: Sequence[Method], sessions: Sequence[int], answer: int
) -> Iterator[dict[str, Any]]:
    """All of a folder but what compares it with others."""
    prefilled = Prefilled.make(folder, home, tokens, methods)
    yield prefilled.figures()
    tidy_up()
    served = Served(folder, prefilled, max(sessions))
    prompt = list(range(100, 100 + PROMPT))
    try:
        try:
            yield {"figure": "check", **served.check(methods, prompt)}
        except CheckFailedError as error:  # what it took is told all the same, and the run fails
            yield {"figure": "check", **failure(error)}
        for method in methods:
            first, *others = served.first_tokens(method, prompt)
            yield {
                "figure": "first_token", "method": method.name, "first_s": first, "second_s": statistics.median(others)
            }  # fmt: skip
            for count in sessions:
                step_ms = served.step_ms(method, count, prompt, answer)
                yield {"figure": "step", "method": method.name, "sessions": count, "step_ms": step_ms}
    finally:
        served.close()


def weight_figures(
    stores: Mapping[Path, Path], tokens: int, methods: Sequence[Method], count: int
) -> Iterator[dict[str, Any]]:
    """KL from the rounding of weights, and from each method with the weights of each folder.

    stores: of the folders, the exact one first.
    """
    prompt, full = list(range(100, 100 + PROMPT)), get_method("full")
    said: list[int] | None = None
    by_full: list[Tensor] = []
    for folder, home in stores.items():
        served = Served(folder, Prefilled.make(folder, home, tokens, methods), 1)
        found, logits = served.answer(full, prompt, said, count)
        said = said or found
        by_full.append(logits)
        for method in methods:
            if method.name != full.name:
                kl = divergence(logits, served.answer(method, prompt, said, count)[1])
                yield {"figure": "weights", "weights": folder.name, "method": method.name, "kl_attention": kl}
        served.close()
        tidy_up()
    alike = float((by_full[0].argmax(-1) == by_full[1].argmax(-1)).double().mean())
    yield {"figure": "weights", "kl_weights": divergence(*by_full), "alike": alike, "tokens": count}


def main(
    shapes: Annotated[str, typer.Option(help="qwen3-next, 8b, 8b-float8; comma-separated.")] = "qwen3-next",
    tokens: Annotated[int, typer.Option(help="Of the context.")] = 131072,
    layers: Annotated[int, typer.Option(help="Of the model.")] = 12,
    methods: Annotated[str, typer.Option(help="NAME[:KEEP], comma-separated.")] = "full,refined:0.01",
    sessions: Annotated[str, typer.Option(help="Numbers of sessions.")] = "1,4",
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    folder: Annotated[Path | None, typer.Option(help="Where folders and stores are made.")] = None,
) -> None:
    """Makes, stores, checks and times; one JSON line per figure."""
    named, parsed = shapes.split(","), [parse_method(text) for text in methods.split(",")]
    counts = parse_counts(sessions)
    with reporting("checkpoints_gpu") as report, tempfile.TemporaryDirectory(dir=folder) as made:
        homes = {name: Path(made, name) for name in named}
        for name in named:
            begin = time.perf_counter()
            try:
                if name == "8b-float8":
                    write_float8(homes[name], homes["8b"])
                else:
                    write_folder(homes[name], config_of(name, layers))
            except Exception as error:
                report.add({"figure": "made", "shape": name, **failure(error)})
                homes.pop(name)
                continue
            tidy_up()
            report.add({"figure": "made", "shape": name, "layers": layers, "s": time.perf_counter() - begin})
            store = Path(made, f"store-{name}")
            _add(report, name, tokens, shape_figures(homes[name], store, tokens, parsed, counts, answer))
        if {"8b", "8b-float8"} <= set(homes):
            pair = {homes[name]: Path(made, f"store-{name}") for name in ("8b", "8b-float8")}
            _add(report, "8b", tokens, weight_figures(pair, tokens, parsed, answer))
            if DEVICE.type == "cuda":
                report.add(native(homes["8b-float8"]))
                tidy_up()
                for row in products(layers):
                    report.add(row)


def _add(report: Report, shape: str, tokens: int, rows: Iterator[dict[str, Any]]) -> None:
    """Adds figures as they come; one that fails ends those of its shape alone."""
    try:
        for row in rows:
            report.add({"shape": shape, "tokens": tokens, **row})
    except Exception as error:
        report.add({"shape": shape, "tokens": tokens, **failure(error)})
    tidy_up()


if __name__ == "__main__":
    typer.run(main)
