"""Which model: finds a Hugging Face folder, identifies it by content, checks that it can be served, loads it.

The only place where transformers loads a model. Nothing is downloaded and no code from a model folder is run.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from index_store.errors import InvalidArgumentError, ModelUnsupportedError
from index_store.models.folder import ModelFolder, first_line, hash_file, resolve_model
from index_store.models.tokenizer import Tokenizer, load_tokenizer, tokenizer_fingerprint
from index_store.store.dtypes import KV_DTYPES, stored_dtype
from index_store.store.manifest import ModelIdentity

__all__ = [
    "LoadedModel",
    "ModelFolder",
    "Tokenizer",
    "check_positions",
    "checkpoint_dtype",
    "identify",
    "load_model",
    "load_tokenizer",
    "resolve_model",
]

# Entries of config.json that name the software or the place, not the function that the model computes.
_INCIDENTAL_CONFIG = frozenset({"_name_or_path", "transformers_version", "use_cache", "_attn_implementation"})
# Positional rotations that depend on the length reached so far: keys stored earlier would be rotated otherwise.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_PROBE = "sparsekv_probe"
_PROBE_TOKENS = 3
_HARMLESS_ATTENTION_ARGUMENTS = frozenset(
    {
        "attention_probe",
        "dropout",
        "is_causal",
        "output_attentions",
        "position_ids",
        "sliding_window",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, in evaluation mode, without gradients.

    kv_dtype: name of the checkpoint's dtype, which is the one keys and values are stored in unless asked otherwise.
    inverse_frequencies: [d/2] float32 of the rotary embedding, where it turns dimensions i and i + d/2 at position p by
        p * inverse_frequencies[i] in every layer; None for an embedding of another form.
    """

    model: torch.nn.Module
    identity: ModelIdentity
    kv_dtype: str
    inverse_frequencies: Tensor | None = None


def identify(folder: ModelFolder) -> ModelIdentity:
    """What the model is, from its files alone; weights are hashed but not loaded.

    The fingerprint covers the configuration and the bytes of the weights, whatever the folder's name or place.
    """
    config = _read_config(folder)
    query_heads = int(config.num_attention_heads)
    return ModelIdentity(
        name=folder.name,
        architecture=_architecture(folder, config),
        fingerprint=_fingerprint(folder),
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        layers=int(config.num_hidden_layers),
        query_heads=query_heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or query_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // query_heads),
        vocab_size=int(config.vocab_size),
        max_positions=_max_positions(folder, config),
    )


def checkpoint_dtype(folder: ModelFolder) -> str:
    """Name of the dtype that the configuration gives; ModelUnsupportedError when K and V cannot be stored in it."""
    dtype = getattr(_read_config(folder), "dtype", None) or torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in KV_DTYPES:
        raise folder.refuse(
            f"its weights are {name}; keys and values can be stored in {', '.join(KV_DTYPES)}"
        )
    return name


def check_positions(identity: ModelIdentity, count: int) -> None:
    """Raises InvalidArgumentError when `count` tokens are more than the model has positions for."""
    if count > identity.max_positions:
        raise InvalidArgumentError(
            f"{count} tokens are more than the {identity.max_positions} positions of model {identity.name!r}; "
            "shorten the text",
            tokens=count,
            max_positions=identity.max_positions,
        )


