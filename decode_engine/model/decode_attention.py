"""The model's attention, replaced: transformers calls `decode_attention` in every layer of an unpatched model.

The sessions travel as a keyword argument of the model's forward, so there is no global state, and keys and values go
to the sessions' own tails instead of a transformers cache. So does a batch of decode steps on a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from decode_engine.layers.dense_layer import DenseLayer, attend_dense_together
from decode_engine.layers.sparse_layer import SparseLayer, attend_sparse_together
from index_store.attention.fused import narrow, widen
from index_store.errors import InvalidArgumentError
from index_store.models.state_cache import IndexCache, StateCache, passed, without_index_head
from index_store.store.description.dtypes import stored_dtype

if TYPE_CHECKING:
    from decode_engine.layers.session import Session
    from decode_engine.steps.attention.step_batch import StepBatch

ATTENTION_NAME = "sparsekv_decode"


class Manner(TypedDict, total=False):
    """How new tokens are computed; all False by default.

    exact: every layer attends to everything, whatever the sessions' methods. shared: the positions of a session share
    one selection in every layer. rows: every token is computed as a step of its own would be. drafts: sessions that
    draft do so.
    """

    exact: bool
    shared: bool
    rows: bool
    drafts: bool


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The sessions of one forward: their tokens are one sequence, one behind the other, or a row each (`packed`).

    counts: how many tokens each has. exact to drafts: see `Manner`. between: called after each layer's attention.
    cache: of the states of a model that has some. index: of a model with an index of its own, of which one session
    comes at a time. calls: numbers those of attention: layers attend in the same order in every pass, some several
    times.
    """

    sessions: Sequence[Session]
    counts: Sequence[int]
    exact: bool = False
    shared: bool = False
    rows: bool = False
    drafts: bool = False
    between: Callable[[], None] = lambda: None
    cache: StateCache | None = None
    index: IndexCache | None = None
    calls: Iterator[int] = field(default_factory=itertools.count)

    def advance(self) -> None:
        """Has the sessions go on behind their tokens: the pass has succeeded."""
        if self.cache is not None:
            self.cache.commit()
        for session, count in zip(self.sessions, self.counts, strict=True):
            session.position += count


def packed(
    sessions: Sequence[Session],
    token_ids: Sequence[Sequence[int]],
    device: torch.device,
    *,
    between: Callable[[], None] = lambda: None,
    **manner: Unpack[Manner],
) -> dict[str, Any]:
    """What the model is called with to read new tokens of each session, any number of each, in one forward.

    between, manner: see `DecodeStep`, which the caller has advance. Sessions of a model with states come one by one, or
    with one token each behind others; of one with an index of its own always one by one.
    """
    ids: list[int] = []
    positions: list[int] = []
    for session, own in zip(sessions, token_ids, strict=True):
        ids += own
        positions += range(session.position, session.position + len(own))
    both = torch.tensor([ids, positions], dtype=torch.long, device="cpu").to(device)
    # A decode step is a row for each session: `row_products_numba` multiplies these each by itself.
    shape = (-1, 1) if manner.get("rows") or len(ids) == len(sessions) else (1, -1)
    states = [session.states for session in sessions if session.states is not None]
    cache = StateCache.over(states) if states else None
    counts = [len(own) for own in token_ids]
    index = _index_cache(sessions[0]) if sessions[0].context.manifest.model.index_keys else None
    return {
        "input_ids": both[0].view(shape),
        "position_ids": both[1].view(shape),
        "use_cache": False,
        "decode_step": DecodeStep(sessions, counts, between=between, cache=cache, index=index, **manner),
        **({} if cache is None else {"cache": cache}),
        **({} if index is None else index.inputs(len(ids), device)),
    }


def _index_cache(session: Session) -> IndexCache:
    """The index keys of a session, in the rows of its context and its tail."""
    manifest = session.context.manifest

    def rows(layer: int) -> Sequence[Tensor]:
        attention = session.layers[layer].exact
        return attention.rows(session.position) if isinstance(attention, DenseLayer) else ()

    return IndexCache(manifest.model.layers, session.position, rows, stored_dtype(manifest.dtype).torch_dtype)


