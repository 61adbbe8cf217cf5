"""Keys, values and queries of a trained model, tiled to the shape of a larger one's layer.

The packaged reader has read the packaged novels; sessions with prompts from later pages have queries of their own. Two
heads of the reader, 64 channels each, make one of 128 channels: its logits are the sums of theirs over sqrt(2), which
spread as theirs do. So blocks, outliers, sinks, and keys that repeat themselves are a trained model's.

Shape legend: L layers, S sessions, H KV heads and G query heads of each of the reader, N keys, d its head dim.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from decode_engine.evaluation.prefill_command import PrefillCommand
from decode_engine.evaluation.tasks.documents import source_text
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.model.decode_attention import ATTENTION_NAME, decode_attention
from decode_engine.model.runner import ModelRunner
from harness.parsing import parse_method
from index_store.memory.arena import Arena
from index_store.memory.placement import MemoryBytes
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store


@contextmanager
def asked(queries_LBQ1D: Sequence[Tensor]) -> Iterator[None]:
    """Decode steps of B sessions, by any path, ask every layer's keys with these queries, at every step with the same.

    A step still computes its own, which the attention does not get: a choice that only the device knows keeps
    compilers from leaving them out. Queries are unscaled, [B, Hq, 1, d] each, in the model's dtype; rows of a step
    behind them are idle.
    """
    given = torch.ones((), dtype=torch.bool, device=queries_LBQ1D[0].device)

    def attention(module: nn.Module, query: Tensor, *others: Any, **named: Any) -> Any:
        wanted = queries_LBQ1D[int(module.layer_idx)]  # type: ignore[arg-type]
        if (query.shape[1:], query.dtype) != (wanted.shape[1:], wanted.dtype) or len(query) < len(wanted):
            raise ValueError(
                f"a step has queries {tuple(query.shape)} in {query.dtype}, given are {tuple(wanted.shape)} in "
                f"{wanted.dtype}"
            )
        if len(query) > len(wanted):
            wanted = torch.cat([wanted, query[len(wanted) :]])
        return decode_attention(module, torch.where(given, wanted, query), *others, **named)

    AttentionInterface.register(ATTENTION_NAME, attention)
    try:
        yield
    finally:
        AttentionInterface.register(ATTENTION_NAME, decode_attention)


PROMPT, APART, SESSIONS = 64, 512, 4
"""Tokens of a prompt, and from the beginning of one to that of the next; sessions that have queries."""
MOST = 127 * 1024


@dataclass(frozen=True)
class TrainedRows:
    """kv_LHN2D: of a context. q_LSHGD: unscaled queries of each session's last token, float32."""

    kv_LHN2D: Tensor
    q_LSHGD: Tensor

    @classmethod
    def record(cls, folder: Path, length: int, sessions: int, device: str) -> TrainedRows:
        """Has the reader read a context of so many tokens; the store is made in a folder."""
        runner = ModelRunner(resolve_model("reader"), device)
        ids = runner.tokenizer.encode(source_text(()))
        body = length - len(runner.tokenizer.prefix_ids)
        document = folder / "context.txt"
        document.write_text(runner.tokenizer.decode(ids[:body]), encoding="utf-8")
        done = PrefillCommand("reader", folder / "store", ["full"], device=device).run(
            document, "trained-rows"
        )
        room = MemoryBytes(2**40, 2**40)
        try:
            with Arena(room, device=runner.device).acquire(
                Store(folder / "store"), str(done["id"])
            ) as context:
                fitted = parse_method("oracle:0.01").on(context.manifest)
                seen: list[Tensor] = []
                for number in range(sessions):
                    begin = body + APART * number
                    session = runner.start(context, fitted)
                    runner.forward([session], [ids[begin : begin + PROMPT - 1]])
                    _observe(session, seen)
                    runner.forward([session], [ids[begin + PROMPT - 1 : begin + PROMPT]])
                    session.close()
                q = torch.stack(seen).view(sessions, len(fitted.searching), *seen[0].shape)
                kv = torch.stack([context.kv(layer) for layer in fitted.searching])
                return cls(kv.clone(), q.transpose(0, 1).contiguous())
        finally:
            runner.close()

    def kv(self, number: int, heads: int, length: int, head_dim: int) -> Tensor:
        """Keys and values [heads, length, 2, head_dim]; others for another number. Shorter contexts begin again."""
        sources = self.kv_LHN2D.flatten(0, 1)
        places = torch.arange(length, device=sources.device) % sources.shape[1]
        made_of = self._made_of(number, heads, head_dim)
        return torch.stack([torch.cat([sources[one] for one in parts], -1)[places] for parts in made_of])

    def q(self, number: int, heads: int, group: int, head_dim: int) -> Tensor:
        """Queries [heads, group, head_dim] for these keys, unscaled, float32: of one session, then of the next."""
        _, sessions, kv_heads, own, _ = self.q_LSHGD.shape
        if sessions * own < group:
            raise ValueError(
                f"{sessions} sessions with {own} query heads each are too few for groups of {group}"
            )
        rows = []
        for parts in self._made_of(number, heads, head_dim):
            halves = [self.q_LSHGD[one // kv_heads, :, one % kv_heads] for one in parts]
            rows.append(torch.cat(halves, -1).roll(number, 0).flatten(0, 1)[:group])
        return torch.stack(rows)

    def _made_of(self, number: int, heads: int, head_dim: int) -> list[list[int]]:
        """Which heads of the reader make each head."""
        sources, count = self.kv_LHN2D.shape[0] * self.kv_LHN2D.shape[1], head_dim // self.kv_LHN2D.shape[-1]
        apart = 1 + number % (sources - 1)
        return [[(number + head + part * apart) % sources for part in range(count)] for head in range(heads)]


def record_rows(length: int, device: str, sessions: int = SESSIONS) -> TrainedRows:
    """Rows of a context of about so many tokens, all that the reader takes beside a prompt at most."""
    with tempfile.TemporaryDirectory() as folder:
        return TrainedRows.record(Path(folder), min(length, MOST), sessions, device)


def _observe(session: Session, seen: list[Tensor]) -> None:
    """Appends the queries [H, G, d] of each layer of the session's next step."""

    def observe(found: Observation) -> None:
        seen.append(found.q_HTGD[:, -1].float() * found.q_HTGD.shape[-1] ** 0.5)

    for layer in session.layers:
        if isinstance(layer, SparseLayer):
            layer.observer = observe