def load_model(
    folder: ModelFolder,
    attention: str,
    compute_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Loads the weights, with the attention function registered under the name `attention` in place of the model's.

    `compute_dtype` None: float32 on CPU (where lower precisions are slower and less exact), the checkpoint's own
    elsewhere. Raises ModelUnsupportedError, before the weights are read, for a model that cannot be served.
    """
    identity = identify(folder)
    kv_dtype = checkpoint_dtype(folder)
    config = _read_config(folder)
    check_servable(folder, config, identity)
    if compute_dtype is None:
        on_cpu = torch.device(device).type == "cpu"
        compute_dtype = torch.float32 if on_cpu else stored_dtype(kv_dtype).torch_dtype
    bars_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder.path,
            dtype=compute_dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise ModelUnsupportedError(f"model {folder.name!r} cannot be loaded: {first_line(error)}") from error
    finally:
        if bars_shown:
            transformers_logging.enable_progress_bar()
    absent = sorted(report["missing_keys"])
    if absent:
        raise ModelUnsupportedError(
            f"model {folder.name!r} has no weights for {len(absent)} parameters, the first is {absent[0]!r}; "
            "the folder is incomplete or its config.json belongs to another model"
        )
    model.requires_grad_(False)
    frequencies = _inverse_frequencies(model, config, identity.head_dim)
    return LoadedModel(model.to(device).eval(), identity, kv_dtype, frequencies)


def _inverse_frequencies(model: torch.nn.Module, config: Any, head_dim: int) -> Tensor | None:
    """Those of the one rotary embedding; None where there is another number of them, or one of another form."""
    found = [
        module for name, module in model.named_modules() if name.rpartition(".")[2].startswith("rotary_emb")
    ]
    frequencies = getattr(found[0], "inv_freq", None) if len(found) == 1 else None
    if not isinstance(frequencies, Tensor) or frequencies.shape != (head_dim // 2,) or head_dim % 2:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models turn neighbouring dimensions instead of those half the width apart.
    rotate = getattr(sys.modules[type(model).__module__], "rotate_half", None)
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE or rotate is None:
        return None
    numbers = torch.arange(1.0, head_dim + 1.0)
    first, second = numbers.chunk(2)
    return frequencies.float().cpu() if torch.equal(rotate(numbers), torch.cat([-second, first])) else None


def check_servable(folder: ModelFolder, config: Any, identity: ModelIdentity) -> None:
    """Raises ModelUnsupportedError unless every layer hands plain causal attention to the attention interface.

    The model's skeleton (no weights, no memory) is run once with an attention function that only takes notes.
    """
    calls = _probe(folder, config)
    if [call["layer"] for call in calls] != list(range(identity.layers)):
        raise folder.refuse(
            f"{len(calls)} attention calls for {identity.layers} layers went through transformers' attention "
            "interface; every layer must make exactly one"
        )
    for call in calls:
        expected_query = (1, identity.query_heads, _PROBE_TOKENS, identity.head_dim)
        expected_key = (1, identity.kv_heads, _PROBE_TOKENS, identity.head_dim)
        if (call["query"], call["key"], call["value"]) != (expected_query, expected_key, expected_key):
            raise folder.refuse(
                f"layer {call['layer']} has queries {call['query']}, keys {call['key']} and values {call['value']}; "
                f"config.json promises {expected_query} and {expected_key}"
            )
        if not call["causal"]:
            raise folder.refuse(f"layer {call['layer']} is not causal")
        if not math.isclose(call["scaling"] or 0.0, identity.head_dim**-0.5, rel_tol=1e-6):
            raise folder.refuse(
                f"layer {call['layer']} scales logits by {call['scaling']}, not by 1/sqrt(head dim)"
            )
        if call["extras"]:
            raise folder.refuse(
                f"layer {call['layer']} needs the attention features {', '.join(call['extras'])}"
            )


def _probe(folder: ModelFolder, config: Any) -> list[dict[str, Any]]:
    """Runs the model's skeleton on meta tensors; one note per attention call."""
    calls: list[dict[str, Any]] = []
    AttentionInterface.register(_PROBE, _note_attention_call)
    try:
        with torch.device("meta"), torch.inference_mode():
            skeleton = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                attn_implementation=_PROBE,
                dtype=stored_dtype(checkpoint_dtype(folder)).torch_dtype,
            ).eval()
            skeleton.get_decoder()(
                input_ids=torch.zeros(1, _PROBE_TOKENS, dtype=torch.long),
                position_ids=torch.arange(_PROBE_TOKENS)[None],
                use_cache=False,
                attention_probe=calls,
            )
    except Exception as error:
        raise folder.refuse(
            f"it does not run through transformers' attention interface ({type(error).__name__}: {first_line(error)})"
        ) from error
    return calls


def _note_attention_call(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_probe: list[dict[str, Any]],
    scaling: float | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    extras = [name for name, given in arguments.items() if given is not None]
    attention_probe.append(
        {
            "layer": getattr(module, "layer_idx", None),
            "query": tuple(query.shape),
            "key": tuple(key.shape),
            "value": tuple(value.shape),
            "causal": bool(getattr(module, "is_causal", True)),
            "scaling": scaling,
            "extras": sorted(set(extras) - _HARMLESS_ATTENTION_ARGUMENTS),
        }
    )
    return torch.empty_like(query).transpose(1, 2), None


def _read_config(folder: ModelFolder) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # every architecture validates its configuration in its own way
        raise folder.refuse(f"its config.json cannot be read: {first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise folder.refuse(f"{config.model_type} is an encoder-decoder; only decoders can be served")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise folder.refuse(f"{config.model_type} is not a causal language model that transformers knows")
    absent = [
        name
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
        if not getattr(config, name, None)
    ]
    if absent:
        raise folder.refuse(f"its configuration has no {', '.join(absent)}")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise folder.refuse(
            f"it has layers of kind {', '.join(sorted(kinds))}; every layer must attend to the whole context"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        raise folder.refuse(
            f"its {rope['rope_type']} position encoding changes stored keys as the text grows"
        )
    return config


def _architecture(folder: ModelFolder, config: Any) -> str:
    names: Sequence[str] = getattr(config, "architectures", None) or ()
    return names[0] if names else str(AutoModelForCausalLM._model_mapping[type(config)].__name__)


def _max_positions(folder: ModelFolder, config: Any) -> int:
    """Positions at which every layer still sees the whole context: the trained range, or a shorter sliding window."""
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        raise folder.refuse("its configuration has no max_position_embeddings")
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return int(positions)
    return min(int(positions), int(window))


def _fingerprint(folder: ModelFolder) -> str:
    raw = json.loads((folder.path / "config.json").read_text())
    meaningful = {name: value for name, value in raw.items() if name not in _INCIDENTAL_CONFIG}
    digest = hashlib.sha256(json.dumps(meaningful, sort_keys=True).encode())
    for file in _weight_files(folder):
        digest.update(hash_file(file).encode())
    return digest.hexdigest()


def _weight_files(folder: ModelFolder) -> list[Path]:
    """The safetensors files that make up the model, in a fixed order."""
    index = folder.path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise folder.refuse(f"its {index.name} cannot be read: {first_line(error)}") from error
    else:
        names = ["model.safetensors"]
    files = [folder.path / name for name in names]
    for file in files:
        if not file.is_file():
            raise folder.refuse(f"its weights {file.name} are missing; weights must be in safetensors format")
    return files
