"""Decode steps of a model that is divided among GPUs by transformers' own plan, beside the same on one GPU.

usage: python ops/bench/whole_model/tensor_parallel_gpu.py [--ranks 1,2] [--sessions 1,4] [--methods full,refined:0.01]

The model has the shape of Llama-3-70B (hidden 8192, 64 query heads, 8 KV heads) with random weights in bfloat16 and as
many of its 80 layers as `--layers` says; contexts are random. Every rank is a process with one GPU: it has its part of
the weights and the part of its KV heads of every context and index, and runs the engine's own captured steps over them.
Whole weights and contexts are the same for any number of ranks.

- `step_ms`, `flight_ms`: as in `decode_gpu.py`, of the first rank.
- `bytes_ms`: what this rank reads in a step (its weights but the embedding, and its part of keys and values, or of the
  coarse copy and the kept share of keys and values) over the bandwidth of a plain copy. `reduce_ms`: all sums of a step
  over the ranks alone, in one CUDA graph. `over_bytes`: the shorter of the step's times over the sum of both.
- `speedup`: of the first number of ranks over this one.
- `logits_difference`: after each of some given tokens, from those of the first number of ranks, whose own `full` is
  compared with the general path. `tokens_alike`: how often the same token is the likeliest.

Before all that the packaged reader, loaded in parts by the plan, reads a prompt and answers: the tokens of all numbers
of ranks must be the same.

One JSON line per figure; the exit code is 1 when a check fails.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import torch.distributed as dist
import typer
from harness.made_up import contexts as made_up_contexts
from harness.made_up.contexts import PlacedContexts, read_bytes
from harness.parsing import parse_counts, parse_method
from harness.report import CheckFailedError, compare, failure, reporting
from harness.steps.captured_steps import SteppedSessions, tidy_up, time_captured, time_flight
from harness.steps.general_steps import forward
from harness.timing import TURNS, copy_bandwidth, event_ms
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import ATTENTION_NAME, packed, register_attention
from decode_engine.model.divided_model import join, localize, meeting_place
from decode_engine.model.unstored import no_context
from decode_engine.steps.step_graph import step_model
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import METHODS
from index_store.models.loading import load_model, load_tokenizer, resolve_model
from index_store.selection.budgets import Ratio
from index_store.store.description.context_id import ModelIdentity
from index_store.store.heads_part import HeadsPart

PROGRAM = (sys.executable, __file__)
"""What a rank runs."""
TOKENS = 8
"""Given ones, after which logits are compared."""
TOLERANCE = 0.1
"""As of `report.compare`: sums over ranks are rounded in another order."""
PROMPT, ANSWER = 700, 24
_FILL = "The harbour keeps a list of ships. "
_FACT = "The access code of the overhead dairy is 1398192. "


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama."""

    hidden: int = 8192
    intermediate: int = 28672
    query_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256

    def config(self, layers: int) -> LlamaConfig:
        """Of so many layers."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers,
            num_attention_heads=self.query_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=2**21,
            rope_theta=500000.0,
            tie_word_embeddings=False,
        )

    def identity(self, layers: int) -> ModelIdentity:
        """The same."""
        sizes = (layers, self.query_heads, self.kv_heads, self.head_dim, self.vocabulary, 2**21)
        return ModelIdentity("random-70b", "LlamaForCausalLM", "0" * 64, "0" * 64, *sizes)


SHAPES = {"70b": Shape(), "toy": Shape(256, 512, 8, 4, 64, 1024)}


def make_divided(shape: Shape, layers: int, device: torch.device, dtype: str, config: Any) -> Any:
    """A model of random weights, the same for any number of ranks, of which this one has its part."""
    settings = shape.config(layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            settings, dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME
        )
    if config is not None:
        kind = type(model)
        config, _, meshes = kind.prepare_distribute_model(config)
        kind.maybe_distribute_model(model, config, meshes)
    for prefix, module in model.named_modules():
        for name, meta in list(module._parameters.items()):
            if meta is None:  # a bias that there is not
                continue
            whole = torch.empty(meta.shape, dtype=meta.dtype, device=device)
            if meta.dim() == 1:
                whole.fill_(1.0)
            else:
                seed = zlib.crc32(f"{prefix}.{name}".encode())
                whole.normal_(0.0, 0.02, generator=torch.Generator(device).manual_seed(seed))
            module._parameters[name] = torch.nn.Parameter(_own(whole, meta), requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(settings).to(device)
    if config is not None:
        localize(model)
    model.eval()
    if device.type == "cuda":
        from index_store.models.fused.layers import fuse_layers

        fuse_layers(model)
    return model


def _own(whole: Tensor, meta: Any) -> Tensor:
    """This rank's part of a weight, divided as its placeholder is."""
    placements = getattr(meta, "placements", ())
    if not placements:
        return whole

    (placement,) = placements
    if not isinstance(placement, Shard):
        raise TypeError(f"a weight is placed as {placement}")
    return distribute_tensor(whole, meta.device_mesh, [placement], src_data_rank=None)


