"""Decode steps on a CPU in few calls: all that a layer does between one attention and the next is one compiled loop.

A token of a small model takes longer to be sent through transformers' modules than its weights take to be read. Models
whose layers are Llama's by their modules go this way, if a trial gives what their own forward gives; all others, and
prompts, go the general way.

Shape legend: B rows, E hidden size, Hq query heads, H KV heads, d head dim.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import DecodeStep, attend_sessions, packed
from decode_engine.model.packed_weights import Arrays, RowLinear
from decode_engine.model.row_layers_numba import LOOPS
from decode_engine.model.row_products_numba import work_of
from index_store.attention.attention_state import LogitForm
from index_store.compiled.launch import F4, launch, thread_count
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import METHODS

logger = logging.getLogger(__name__)

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}


@dataclass(frozen=True, slots=True)
class _Between:
    """What stands between two attentions: how many heads are rotated behind it, and the arrays of its loop."""

    heads: int
    arrays: tuple[Any, ...]
    outputs: int
    work: float


class RowLayers:
    """The forward of decode steps of a model on a CPU, whose modules are looked at once."""

    def __init__(self, model: Any, base: Any) -> None:
        """model: whose `base` has layers and embedding, as `of` found them."""
        self._embed, self._rotary = base.embed_tokens, base.rotary_emb
        attention = base.layers[0].self_attn
        self._head_dim, self._scale = attention.head_dim, attention.scaling
        self._kv_heads = attention.k_proj.out_features // self._head_dim
        self._query_heads = attention.q_proj.out_features // self._head_dim
        self._gate = base.layers[0].mlp.gate_proj.out_features
        matrix = attention.o_proj.matrix.arrays
        self._loop = LOOPS[matrix[0].dtype.char]
        none = matrix[0][:0], matrix[1][:0]
        nothing = np.empty(0, np.float32)
        before = ((none, nothing, none, none), 0.0)  # the first layer has nothing before it
        parts: list[_Between] = []
        for layer in base.layers:
            own = layer.self_attn
            matrices = [own.q_proj, own.k_proj, own.v_proj]
            biases = [each.bias.detach() for each in matrices if each.bias is not None]
            bias = torch.cat(biases).numpy() if biases else nothing
            heads = self._query_heads + self._kv_heads
            parts.append(_between(*before, layer.input_layernorm, own.q_proj.matrix.whole, bias, heads))
            norm, mlp = layer.post_attention_layernorm, layer.mlp
            taken = (
                own.o_proj.matrix.arrays,
                _weight(norm),
                mlp.gate_proj.matrix.whole,
                mlp.down_proj.matrix.arrays,
            )
            before = (taken, norm.variance_epsilon)
        parts.append(_between(*before, base.norm, model.lm_head.matrix.arrays, nothing, 0))
        self._parts = parts

    @classmethod
    def of(cls, model: Any) -> RowLayers | None:
        """That of a model whose weights are packed; None where modules are not those of Llama's layers."""
        if _names(model) != {"model", "lm_head"} or _names(model.model) != _MODEL:
            return None
        base: Any = model.model
        if not all(_is_layer(layer) for layer in base.layers) or not _is_norm(base.norm):
            return None
        linear = [each for each in model.modules() if isinstance(each, RowLinear)]
        kinds = {
            (each.matrix.numbers.dtype, each.matrix.numbers.shape[1] == each.in_features) for each in linear
        }
        shapes = {
            (
                own.head_dim,
                own.scaling,
                own.q_proj.out_features,
                own.k_proj.out_features,
                mlp.gate_proj.out_features,
            )
            for own, mlp in [(layer.self_attn, layer.mlp) for layer in base.layers]
        }
        ends = isinstance(model.lm_head, RowLinear) and model.lm_head.bias is None
        return cls(model, base) if ends and len(shapes) == len(kinds) == 1 and all(*kinds) else None

    def logits(self, inputs: dict[str, Any]) -> Tensor:
        """float32 logits [B, vocab] of what `decode_attention.packed` gives, one token a row."""
        step = inputs["decode_step"]
        hidden: Tensor = self._embed(inputs["input_ids"])
        cos, sin = self._rotary(hidden, inputs["position_ids"])
        rows, _, size = hidden.shape
        x = hidden.view(rows, size).numpy()
        turns = (cos.view(rows, -1).numpy(), sin.view(rows, -1).numpy())
        scratch = [np.empty((rows, width), np.float32) for width in (size, size, 2 * self._gate, self._gate)]
        attended = np.empty((0, size), np.float32)
        for layer, part in enumerate(self._parts):
            out = np.empty((rows, part.outputs), np.float32)
            launch(
                self._loop,
                thread_count(),
                attended,
                x,
                *scratch,
                out,
                *turns,
                part.heads,
                *part.arrays,
                work=part.work * rows,
            )
            if part.heads:
                attended = self._attend(step, layer, torch.from_numpy(out))
        return torch.from_numpy(out)

    def _attend(self, step: DecodeStep, layer: int, out: Tensor) -> F4:
        heads = out.view(1, len(out), -1, self._head_dim).transpose(1, 2)
        query, key, value = heads.split_with_sizes([self._query_heads, self._kv_heads, self._kv_heads], dim=1)
        found = attend_sessions(step, layer, query, key, value, self._scale)
        return found.view(len(out), -1).numpy()


