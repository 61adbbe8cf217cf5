"""Trains the reader: a small language model that looks facts up in a long context.

Reads what prep_corpus.py wrote, writes a Hugging Face folder (config.json, model.safetensors, tokenizer). The packaged
checkpoint came from the default options on one data-centre GPU, about seven minutes. A smoke test on a CPU:

  python train.py DATA OUT --device cpu --no-compile --workers 1 --hidden 32 --layers 2 --intermediate 64 \\
      --head-dim 16 --stages 256:2:5
"""

from __future__ import annotations

import argparse
import json
import logging
import lzma
import multiprocessing
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue as ProcessQueue
from pathlib import Path

import numpy as np
import torch
from facts import TRAINING_WORDS, SequenceMaker, Tokens, Weights
from network import MAX_POSITIONS, Reader, Shape, export
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

EVALUATED_LENGTHS = (2048, 8192, 32_768)
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
WARM_UP_STEPS = 100
CONSTANT_SHARE = 0.6
LEAST_RATE = 0.02
CHAT_TEMPLATE = Path(__file__).parents[2] / "index_store/models/reader/chat_template.jinja"

logger = logging.getLogger("train")


@dataclass(frozen=True, slots=True)
class Stage:
    """Trains on sequences of `length` tokens, `batch` at a time, for `seconds`."""

    length: int
    batch: int
    seconds: int

    @classmethod
    def parse(cls, text: str) -> Stage:
        length, batch, seconds = map(int, text.split(":"))
        return cls(length, batch, seconds)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made nearly orthogonal by five Newton-Schulz steps; for weight matrices."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(average, group["momentum"]))
                scale = max(1, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - group["lr"] * 0.01)
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors and singular values near 1, in bfloat16."""
    x: Tensor = matrix.bfloat16()
    x = x / (x.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x.T if tall else x


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder that prep_corpus.py wrote")
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=704)
    parser.add_argument("--rope-theta", type=float, default=500_000.0)
    parser.add_argument("--qk-norm", action="store_true", help="normalise queries and keys (Qwen3)")
    parser.add_argument(
        "--stages", default="2048:64:130,8192:16:70,32768:4:170", help="length:batch:seconds,..."
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW, for embedding and norms")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="Muon, for matrices")
    parser.add_argument("--answer-weight", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=12, help="processes that make sequences")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_sequences(
    results: ProcessQueue[tuple[Tokens, Weights]],
    length: int,
    seed: int,
    stream: Path,
    data: Path,
    answer_weight: float,
) -> None:
    """A worker's endless loop."""
    text = np.load(stream, mmap_mode="r")
    words = json.loads((data / "words.json").read_text())[:TRAINING_WORDS]
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    maker = SequenceMaker(text, words, tokenizer, seed, answer_weight)
    while True:
        results.put(maker.sequence(length))


@contextmanager
def batches(
    stage: Stage, arguments: argparse.Namespace, stream: Path, first_seed: int
) -> Iterator[queue.Queue[tuple[Tensor, Tensor]]]:
    """A queue of (tokens, weights), each [batch, length + 1], filled by worker processes while the block runs."""
    context = multiprocessing.get_context("fork")
    sequences: ProcessQueue[tuple[Tokens, Weights]] = context.Queue(maxsize=4 * stage.batch)
    workers = [
        context.Process(
            target=make_sequences,
            args=(
                sequences,
                stage.length,
                first_seed + number,
                stream,
                arguments.data,
                arguments.answer_weight,
            ),
            daemon=True,
        )
        for number in range(arguments.workers)
    ]
    for worker in workers:
        worker.start()
    ready: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue(3)
    stopped = threading.Event()

    def collect() -> None:
        while not stopped.is_set():
            made = [sequences.get() for _ in range(stage.batch)]
            pair = tuple(torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True))
            tokens, weights = (part.pin_memory() if arguments.device == "cuda" else part for part in pair)
            while not stopped.is_set():
                try:
                    ready.put((tokens, weights), timeout=0.5)
                    break
                except queue.Full:
                    continue

    threading.Thread(target=collect, daemon=True).start()
    try:
        yield ready
    finally:
        stopped.set()
        for worker in workers:
            worker.terminate()