def part_of(context: ResidentContext, part: HeadsPart) -> ResidentContext:
    """A rank's part of a context in its GPU's memory: views."""
    manifest, layers = context.manifest, range(context.manifest.model.layers)
    own = part.of(manifest.model.kv_heads)
    return ResidentContext(
        part.manifest(manifest),
        context.tokens(),
        {layer: context.stored_rows(layer)[own] for layer in layers},
        {
            (entry.name, layer): {
                name: array[own] for name, array in context.index(entry.name, layer).arrays().items()
            }
            for entry in manifest.indexes
            for layer in entry.layers
        },
        device=context.device,
    )


class Stepped(SteppedSessions):
    """Sessions whose own tokens are those that they are fed."""

    def start(self, method: Method) -> None:
        self.sessions = [Session(context, method.on(context.manifest)) for context in self.contexts]
        if not all(self.stepper.takes(session) for session in self.sessions):
            raise CheckFailedError("the method does not run in a graph")
        self.parts = [self.sessions]


def given_tokens(sessions: int, vocabulary: int) -> list[list[int]]:
    """So many for each step."""
    generator = torch.Generator().manual_seed(1)
    found: list[list[int]] = torch.randint(vocabulary, (TOKENS, sessions), generator=generator).tolist()
    return found


def logits_after(stepped: Stepped, method: Method, vocabulary: int) -> Tensor:
    """[T, B, V] float32 after each of the given tokens."""
    stepped.start(method)
    found = []
    for tokens in given_tokens(len(stepped.contexts), vocabulary):
        stepped.step(tokens)
        found.append(stepped.logits().cpu())
    return torch.stack(found)


def general_logits(model: Any, contexts: Sequence[ResidentContext], vocabulary: int) -> Tensor:
    """The same of full attention by the general path."""
    sessions = [Session(context, METHODS["full"].on(context.manifest)) for context in contexts]
    steps = given_tokens(len(contexts), vocabulary)
    return torch.stack([forward(model, sessions, tokens).cpu() for tokens in steps])


def compared(found: Tensor, expected: Tensor) -> dict[str, float]:
    """How far logits are apart. Raises CheckFailedError as `compare` does."""
    alike = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    return {
        "logits_difference": compare(found, expected, TOLERANCE),
        "tokens_alike": float(alike),
    }


def reduce_ms(rows: int, hidden: int, times: int) -> float:
    """Milliseconds of so many sums over all ranks, of what a layer gives for so many rows."""
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            dist.all_reduce(x)
    found = [event_ms(graph.replay) for _ in range(2 * TURNS)]  # as often on every rank
    return statistics.median(found[TURNS:])


def attended_bytes(contexts: Sequence[ResidentContext], method: Method) -> float:
    """Of contexts, what a step reads at least: all keys and values, or its index and the share that is kept."""
    total = 0.0
    for context in contexts:
        layers = range(context.manifest.model.layers)
        kv = sum(context.stored_rows(layer).nbytes for layer in layers)
        if not method.sparse or method.index is None:
            total += kv
            continue
        share = method.budget.keep if isinstance(method.budget, Ratio) else 0.0
        arrays = [
            array for layer in layers for array in context.index(method.index.name, layer).arrays().values()
        ]
        total += share * kv + sum(array.numel() * array.element_size() for array in arrays)
    return total