_TRIED = 8  # rows
_TOLERANCE = 2e-3
"""Of the median row: where a key is rounded to another neighbour, a row of unlikely tokens may differ by a tenth."""


@torch.inference_mode()
def row_layers(model: Any, context: ResidentContext, forms: Sequence[LogitForm]) -> RowLayers | None:
    """The forward of decode steps, if a trial gives what the model's own gives, at positions far apart.

    context: of no tokens. forms: of the model's layers.
    """
    found = RowLayers.of(model)
    if found is None:
        return None
    identity = context.manifest.model
    ids = torch.arange(_TRIED) * (identity.vocab_size // _TRIED)
    positions = torch.linspace(0, identity.max_positions - 1, _TRIED).long()[:, None]

    def given() -> dict[str, Any]:
        session = Session(context, METHODS["full"].on(context.manifest), forms)
        return packed([session], [ids.tolist()], ids.device, rows=True) | {"position_ids": positions}

    expected, logits = model(**given()).logits.flatten(0, 1).float(), found.logits(given())
    difference = float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).median())
    if not difference < _TOLERANCE:
        logger.info("decode steps go the general way: in fewer calls logits differ by %.2g", difference)
        return None
    return found


def _between(
    matrices: tuple[Any, ...] | Any, first_eps: float, norm: Any, following: Arrays, bias: F4, heads: int
) -> _Between:
    output, middle_norm, gate, down = matrices
    eps = np.array([first_eps, norm.variance_epsilon], np.float32)
    arrays = (eps, *output, middle_norm, *gate, *down, _weight(norm), *following, bias)
    work = sum(work_of(each[0], 1) for each in (output, gate, down, following))
    return _Between(heads, arrays, len(following[0]), work)


def _weight(norm: Any) -> F4:
    return norm.weight.detach().numpy()  # type: ignore[no-any-return]


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_layer(layer: Any) -> bool:
    """Whether a layer has the parts of Llama's, in packed matrices, those of one input joined."""
    if _names(layer) != _LAYER or _names(layer.self_attn) != _ATTENTION or _names(layer.mlp) != _MLP:
        return False
    own, mlp = layer.self_attn, layer.mlp
    together = [own.q_proj, own.k_proj, own.v_proj], [mlp.gate_proj, mlp.up_proj]
    alone = [own.o_proj, mlp.down_proj]
    if not all(isinstance(each, RowLinear) for each in (*together[0], *together[1], *alone)):
        return False
    some = torch.linspace(-4, 4, 9)
    return (
        all(
            each.matrix.whole is matrices[0].matrix.whole is not None
            for matrices in together
            for each in matrices
        )
        and all(each.bias is None for each in (*together[1], *alone))
        and _is_norm(layer.input_layernorm)
        and _is_norm(layer.post_attention_layernorm)
        and torch.equal(mlp.act_fn(some), silu(some))
    )


def _is_norm(norm: nn.Module) -> bool:
    return hasattr(norm, "variance_epsilon") and [name for name, _ in norm.named_parameters()] == ["weight"]
