"""A Llama of three small layers with random weights, for tests of benchmarks that run a whole model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from decode_engine.model.decode_attention import ATTENTION_NAME, register_attention
from index_store.store.description.context_id import ModelIdentity

IDENTITY = ModelIdentity("tiny", "llama", "0" * 64, "0" * 64, 3, 4, 2, 32, 300, 2**16)


def make_model(identity: ModelIdentity = IDENTITY) -> Any:
    """Of these sizes, in float32, on the CPU."""
    register_attention()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=identity.vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=identity.layers,
        num_attention_heads=identity.query_heads,
        num_key_value_heads=identity.kv_heads,
        head_dim=identity.head_dim,
        max_position_embeddings=identity.max_positions,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    return model.eval().requires_grad_(False)