def answer(part: HeadsPart, device: torch.device, config: Any) -> list[int]:
    """Tokens that the packaged reader says after a prompt, by the general path."""
    folder = resolve_model("reader")
    options = {} if config is None else {"distributed_config": config}
    loaded = load_model(
        folder,
        ATTENTION_NAME,
        device=device,
        options=options,
        arrange=localize if options else lambda _: None,
    )
    tokenizer = load_tokenizer(folder, loaded.identity.tokenizer_fingerprint)
    text = (
        _FILL * 30
        + _FACT
        + _FILL * 30
        + "\nQuestion: What is the access code of the overhead dairy?\nAnswer:"
    )
    context = no_context(part.identity(loaded.identity), loaded.kv_dtype, device)
    session = Session(context, METHODS["full"].on(context.manifest), loaded.forms)
    fed, said = tokenizer.encode(text)[-PROMPT:], []
    for _ in range(ANSWER):
        inputs = packed([session], [fed], device, exact=True)
        with torch.inference_mode():
            logits = loaded.model(**inputs).logits[0, -1]
        inputs["decode_step"].advance()
        fed = [int(logits.argmax())]
        said += fed
    return said


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks do; the first one writes lines into a file, and logits beside it, or compares with those."""

    shape: Shape
    layers: int
    tokens: int
    sessions: Sequence[int]
    methods: Sequence[str]
    turns: int
    device: torch.device
    dtype: str
    folder: Path
    reference: bool

    def lines(self, part: HeadsPart, config: Any) -> Iterator[dict[str, Any]]:
        """A line for each figure."""
        begin = time.perf_counter()
        said = answer(part, self.device, config)
        kept = self.folder / "said.json"
        if self.reference and part.rank == 0:
            kept.write_text(json.dumps(said))
        alike = said == json.loads(kept.read_text()) if kept.exists() else True
        line: dict[str, Any] = {"figure": "reader", "answer": said, "same_tokens": alike}
        yield line | {"s": time.perf_counter() - begin} | ({} if alike else {"error": "other tokens"})
        begin = time.perf_counter()
        identity = self.shape.identity(self.layers)
        model = make_divided(self.shape, self.layers, self.device, self.dtype, config)
        bandwidth = copy_bandwidth() if self.device.type == "cuda" else 1e10
        note(part, f"{self.layers} layers made in {time.perf_counter() - begin:.1f} s")
        methods = [parse_method(label) for label in self.methods]
        for count in self.sessions:
            begin = time.perf_counter()
            with patch.object(made_up_contexts, "DTYPE", self.dtype):
                placed = PlacedContexts(identity, methods, self.tokens, count, self.device)
                whole = placed.make(Placement.DEVICE)
            placed.release()
            contexts = [part_of(each, part) for each in whole]
            note(part, f"{count} contexts made in {time.perf_counter() - begin:.1f} s")
            reduced = 0.0
            if part.ranks > 1 and self.device.type == "cuda":
                reduced = reduce_ms(count, self.shape.hidden, 2 * self.layers)
            for label, method in zip(self.methods, methods, strict=True):
                line = {"figure": "step", "method": label, "sessions": count, "tokens": self.tokens}
                try:
                    line |= self.measure(model, contexts, label, method, part.rank)
                except Exception as error:  # others may well run
                    line |= failure(error)
                else:
                    read = read_bytes(model) + attended_bytes(contexts, method)
                    bytes_ms = read / bandwidth * 1e3
                    took = min(line["step_ms"], line.get("flight_ms", line["step_ms"]))
                    line |= {"bytes_ms": bytes_ms, "gb": read * 1e-9, "reduce_ms": reduced, "token_ms": took}
                    line |= {"over_bytes": took / (bytes_ms + reduced)}
                tidy_up()
                yield line
            for each in (*contexts, *whole):
                each.release()
            tidy_up()

    def measure(
        self, model: Any, contexts: Sequence[ResidentContext], label: str, method: Method, rank: int
    ) -> dict[str, Any]:
        """Checks, then times. Raises CheckFailedError."""
        vocabulary = self.shape.vocabulary
        threads = SearchThreads(1)
        stepped = Stepped(step_model(model), model, contexts, threads)
        try:
            exact = replace(method, budget=Ratio(1.0)) if method.sparse else method
            found = {"all": logits_after(stepped, exact, vocabulary)}
            if method.sparse:
                found["own"] = logits_after(stepped, method, vocabulary)
            row: dict[str, Any] = {}
            for kind, logits in found.items():
                file = self.folder / f"{label.replace('/', '_')}-{len(contexts)}-{kind}.pt"
                if self.reference:
                    if rank == 0:
                        torch.save(logits, file)
                    if kind == "all":
                        row |= compared(logits, general_logits(model, contexts, vocabulary))
                else:
                    suffix = "" if kind == "own" or not method.sparse else "_all_keys"
                    row |= {
                        f"{name}{suffix}": value for name, value in compared(logits, torch.load(file)).items()
                    }
            timed = time_captured(stepped, method, self.turns)
            row |= timed.steps() | time_flight(stepped, method, self.turns, timed.said)
            return row | {"captured": stepped.graphs[0].captured}
        finally:
            threads.close()


def note(part: HeadsPart, what: str) -> None:
    """Says how far the first rank has come."""
    if part.rank == 0:
        typer.echo(f"{time.strftime('%H:%M:%S')} {part.ranks} ranks: {what}", err=True)


def run_rank(job: Job, part: HeadsPart, place: str) -> None:
    """The body of a rank."""
    register_attention()
    config = join(part, place, job.device) if part.ranks > 1 else None
    with open(job.folder / "lines.jsonl", "a") as lines:
        for line in job.lines(part, config):
            if part.rank == 0:
                lines.write(json.dumps({"ranks": part.ranks, **line}) + "\n")
                lines.flush()
    if config is not None:
        dist.destroy_process_group()


def start_ranks(count: int, command: Sequence[str], seconds: float) -> int:
    """Runs the command once for each rank, with one GPU each; 0 where all ended well. No rank outlives this."""
    place, started = meeting_place(), []
    try:
        for rank in range(count):
            own = {"CUDA_VISIBLE_DEVICES": str(rank), "NCCL_NVLS_ENABLE": "0"}
            told = ["--rank", str(rank), "--of", str(count), "--place", place]
            started.append(subprocess.Popen([*command, *told], env={**os.environ, **own}))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            codes = [process.poll() for process in started]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(0.05)
        typer.echo(f"ranks did not end within {seconds:g} s", err=True)
        return 1
    finally:
        for process in started:
            process.kill()
            process.wait()


def with_speedups(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Lines of several numbers of ranks, beside those of the first."""
    first: dict[tuple[str, int], float] = {}
    for line in lines:
        if "token_ms" in line:
            base = first.setdefault((line["method"], line["sessions"]), line["token_ms"])
            yield line | {"speedup": base / line["token_ms"]}
        else:
            yield line


