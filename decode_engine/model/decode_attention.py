"""The model's attention, replaced: transformers calls `decode_attention` in every layer of an unpatched model.

The sessions travel as a keyword argument of the model's forward, so there is no global state, and keys and values go
to the sessions' own tails instead of a transformers cache. A batch of decode steps on a GPU travels as a number in a
tensor and goes to an operator, which compilers and CUDA graphs can take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from decode_engine.layers.dense_layer import DenseLayer, attend_dense_together
from decode_engine.layers.selected_attention import attend_sparse_together
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.steps.operator import attend_step
from index_store.attention.widths import narrow, widen
from index_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    from decode_engine.layers.session import Session

ATTENTION_NAME = "sparsekv_decode"


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The sessions of one batched forward, one per batch row.

    exact: every layer attends to everything, whatever the sessions' methods. shared: the positions of a session share
    one selection in every layer. predicted: queries by layer, filled while the forward runs
    (`layer_ahead.predicted_queries`); empty when no session asks for them.
    """

    sessions: Sequence[Session]
    exact: bool = False
    shared: bool = False
    predicted: dict[int, Tensor] = field(default_factory=dict)


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
    step_batch: Tensor | None = None,
    foretold: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of all batch rows: query [B, Hq, T, d], key and value [B, H, T, d] -> out [B, T, Hq, d].

    decode_step: the sessions of the rows. step_batch: instead of them the number of a live batch
    (`operator.register_batch`), T is 1 then. foretold: with it, the next layer's queries, about, shaped like query
    (`layer_ahead.foretell_queries`). Raises InvalidArgumentError without either or with a mask (rows are never
    padded).
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width = value.shape[-1]
    if width != key.shape[-1]:
        if foretold is not None:
            foretold = widen(foretold, key, value)[0]
        query, key, value = widen(query, key, value)
    if step_batch is not None and attention_mask is None:
        usual = query.shape[-1] ** -0.5
        if not math.isclose(scale, usual, rel_tol=1e-6):
            query = query * (scale / usual)
            foretold = None if foretold is None else foretold * (scale / usual)
        return narrow(attend_step(query, key, value, step_batch, layer, foretold), width), None
    if decode_step is None or attention_mask is not None:
        raise InvalidArgumentError(
            f"attention {ATTENTION_NAME!r} needs decode_step= or step_batch= in the model's forward and no "
            "attention mask"
        )
    out = _attend_sessions(decode_step, layer, query, key, value, scale)
    return narrow(out, width).contiguous(), None


def _attend_sessions(
    step: DecodeStep, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Attention of every row by its session's layer: query [B, Hq, T, d], key and value [B, H, T, d], all of one width.

    Returns out [B, T, Hq, d].
    """
    batch, query_heads, positions, head_dim = query.shape
    heads = key.shape[1]
    q_BHTGD = _by_group(query, heads, scale)
    predicted = step.predicted.pop(layer, None)
    if predicted is not None:
        predicted = _by_group(pad(predicted, (0, head_dim - predicted.shape[-1])), heads, scale)
    out = torch.empty(batch, positions, query_heads, head_dim, dtype=query.dtype, device=query.device)
    outs: dict[int, Tensor] = {}
    dense: dict[int, list[tuple[int, DenseLayer]]] = {}
    sparse: dict[int, list[tuple[int, SparseLayer]]] = {}
    for row, session in enumerate(step.sessions):
        own = session.layers[layer]
        attention = own.exact if step.exact else own
        if isinstance(attention, DenseLayer):
            dense.setdefault(attention.context, []).append((row, attention))
        elif isinstance(attention, SparseLayer) and attention.sharing is not None and positions == 1:
            sparse.setdefault(id(attention.sharing), []).append((row, attention))
        else:
            foretold = None if predicted is None else predicted[row]
            new = (q_BHTGD[row], key[row], value[row])
            outs[row] = attention.attend(*new, session.position, foretold, shared=step.shared)

    def call(row: int) -> tuple[Tensor, Tensor, Tensor, int]:
        return q_BHTGD[row], key[row], value[row], step.sessions[row].position

    for members in dense.values():
        found = attend_dense_together([(attention, *call(row)) for row, attention in members])
        outs |= zip((row for row, _ in members), found, strict=True)
    for searching in sparse.values():
        found = attend_sparse_together([(attention, *call(row)) for row, attention in searching])
        outs |= zip((row for row, _ in searching), found, strict=True)
    for row, attended in outs.items():
        out[row] = attended.permute(1, 0, 2, 3).reshape(positions, query_heads, head_dim)
    return out


def _by_group(query_BQTD: Tensor, heads: int, scale: float) -> Tensor:
    """[B, Hq, T, d] -> [B, H, T, G, d] float32, scaled."""
    batch, query_heads, positions, head_dim = query_BQTD.shape
    grouped = (query_BQTD.float() * scale).view(batch, heads, query_heads // heads, positions, head_dim)
    return grouped.transpose(2, 3)
