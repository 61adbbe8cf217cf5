"""Trains a small model at a context of 16,384 tokens twice: exact attention, or MuSe, in its one global layer.

usage: python ops/bench/muse_training.py TRAIN DEV --out CURVE.jsonl [--steps 400] [--block 8192] [--clusters 64]

The setting of MuSe's section 7.3, smaller in tokens: 7 layers of 512 dimensions, 8 heads of 64, rotary positions of
base 100,000; all layers but the central one see 256 tokens back. bfloat16 with float32 weights, batches of 4 sequences,
AdamW, gradients clipped at 1. Both runs start from the same weights and read the same batches in the same order.
TRAIN and DEV are streams of token ids as xz-compressed little-endian uint16 (`.u16.xz`), or plain text, which the
reader's tokenizer reads. One JSON line per logged step, and one at the end of each run: the loss over DEV under the
attention that was trained with, and under the other one, and the median milliseconds of a step.
"""

from __future__ import annotations

import json
import lzma
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, rms_norm, scaled_dot_product_attention

from index_store.models.loading import load_tokenizer, resolve_model
from prefill_worker.muse import MuseSettings, muse_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key and value [B, H, N, D] -> [B, H, N, D], causal."""

ROPE_BASE = 100_000.0
CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the model and its training."""

    vocabulary: int = 4096
    layers: int = 7
    heads: int = 8
    head_dim: int = 64
    window: int = 256
    context: int = 16_384
    batch: int = 4
    peak: float = 1.5e-3
    warm_up: int = 60

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


class Block(nn.Module):
    """One layer: attention to the window, or to everything by the function given, and a feed-forward part."""

    def __init__(self, shape: Shape, is_global: bool) -> None:
        super().__init__()
        self.shape, self.is_global = shape, is_global
        self.inputs = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden, bias=False)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        batch, count, _ = x.shape
        normed = rms_norm(x, x.shape[-1:])
        split = self.inputs(normed).view(batch, count, 3, self.shape.heads, self.shape.head_dim)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        query, key = rotate(query, rotation), rotate(key, rotation)
        window = self.shape.window
        found = attend(query, key, value) if self.is_global else attend_window(query, key, value, window)
        x = x + self.output(found.transpose(1, 2).reshape(batch, count, -1))
        deeper: Tensor = self.down(gelu(self.up(rms_norm(x, x.shape[-1:]))))
        return x + deeper


class Model(nn.Module):
    """A decoder whose central layer is global."""

    rotation: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(
            Block(shape, number == shape.layers // 2) for number in range(shape.layers)
        )
        for name, weight in self.named_parameters():
            deep = name.endswith(("output.weight", "down.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.layers) if deep else 0.02)
        half = shape.head_dim // 2
        speeds = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(shape.context, dtype=torch.float64), speeds)
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]).float())

    def forward(self, ids: Tensor, targets: Tensor, attend: Attend) -> Tensor:
        """Mean loss in nats."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.rotation[:, : ids.shape[1]], attend)
        logits = linear(rms_norm(x, x.shape[-1:]), self.embedding.weight)
        return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions [2, N, D/2] applied to [B, H, N, D]."""
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend_window(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Attention to the token itself and the window - 1 before it."""
    if query.is_cuda:
        own = (x.transpose(1, 2) for x in (query, key, value))
        count = query.shape[2]
        found = torch.ops.aten._flash_attention_forward(
            *own, None, None, count, count, 0.0, True, False, window_size_left=window - 1, window_size_right=0
        )[0]
        return found.transpose(1, 2)  # type: ignore[no-any-return]
    near = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril().triu(1 - window)
    return scaled_dot_product_attention(query, key, value, near)


def attend_exactly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def attend_by_muse(settings: MuseSettings) -> Attend:
    return lambda query, key, value: muse_attention(query, key, value, is_causal=True, settings=settings)


def read_tokens(path: Path) -> Tensor:
    """Token ids [N] int64."""
    if path.name.endswith(".u16.xz"):
        stream = lzma.decompress(path.read_bytes())
        return torch.frombuffer(bytearray(stream), dtype=torch.uint16).long()
    tokenizer = load_tokenizer(resolve_model("reader"))
    return torch.tensor(tokenizer.encode(path.read_text(encoding="utf-8")))


def sequences(tokens: Tensor, context: int) -> Tensor:
    """Rows [S, context + 1], each the next one's first token too."""
    rows = (len(tokens) - 1) // context
    if rows == 0:
        raise typer.BadParameter(f"{len(tokens)} tokens do not fill a context of {context}")
    return tokens[: rows * context + 1].unfold(0, context + 1, context)


def batches(rows: Tensor, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    """So many batches [batch, context + 1] in an order of their own for every epoch."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < batch:
            order += torch.randperm(len(rows), generator=generator).tolist()
        yield rows[order[:batch]]
        del order[:batch]


def learning_rate(step: int, steps: int, shape: Shape) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak."""
    if step < shape.warm_up:
        return shape.peak * (step + 1) / shape.warm_up
    done = (step - shape.warm_up) / max(1, steps - shape.warm_up)
    return shape.peak * (0.55 + 0.45 * math.cos(math.pi * done))


def train(
    name: str,
    attend: Attend,
    rows: Tensor,
    shape: Shape,
    steps: int,
    device: torch.device,
    log: Callable[[dict[str, Any]], None],
    every: int = 20,
) -> tuple[Model, float]:
    """Trains from the same start whatever attends; the model and the median milliseconds of a step."""
    torch.manual_seed(0)
    model = Model(shape).to(device)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01, fused=on_gpu
    )
    times, losses = [], []
    for step, batch in enumerate(batches(rows, shape.batch, steps, seed=1)):
        begin = time.perf_counter()
        ids = batch.to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, shape)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = model(ids[:, :-1], ids[:, 1:], attend)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))  # waits for the device, so the times are those of whole steps
        times.append(1e3 * (time.perf_counter() - begin))
        if (step + 1) % every == 0 or step + 1 == steps:
            mean = statistics.fmean(losses[-every:])
            log({"attention": name, "step": step + 1, "loss": mean, "ms": statistics.median(times[-every:])})
    return model, statistics.median(times[min(10, len(times) - 1) :])


