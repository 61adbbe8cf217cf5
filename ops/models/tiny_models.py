"""Tiny random models of any architecture that transformers knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

WINDOW = 256
LARGEST = 1e9  # parameters of a model that is made

SMALL: Mapping[str, object] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "sliding_window": WINDOW,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 8192,
    "d_model": 64,
    "ffn_dim": 96,
    "decoder_layers": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
    "global_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "ssm_state_size": 16,
    "rotary_dim": 8,
    "index_topk": 128,
    "index_head_dim": 16,
    "index_n_heads": 16,
}
LATENT: Mapping[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
"""What multi-head latent attention has in place of others."""
_MIXED = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_DBRX = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}
_CONVOLUTIONS = ["conv", "conv", "full_attention", "conv"]
_STATES = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_SHARED = ["linear_attention", "hybrid", "linear_attention", "linear_attention", "hybrid", "linear_attention"]
_ASSISTANT = {
    "layer_types": _MIXED,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
PARTICULAR: Mapping[str, Mapping[str, object]] = {
    "gemma3": {"layer_types": _MIXED},
    "gemma3_text": {"layer_types": _MIXED},
    "gemma3n": {"layer_types": _MIXED, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4},
    "gemma3n_text": {
        "layer_types": _MIXED,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_unified_assistant": _ASSISTANT,
    "gemma4_assistant": _ASSISTANT,
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": _DBRX, "ffn_config": {"ffn_hidden_size": 96}},
    "starcoder2": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "laguna": {"sliding_window": WINDOW, "layer_types": _MIXED},
    "mellum": {"sliding_window": WINDOW, "layer_types": _MIXED},
    "lfm2": {"layer_types": _CONVOLUTIONS},
    "kimi_linear": {"layer_types": _STATES, "linear_head_dim": 16, "linear_num_heads": 4},
    "bailing_hybrid": {"layer_types": _STATES},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS},
    "bamba": {"attn_layer_indices": [2], "mamba_expand": 2},
    "granitemoehybrid": {"layer_types": _STATES},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": _SHARED,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": _SHARED,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
    },
    "zaya": {"layer_types": ["hybrid"] * 4, "num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "llama4": {"attention_chunk_size": 64},
    "llama4_text": {"attention_chunk_size": 64},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "layer_types": _MIXED},
}
"""Settings that the small ones do not go with, or that show what an architecture is known for."""
_AS_WIDE = {"adapter_out_dim": SMALL["hidden_size"]}
BESIDE: Mapping[str, Mapping[str, object]] = {
    "dots3_note": {"vision_config": _AS_WIDE, "audio_config": _AS_WIDE}
}
"""What else the configuration of a larger model has, beside its text part."""


def tiny_config(kind: str) -> Any:
    """A small configuration of the architecture; its own where a small one cannot be made."""
    made_of = CONFIG_MAPPING[kind]
    try:
        whole = made_of()
    except Exception:  # its own settings do not go together
        whole, text = None, CONFIG_MAPPING[f"{kind.removesuffix('_assistant')}_text"]()
    else:
        try:
            text = whole.get_text_config()
        except ValueError:
            return whole
    known, names = text.to_dict(), getattr(type(text), "attribute_map", {})
    settings = {name: value for name, value in SMALL.items() if name in known and name not in names}
    settings |= {own: SMALL[name] for name, own in names.items() if name in SMALL and own in known}
    if known.get("sliding_window") is None:
        settings.pop("sliding_window", None)
    if "kv_lora_rank" in known:
        settings |= {name: LATENT[name] for name in LATENT if name in known}
    settings |= PARTICULAR.get(kind, {})
    if whole is None:
        settings["model_type"] = text.model_type
    place = next((name for name in made_of.sub_configs if getattr(whole, name, text) is text), None)
    try:
        return made_of(**({place: settings, **BESIDE.get(kind, {})} if place else settings))
    except Exception:
        return made_of()


def make_model(config: Any) -> Any:
    """With random weights that make attention peaked; or why there is none."""
    try:
        with torch.device("meta"):
            size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    except ImportError:  # for what is not text
        return make_model(config.get_text_config())
    if size > LARGEST:
        return f"its smallest configuration has {size} parameters"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            torch.nn.init.normal_(weight, std=1.0 if "embed" in name else 0.2)
        elif "sink" in name:
            torch.nn.init.normal_(weight)
    return model.eval()