def register_attention() -> None:
    """Makes `decode_attention` known to transformers under ATTENTION_NAME. Calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, decode_attention)


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    decode_step: DecodeStep | None = None,
    step_batch: StepBatch | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of all tokens: query [B, Hq, T, d], key and value [B, H, T, d] -> out [B, T, Hq, d].

    decode_step: the sessions of the tokens, B is 1 then, or T where each is a row. step_batch: instead of it
    a batch of B sessions, T is 1 then. indices: positions [1, T, K] that the model selected by an index of its own.
    Raises InvalidArgumentError without either step, or with a mask that such an index did not need (tokens are never
    padded).
    """
    if decode_step is None and step_batch is None:
        found = passed()
        decode_step, step_batch = (found, None) if isinstance(found, DecodeStep) else (None, found)
    step = decode_step or step_batch
    layer = -1 if step is None else next(step.calls)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width = value.shape[-1]
    if width != key.shape[-1]:
        query, key, value = widen(query, key, value)
    if step_batch is not None and attention_mask is None:
        usual = query.shape[-1] ** -0.5
        if not math.isclose(scale, usual, rel_tol=1e-6):
            query = query * (scale / usual)
        return narrow(step_batch.attend(layer, query, key, value), width), None
    if decode_step is not None and decode_step.index is not None:
        return narrow(_attend_indexed(decode_step, layer, query, key, value, scale, indices), width), None
    if decode_step is None or attention_mask is not None:
        raise InvalidArgumentError(
            f"attention {ATTENTION_NAME!r} needs decode_step= or step_batch= in the model's forward and no "
            "attention mask"
        )
    if query.shape[0] == 1:
        return narrow(attend_sessions(decode_step, layer, query, key, value, scale), width).contiguous(), None
    query, key, value = (each.transpose(0, 2) for each in (query, key, value))  # a token of each session
    out = attend_sessions(decode_step, layer, query, key, value, scale)
    return narrow(out.transpose(0, 1), width).contiguous(), None


def _attend_indexed(
    step: DecodeStep,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    indices: Tensor | None,
) -> Tensor:
    """Attention of one session's tokens by a model with an index of its own: [1, Hq, T, d] -> [1, T, Hq, d]."""
    own, session = query.shape[1], step.sessions[0]
    if step.index is not None and layer in session.context.manifest.model.full_layers:
        query, key, value = step.index.join(layer, query, key, value)
    attention = session.layers[layer]
    if indices is None or not isinstance(attention, DenseLayer):
        return without_index_head(attend_sessions(step, layer, query, key, value, scale), own).contiguous()
    out_HTGD = attention.attend_selected(
        _by_group(query, key.shape[1], scale), key[0], value[0], session.position, indices[0]
    )
    step.between()
    out = out_HTGD.transpose(0, 1).reshape(1, query.shape[2], query.shape[1], -1).to(query.dtype)
    return without_index_head(out, own).contiguous()


def attend_sessions(
    step: DecodeStep, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Attention of every session's tokens by its layer: query [1, Hq, T, d], key and value [1, H, T, d], of one width.

    Returns out [1, T, Hq, d].
    """
    _, query_heads, positions, head_dim = query.shape
    heads = key.shape[1]
    queries = _by_group(query, heads, scale).split_with_sizes(list(step.counts), dim=1)
    keys, values = (
        key[0].split_with_sizes(list(step.counts), dim=1),
        value[0].split_with_sizes(list(step.counts), dim=1),
    )
    outs: dict[int, Tensor] = {}
    dense: dict[int, list[tuple[int, DenseLayer]]] = {}
    sparse: dict[int, list[tuple[int, SparseLayer]]] = {}
    for row, session in enumerate(step.sessions):
        own = session.layers[layer]
        attention = own.exact if step.exact or (session.drafts and not step.drafts) else own
        if isinstance(attention, DenseLayer):
            dense.setdefault(attention.context, []).append((row, attention))
        elif isinstance(attention, SparseLayer) and attention.sharing is not None and step.counts[row] == 1:
            sparse.setdefault(id(attention.sharing), []).append((row, attention))
        else:
            sizes = [1] * step.counts[row] if step.rows else [step.counts[row]]
            new = (each.split_with_sizes(sizes, dim=1) for each in (queries[row], keys[row], values[row]))
            parts = [
                attention.attend(
                    own_queries, own_keys, own_values, session.position + number, shared=step.shared
                )
                for number, (own_queries, own_keys, own_values) in enumerate(zip(*new, strict=True))
            ]
            outs[row] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def call(row: int) -> tuple[Tensor, Tensor, Tensor, int]:
        return queries[row], keys[row], values[row], step.sessions[row].position

    for members in dense.values():
        attended = attend_dense_together(
            [(attention, *call(row)) for row, attention in members], rows=step.rows
        )
        outs |= zip((row for row, _ in members), attended, strict=True)
    for searching in sparse.values():
        attended = attend_sparse_together([(attention, *call(row)) for row, attention in searching])
        outs |= zip((row for row, _ in searching), attended, strict=True)
    out_HTGD = torch.cat([outs[row] for row in range(len(outs))], dim=1)
    step.between()
    return out_HTGD.transpose(0, 1).reshape(1, positions, query_heads, head_dim).to(query.dtype)


def _by_group(query_1QTD: Tensor, heads: int, scale: float) -> Tensor:
    """[1, Hq, T, d] -> [H, T, G, d] float32, scaled."""
    _, query_heads, positions, head_dim = query_1QTD.shape
    grouped = (query_1QTD[0].float() * scale).view(heads, query_heads // heads, positions, head_dim)
    return grouped.transpose(1, 2)