@torch.no_grad()
def evaluate(model: Model, rows: Tensor, attend: Attend, device: torch.device) -> float:
    """Mean loss over all rows, in nats per token."""
    losses = []
    for row in rows:
        ids = row[None].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses.append(float(model(ids[:, :-1], ids[:, 1:], attend)))
    return statistics.fmean(losses)


def compare(
    train_tokens: Tensor,
    dev_tokens: Tensor,
    shape: Shape,
    steps: int,
    settings: MuseSettings,
    device: torch.device,
    log: Callable[[dict[str, Any]], None],
    dev_rows: int = 48,
) -> dict[str, Any]:
    """Trains both ways, and what came out: losses over held-out text, and times."""
    rows = sequences(train_tokens, shape.context)
    held_out = sequences(dev_tokens, shape.context)[:dev_rows]
    ways: dict[str, Attend] = {"exact": attend_exactly, "muse": attend_by_muse(settings)}
    for attend in ways.values():  # kernels are compiled before anything is timed
        train("warm-up", attend, rows, shape, 2, device, lambda row: None)
    summary: dict[str, Any] = {"steps": steps, "tokens": steps * shape.batch * shape.context}
    for name, attend in ways.items():
        model, milliseconds = train(name, attend, rows, shape, steps, device, log)
        summary[f"{name}_ms"] = milliseconds
        for other, judge in ways.items():
            summary[f"{name}_loss_under_{other}"] = evaluate(model, held_out, judge, device)
    exact, muse = summary["exact_loss_under_exact"], summary["muse_loss_under_muse"]
    summary["loss_change"] = muse / exact - 1
    summary["step_time_change"] = summary["muse_ms"] / summary["exact_ms"] - 1
    return summary


def main(
    train_file: Annotated[Path, typer.Argument(metavar="TRAIN")],
    dev_file: Annotated[Path, typer.Argument(metavar="DEV")],
    out: Annotated[Path, typer.Option(help="Where the curve is written, one JSON line per logged step.")],
    steps: Annotated[int, typer.Option(help="Of each run.")] = 400,
    clusters: Annotated[int, typer.Option(help="Of MuSe.")] = 64,
    block: Annotated[int, typer.Option(help="Tokens that MuSe attends exactly.")] = 8192,
    dipole: Annotated[bool, typer.Option(help="Whether MuSe has dipole terms.")] = True,
) -> None:
    """Trains both ways on the GPU and compares losses and times."""
    if not torch.cuda.is_available():
        typer.echo("error: this benchmark needs a CUDA device", err=True)
        raise typer.Exit(1)
    settings = MuseSettings(clusters=clusters, block=block, dipole=dipole)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    with out.open("w", encoding="utf-8") as curve:

        def log(row: dict[str, Any]) -> None:
            rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}
            curve.write(json.dumps({"bench": "muse_training", **rounded, "machine": machine}) + "\n")
            curve.flush()

        tokens = read_tokens(train_file), read_tokens(dev_file)
        summary = compare(*tokens, Shape(), steps, settings, torch.device("cuda"), log)
        row = {**summary, "clusters": clusters, "block": block, "dipole": dipole}
        log(row)
    sys.stdout.write(json.dumps({"bench": "muse_training", **row, "machine": machine}) + "\n")


if __name__ == "__main__":
    typer.run(main)
