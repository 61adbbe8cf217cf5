"""A model of random weights in the shape of Llama-3.1-8B, and random contexts for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from decode_engine.attention import ATTENTION_NAME, register_attention
from decode_engine.warm_up import made_up_context
from index_store.context import ResidentContext
from index_store.host_memory import HostBlock, default_page_locker
from index_store.manifest import ModelIdentity
from index_store.methods import Method
from index_store.placement import Placement

DTYPE = "bfloat16"
QUERY_STD = 1.28
"""Of the model's queries: weights of standard deviation .02 times the root of the hidden size."""
DISTINCT = 8
"""Layers' worth of keys and indexes of a single sequence; fewer for larger batches."""


def make_model(layers: int, device: str = "cuda") -> tuple[Any, ModelIdentity]:
    """A Llama-3.1-8B of random weights, or its first layers; on the device `meta` it takes no memory."""
    register_attention()
    config = LlamaConfig(
        vocab_size=128256,
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
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    model.eval().requires_grad_(False)
    identity = ModelIdentity(
        "random-8b", "LlamaForCausalLM", "0" * 64, "0" * 64, layers, 32, 8, 128, 128256, 2**21
    )
    return model, identity


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def read_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that a step reads: all but the embeddings, of which it reads a row."""
    skipped: Any = model.get_input_embeddings()  # type: ignore[operator]
    return weight_bytes(model) - int(skipped.weight.nbytes)


def make_contexts(
    identity: ModelIdentity,
    methods: Sequence[Method],
    length: int,
    batch: int,
    placement: Placement,
    device: str = "cuda",
) -> list[ResidentContext]:
    """A context for each session, with the indexes of all methods."""
    distinct = min(identity.layers, max(2, DISTINCT // batch))
    first, *others = methods
    contexts = (
        made_up_context(
            identity, DTYPE, first, length, also=others, distinct=distinct, device=device, seed=row,
            placement=placement, calibrated_for=QUERY_STD,
        )
        for row in range(batch)
    )  # fmt: skip
    return [context if placement is Placement.DEVICE else spread(context) for context in contexts]


class SpreadContext(ResidentContext):
    """One whose keys and values are in these blocks."""

    blocks: list[HostBlock]


def spread(context: ResidentContext) -> SpreadContext:
    """The context with memory of its own for keys and values of every layer, made as the arena makes it."""
    manifest, locker = context.manifest, default_page_locker()
    kv, blocks = {}, []
    for layer in range(manifest.model.layers):
        source = context.kv(layer)
        block = HostBlock(source.nbytes, locker, own_pages=True)
        kv[layer] = block.take(tuple(source.shape), source.dtype).copy_(source)
        block.lock()
        blocks.append(block)
    arrays = {
        (entry.name, layer): context.index(entry.name, layer).arrays()
        for entry in manifest.indexes
        for layer in entry.layers
    }
    place = {"placement": context.placement, "device": context.device}
    found = SpreadContext(manifest, context.tokens(), kv, arrays, **place)  # type: ignore[arg-type]
    found.blocks = blocks
    return found