def main(
    ranks: Annotated[
        str, typer.Option(help="Numbers of GPUs, comma-separated; the first is compared with.")
    ] = "1,2",
    shape: Annotated[str, typer.Option(help="Of the model: 70b or toy.")] = "70b",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 8,
    tokens: Annotated[int, typer.Option(help="Of a context.")] = 131072,
    sessions: Annotated[str, typer.Option(help="Each on a context of its own, comma-separated.")] = "1,4",
    methods: Annotated[str, typer.Option(help="Comma-separated; NAME:KEEP.")] = "full,refined:0.01",
    turns: Annotated[int, typer.Option(help="Steps that are timed of each figure.")] = 20,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it out in the interpreter.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="Of weights, keys and values.")] = "bfloat16",
    seconds: Annotated[float, typer.Option(help="Each number of ranks has.")] = 200.0,
    rank: Annotated[int, typer.Option(hidden=True)] = -1,
    of: Annotated[int, typer.Option(hidden=True)] = 0,
    place: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    reference: Annotated[bool, typer.Option("--reference", hidden=True)] = False,
) -> None:
    """Times steps of a divided model."""
    counts = parse_counts(ranks)
    if folder is not None:
        job = Job(
            SHAPES[shape], layers, tokens, parse_counts(sessions), methods.split(","), turns,
            torch.device(device), dtype, folder, reference,
        )  # fmt: skip
        run_rank(job, HeadsPart(rank, of), place)
        return
    with (
        reporting("tensor_parallel_gpu", gpu=device == "cuda") as report,
        tempfile.TemporaryDirectory() as made,
    ):
        told = ["--shape", shape, "--layers", str(layers), "--tokens", str(tokens), "--sessions", sessions]
        told += ["--methods", methods, "--turns", str(turns), "--device", device, "--dtype", dtype]
        told += ["--folder", made]
        for number, count in enumerate(counts):
            command = [*PROGRAM, *told, *([] if number else ["--reference"])]
            code = start_ranks(count, command, seconds)
            if code:
                report.add({"figure": "ranks", "ranks": count, "error": f"a rank ended with {code}"})
        text = ""
        with suppress(FileNotFoundError):
            text = (Path(made) / "lines.jsonl").read_text()
        for line in with_speedups([json.loads(each) for each in text.splitlines()]):
            report.add({"layers": layers, "shape": shape} | line)


if __name__ == "__main__":
    typer.run(main)
