"""The reader's network, written out for training, and its export to a Hugging Face checkpoint.

Llama architecture; with normalised queries and keys it is Qwen3's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

_NORM_EPSILON = 1e-5
_INITIAL_DEVIATION = 0.02
MAX_POSITIONS = 131_072


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network. qk_norm: normalise queries and keys per head (Qwen3)."""

    vocab: int
    hidden: int = 256
    layers: int = 6
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704
    rope_theta: float = 500_000.0
    qk_norm: bool = False


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, dim = shape.hidden, shape.head_dim
        self.q_proj = nn.Linear(hidden, shape.query_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.query_heads * dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, hidden, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=_NORM_EPSILON) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(dim, eps=_NORM_EPSILON) if shape.qk_norm else nn.Identity()
        self.input_layernorm = nn.RMSNorm(hidden, eps=_NORM_EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=_NORM_EPSILON)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, T, hidden] -> the same."""
        batch, count, _ = x.shape
        normed = self.input_layernorm(x)
        query, key, value = (
            projection(normed).view(batch, count, -1, self.shape.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key, value = (
            self.q_norm(query).transpose(1, 2),
            self.k_norm(key).transpose(1, 2),
            value.transpose(1, 2),
        )
        attended = functional.scaled_dot_product_attention(
            rotate(query, cos, sin).to(value.dtype),
            rotate(key, cos, sin).to(value.dtype),
            value,
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.o_proj(attended.transpose(1, 2).reshape(batch, count, -1))
        normed = self.post_attention_layernorm(x)
        out: Tensor = x + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return out


class Reader(nn.Module):
    """Embedding, decoder layers, norm; the output head shares the embedding's weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=_NORM_EPSILON)
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        self.inverse_frequencies = 1.0 / shape.rope_theta**half
        self._initialise()

    def hidden(self, ids: Tensor) -> Tensor:
        """[batch, T] token ids -> [batch, T, hidden]."""
        positions = torch.arange(ids.shape[1], device=ids.device).float()
        angles = torch.outer(positions, self.inverse_frequencies.to(ids.device)).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def blocks(self) -> Iterator[Block]:
        """The decoder layers, first to last."""
        return (block for block in self.layers if isinstance(block, Block))

    def forward(self, ids: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(weighted loss, mean loss of answers, mean loss of text), in nats per token."""
        hidden = self.hidden(ids).reshape(-1, self.shape.hidden)
        logits = functional.linear(hidden, self.embed_tokens.weight)
        losses = functional.cross_entropy(logits.float(), targets.reshape(-1), reduction="none")
        weights = weights.reshape(-1)
        answers, text = (weights > 1.5).float(), (weights < 1.5).float()
        return (
            (losses * weights).sum() / weights.sum(),
            (losses * answers).sum() / answers.sum().clamp(min=1),
            (losses * text).sum() / text.sum(),
        )

    def matrices(self) -> list[nn.Parameter]:
        """The layers' weight matrices."""
        return [parameter for parameter in self.layers.parameters() if parameter.dim() == 2]

    def others(self) -> list[nn.Parameter]:
        """Embedding and norms."""
        known = {id(parameter) for parameter in self.matrices()}
        return [parameter for parameter in self.parameters() if id(parameter) not in known]

    def _initialise(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=_INITIAL_DEVIATION)
        residual = _INITIAL_DEVIATION / math.sqrt(2 * self.shape.layers)
        for block in self.blocks():
            nn.init.normal_(block.o_proj.weight, std=residual)
            nn.init.normal_(block.down_proj.weight, std=residual)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves rotated against each other."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def export(reader: Reader, folder: Path) -> None:
    """Writes config.json and model.safetensors (bfloat16) as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model.embed_tokens.weight": reader.embed_tokens.weight,
        "model.norm.weight": reader.norm.weight,
    }
    for number, block in enumerate(reader.blocks()):
        for name, weight in block.named_parameters():
            group = "self_attn." if name[0] in "qkvo" else "mlp." if "_proj" in name else ""
            tensors[f"model.layers.{number}.{group}{name}"] = weight
    stored = {name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(configuration(reader.shape), indent=1))


def configuration(shape: Shape) -> dict[str, object]:
    """The Hugging Face configuration of a network of this shape."""
    return {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": _NORM_EPSILON,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "torch_dtype": "bfloat16",
    }
