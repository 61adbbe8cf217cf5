"""Small GGUF files, written from Hugging Face folders as the converters of llama.cpp write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

ARCHITECTURES = {"gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
_NAMES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "vocab_size": "vocab_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in GGUF's order: turned dimensions beside each other, not half apart."""
    rows = weight.shape[0]
    return weight.view(heads, 2, rows // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    file: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str | None = None,
    settings: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    without: str = "nothing",
) -> Path:
    """A folder with a byte-level tokenizer as a GGUF file.

    settings: of the architecture, more: others, that are added or replaced; None leaves one out. tensors: that are
    added. without: end of the names of tensors that are left out.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = architecture or ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, architecture)
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    own = {name: config[known] for name, known in _NAMES.items() if config.get(known) is not None}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own |= {
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    rope = config["rope_parameters"]
    own["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    own |= settings or {}
    for name, value in own.items():
        _add(writer, f"{architecture}.{name}", value)
    vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    tokens[-1] = (
        "xx"  # the format wants a merge; no text here uses this one, or the byte that it takes the place of
    )
    others = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 3),
    }
    for name, value in ({**others, "merges": ["x x"], "eos_token_id": 0} | dict(more or {})).items():
        _add(writer, f"tokenizer.ggml.{name}" if "." not in name else name, value)
    for name, tensor in {**_tensors(folder, config, architecture), **(tensors or {})}.items():
        if not name.endswith(without):
            stored = kind if tensor.ndim == 2 else GGMLQuantizationType.F32
            data = gguf.quants.quantize(np.ascontiguousarray(tensor.float().numpy()), stored)
            writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensors(folder: Path, config: Mapping[str, Any], architecture: str) -> dict[str, torch.Tensor]:
    known = architecture if architecture in gguf.MODEL_ARCH_NAMES.values() else "llama"
    (arch,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            continue
        values = tensor
        if known == "llama" and ("q_proj" in name or "k_proj" in name):
            values = paired(
                tensor, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            )
        if known in ("gemma2", "gemma3") and "norm" in name:
            values = tensor + 1
        if name.endswith("shared_expert_gate.weight"):
            values = tensor[0]
        stem, _, end = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        found[f"{names.get_name(stem)}.{end}"] = values
    return found
