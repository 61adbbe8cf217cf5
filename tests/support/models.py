"""Tiny random Hugging Face model folders: Llama, Qwen2, Qwen3 and Mistral, with a byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
END_TOKEN = "<|endoftext|>"
BEGIN_TOKEN = "<|begin|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '\\nQuestion: ' + message['content'] + '\\nAnswer:' }}{% endfor %}"
)


_WINDOWS: Mapping[str, object] = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS: Mapping[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CHUNKS: Mapping[str, object] = {
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "attention_chunk_size": 24,
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "no_rope_layers": [1, 0, 1],
}
_LATENT: Mapping[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_LEARNT: Mapping[str, object] = {
    "n_routed_experts": 4,
    "index_topk": 40,
    "index_head_dim": 16,
    "mlp_layer_types": ["dense", "dense", "dense"],
}
"""What an index of a model's own has beside latents. It has 64 heads: of few all might say nothing of many keys."""
_LINEAR: Mapping[str, object] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_STATES: Mapping[str, object] = {**_LINEAR, "linear_key_head_dim": 8, "mlp_only_layers": [0, 1, 2]}
_JAMBA: Mapping[str, object] = {
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
}
LAYER_KINDS: Mapping[str, tuple[str, Mapping[str, object]]] = MappingProxyType(
    {
        "windows": ("qwen2", {**_WINDOWS, "use_sliding_window": True}),
        "windows only": ("mistral", {"sliding_window": 24}),
        # All experts always: which ones are chosen changes with the rounding of 16 bits.
        "sinks": ("gpt_oss", {**_WINDOWS, "num_local_experts": 2, "num_experts_per_tok": 2}),
        "experts": ("qwen3_moe", {**_EXPERTS, "num_local_experts": 4}),
        "another scale": ("granite", {"attention_multiplier": 0.3}),
        "no positions": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
        "states": ("qwen3_next", _STATES),
        "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}),
        "single tokens": ("jamba", _JAMBA),
        "learnt index": ("deepseek_v32", {**_LATENT, **_LEARNT, "num_experts_per_tok": 2}),
        "latents": ("deepseek_v3", {**_LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2}),
        "several times": ("diffllama", {}),
        "nothing handed on": ("nemotron", {}),
        "chunks": ("llama4_text", {**_EXPERTS, **_CHUNKS}),
        "caps": ("gemma2", {**_WINDOWS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}),
    }
)
"""Families and settings for `write_model_folder` with three layers, by what is special about their attention."""

_ALL_EXPERTS: Mapping[str, object] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
STATEFUL: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "qwen3_next": {**_LINEAR, **_ALL_EXPERTS, "num_experts": 2, "shared_expert_intermediate_size": 32},
        "qwen3_5_text": _LINEAR,
        "granitemoehybrid": {
            **_ALL_EXPERTS,
            "layer_types": _LINEAR["layer_types"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "num_local_experts": 2,
        },
        "nemotron_h": {
            **_ALL_EXPERTS,
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "n_routed_experts": 2,
        },
        "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
        "minimax": {**_ALL_EXPERTS, "layer_types": _LINEAR["layer_types"], "num_local_experts": 2},
    }
)
"""Families with states, and settings for `write_model_folder` with three layers. All experts are chosen always."""

HEAD_SHAPES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "large groups": {"query_heads": 16, "kv_heads": 1, "head_dim": 64},
        "long rows": {"query_heads": 2, "kv_heads": 1, "head_dim": 256},
    }
)
"""Settings for `write_model_folder`, by what is special about the heads."""


def write_tokenizer(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, add_begin: bool = False
) -> int:
    """Writes a byte-level tokenizer (one token per byte, no merges) and returns its vocabulary size, 259.

    `add_begin` makes the tokenizer put `<|begin|>` before every text, as Llama 3 does.
    """
    specials = [END_TOKEN, "<|pad|>", BEGIN_TOKEN]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    if add_begin:
        begin = vocab[BEGIN_TOKEN]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN_TOKEN} $A", special_tokens=[(BEGIN_TOKEN, begin)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    if add_begin:
        settings["bos_token"] = BEGIN_TOKEN
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocab)


def write_model_folder(
    folder: Path,
    family: str = "llama",
    *,
    layers: int = 2,
    hidden: int = 64,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    max_positions: int = 4096,
    dtype: torch.dtype = torch.float32,
    initializer_range: float = 0.2,
    seed: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
    add_begin: bool = False,
    **overrides: object,
) -> Path:
    """Writes config, random safetensors weights and tokenizer; returns `folder`.

    The wide `initializer_range` makes attention peaked and next tokens distinct, as in a trained model.
    `overrides` replace entries of the configuration (for example `sliding_window=16`).
    """
    vocab_size = write_tokenizer(folder, chat_template=chat_template, add_begin=add_begin)
    settings: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "initializer_range": initializer_range,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    settings.update(overrides)
    transformers_logging.disable_progress_bar()
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
        for name, parameter in model.named_parameters():
            if "norm" in name:  # fresh norms are all ones, which would hide a norm that is not applied
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    finally:
        torch.set_rng_state(generator_state)
    model.to(dtype).save_pretrained(folder)
    return folder


def generated(folder: Path, ids: Sequence[int], count: int) -> list[int]:
    """Tokens behind these by transformers' own greedy generation in float32, whatever would end it."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    given = torch.tensor([ids])
    found = model.generate(
        given,
        attention_mask=torch.ones_like(given),  # or what stands for padding in `ids` is passed over
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=1,
    )
    return found[0, len(ids) :].tolist()  # type: ignore[no-any-return]
