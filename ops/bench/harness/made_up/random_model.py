"""A model of random weights in the shape of Llama-3.1-8B."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from decode_engine.model.decode_attention import ATTENTION_NAME, register_attention
from index_store.models.fused.layers import fuse_layers
from index_store.store.description.context_id import ModelIdentity

DTYPE = "bfloat16"
VOCABULARY = 128256
QUERY_STD = 1.28
"""Of the model's queries: weights of standard deviation .02 times the root of the hidden size."""


def make_model(
    layers: int, device: str = "cuda", attention: str = ATTENTION_NAME, fused: bool = True
) -> tuple[Any, ModelIdentity]:
    """A Llama-3.1-8B of random weights, or its first layers; on the device `meta` it takes no memory.

    attention: transformers' name of the implementation; by default decode-engine's. fused: on a GPU, with the layers of
    a model that is loaded there.
    """
    register_attention()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2**21,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    model.eval().requires_grad_(False)
    if fused and device == "cuda":
        fuse_layers(model)
    identity = ModelIdentity(
        "random-8b", "LlamaForCausalLM", "0" * 64, "0" * 64, layers, 32, 8, 128, VOCABULARY, 2**21
    )
    return model, identity


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def read_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that a step reads: all but the embeddings, of which it reads a row."""
    skipped: Any = model.get_input_embeddings()  # type: ignore[operator]
    return weight_bytes(model) - int(skipped.weight.nbytes)