class Trainer:
    """One training run: network, optimisers, and how far it has come."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: Tokenizer, streams: Path) -> None:
        self.arguments = arguments
        self.tokenizer = tokenizer
        self.streams = streams
        self.stages = [Stage.parse(text) for text in arguments.stages.split(",")]
        shape = Shape(
            vocab=tokenizer.get_vocab_size(),
            hidden=arguments.hidden,
            layers=arguments.layers,
            query_heads=arguments.heads,
            kv_heads=arguments.kv_heads,
            head_dim=arguments.head_dim,
            intermediate=arguments.intermediate,
            rope_theta=arguments.rope_theta,
            qk_norm=arguments.qk_norm,
        )
        self.reader = Reader(shape).to(arguments.device)
        others = self.reader.others()
        on_gpu = arguments.device == "cuda"
        adam = torch.optim.AdamW(others, lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu)
        self.optimisers = [
            (Muon(self.reader.matrices(), arguments.muon_lr), arguments.muon_lr),
            (adam, arguments.lr),
        ]
        self.clipped = others
        self.steps = 0
        self.seconds = 0.0

    def run_stage(self, stage: Stage) -> None:
        """Trains for the stage's seconds, which count from its third step on (the first ones compile)."""
        torch._dynamo.reset()
        compiled: nn.Module = self.reader
        if self.arguments.compile:
            compiled.compile(dynamic=False)
        first_seed = 1000 * self.steps + 7919 * self.arguments.seed
        total = sum(planned.seconds for planned in self.stages)
        started: float | None = None
        step_in_stage = 0
        with batches(stage, self.arguments, self.streams / "train.npy", first_seed) as ready:
            while started is None or time.time() - started < stage.seconds:
                spent = self.seconds + (time.time() - started if started else 0.0)
                rate = self._set_rates(min(1.0, spent / total))
                losses = self._step(compiled, *ready.get())
                step_in_stage += 1
                if step_in_stage == 3:
                    if self.arguments.device == "cuda":
                        torch.cuda.synchronize()
                    started = time.time()
                if self.steps % 50 == 0:
                    _, answer, text = (loss.item() for loss in losses)
                    logger.info(
                        "length %d step %d text %.3f answer %.3f rate %.2f",
                        stage.length,
                        self.steps,
                        text,
                        answer,
                        rate,
                    )
        self.seconds += stage.seconds

    def _set_rates(self, progress: float) -> float:
        """Warm-up, constant, then linearly down; returns the factor."""
        falling = 1.0 if progress < CONSTANT_SHARE else (1 - progress) / (1 - CONSTANT_SHARE)
        factor = min(1.0, (self.steps + 1) / WARM_UP_STEPS) * max(LEAST_RATE, falling)
        for optimiser, rate in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
        return factor

    def _step(self, model: nn.Module, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        device = self.arguments.device
        tokens = tokens.to(device, non_blocking=True)
        weights = weights.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            losses: tuple[Tensor, Tensor, Tensor] = model(tokens[:, :-1], tokens[:, 1:], weights[:, 1:])
        torch.autograd.backward(losses[0])
        nn.utils.clip_grad_norm_(self.clipped, 1.0)
        for optimiser, _ in self.optimisers:
            optimiser.step()
        self.reader.zero_grad(set_to_none=True)
        self.steps += 1
        return losses

    @torch.no_grad()
    def exact_match(self, length: int, questions: int) -> dict[float, float]:
        """Share of questions whose every answer token is the most likely one, by depth of the fact in the context.

        Text of held-out books, names of held-out words, twenty other facts in the same context.
        """
        words = json.loads((self.arguments.data / "words.json").read_text())[TRAINING_WORDS:]
        maker = SequenceMaker(np.load(self.streams / "dev.npy"), words, self.tokenizer, seed=123)
        return {
            depth: sum(self._answers(maker, length, depth) for _ in range(questions)) / questions
            for depth in DEPTHS
        }

    def _answers(self, maker: SequenceMaker, length: int, depth: float) -> bool:
        fact = maker.fact()
        others = [maker.fact() for _ in range(20)]
        body = maker.text(length - 400)
        placed = sorted(
            [(depth, fact), *zip(maker.random.random(20), others, strict=True)], key=lambda place: place[0]
        )
        parts, previous = [], 0
        for place, stated in placed:
            end = int(place * len(body))
            parts += [body[previous:end], maker.statement(stated)]
            previous = end
        question, before_value = maker.question(fact)
        ids = torch.from_numpy(np.concatenate([*parts, body[previous:], question]))[None].to(
            self.arguments.device
        )
        value_length = len(question) - before_value
        on_gpu = self.arguments.device == "cuda"
        with torch.autocast(self.arguments.device, torch.bfloat16, enabled=on_gpu):
            hidden = self.reader.hidden(ids[:, :-1])[:, -value_length:]
            logits = functional.linear(hidden, self.reader.embed_tokens.weight)
        return bool((logits.argmax(-1) == ids[:, -value_length:]).all())


def write_tokenizer(data: Path, out: Path) -> None:
    """Copies the tokenizer and writes the settings that transformers wants beside it."""
    shutil.copyfile(data / "tokenizer.json", out / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    shutil.copyfile(CHAT_TEMPLATE, out / CHAT_TEMPLATE.name)


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(arguments.data / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as streams:
        for name in ("train", "dev"):
            packed = (arguments.data / f"{name}.u16.xz").read_bytes()
            np.save(Path(streams) / f"{name}.npy", np.frombuffer(lzma.decompress(packed), np.uint16))
        trainer = Trainer(arguments, tokenizer, Path(streams))
        logger.info("%.2f M parameters", sum(p.numel() for p in trainer.reader.parameters()) / 1e6)
        questions = 20 if arguments.device == "cuda" else 2
        for stage in trainer.stages:
            trainer.run_stage(stage)
            export(trainer.reader, arguments.out)
            write_tokenizer(arguments.data, arguments.out)
            for length in EVALUATED_LENGTHS:
                if length <= 2 * stage.length:
                    logger.info("exact match at %d: %s", length, trainer.exact_match(length, questions))


if __name__ == "__main__":
    main()
