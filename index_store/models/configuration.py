"""A model's configuration: read without running code, its text part found, and what needs another store refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from index_store.models.files.folder import ModelFolder, first_line


def read_config(folder: ModelFolder) -> Any:
    """The configuration of the model's text part, a causal language model that transformers knows.

    Raises ModelUnsupportedError for what cannot be read, has no such part, or needs a store of another kind.
    """
    _refuse_code(folder)
    try:
        whole = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # every architecture validates its configuration in its own way
        raise folder.refuse(f"its config.json cannot be read: {first_line(error)}") from error
    if getattr(whole, "is_encoder_decoder", False):
        raise folder.refuse(f"{whole.model_type} is an encoder-decoder; only decoders can be served")
    config = _text_part(folder, whole)
    for name, feature in _OTHER_STATE.items():
        if value(config, name):
            raise folder.refuse(f"it has {feature} ({name} {value(config, name)})")
    absent = [name for name in ("num_hidden_layers", "vocab_size") if not value(config, name)]
    if absent:
        raise folder.refuse(f"its configuration has no {', '.join(absent)}")
    return config


_OTHER_STATE: Mapping[str, str] = {
    "kv_lora_rank": "multi-head latent attention, whose compressed keys and values no index here can search",
    "index_topk": "attention that selects its keys by a learnt index of its own",
}
"""Settings of attention that keeps something else than keys and values, or reads them otherwise."""


def value(config: Any, name: str) -> Any:
    """A setting; None where the configuration has none of that name, or one for every layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # configurations of layers that differ refuse to name one value for all
        return None


def rope_types(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Kind and parameters of the rotary embedding, or of those that different layers have."""
    parameters = value(config, "rope_parameters") or {}
    each = [parameters] if "rope_type" in parameters else parameters.values()
    for own in each:
        if isinstance(own, Mapping):
            yield str(own.get("rope_type", "default")), own


def max_positions(folder: ModelFolder, config: Any) -> int:
    """Positions that a stored context and what follows it may reach.

    Rotary embeddings of the kinds `longrope` and `dynamic` change with the length reached, from some position on; keys
    that were stored earlier would be rotated otherwise, so the positions end there. For `dynamic` that is
    max_position_embeddings. `yarn` gives as many as it stretches the original ones to, also where
    max_position_embeddings was left as it was before, as model cards have it.
    """
    positions = value(config, "max_position_embeddings")
    if not positions:
        raise folder.refuse("its configuration has no max_position_embeddings")
    most, limits = int(positions), []
    for kind, own in rope_types(config):
        original = own.get("original_max_position_embeddings") or value(
            config, "original_max_position_embeddings"
        )
        if kind == "longrope":
            limits.append(int(original or positions))
        elif kind == "yarn" and own.get("factor"):
            most = max(most, int((original or positions) * own["factor"]))
    return min([most, *limits])


def feed_forward_width(config: Any) -> int:
    """Width of the widest feed-forward layer, about."""
    widths = value(config, "intermediate_size") or 4 * config.hidden_size
    return int(max(widths) if isinstance(widths, list | tuple) else widths)


def layer_kinds(config: Any) -> list[str]:
    """What the configuration calls its layers, one by one; empty where it does not say."""
    for name in ("layer_types", "layers_block_type", "block_types"):
        kinds = value(config, name)
        if kinds:
            return [str(kind) for kind in kinds]
    return []


def _refuse_code(folder: ModelFolder) -> None:
    try:
        settings = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise folder.refuse(f"its config.json cannot be read: {first_line(error)}") from error
    if not isinstance(settings, dict):
        raise folder.refuse("its config.json cannot be read: it is not a JSON object")
    kind = settings.get("model_type")
    if settings.get("auto_map") and kind not in CONFIG_MAPPING:
        raise folder.refuse(
            f"its config.json names code to load it with (auto_map), for model type {kind!r}, which transformers does "
            "not have; code from model folders is never run"
        )


def is_text_part(folder: ModelFolder) -> bool:
    """Whether the configuration that `read_config` returns is a part of that of a larger model."""
    settings = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    return bool(settings.get("model_type") != read_config(folder).model_type)


def _text_part(folder: ModelFolder, whole: Any) -> Any:
    known = AutoModelForCausalLM._model_mapping
    try:
        part = whole.get_text_config()
    except ValueError:  # several, none of which is the one that decodes
        part = whole
    if part is not whole and type(part) in known:
        part = copy.deepcopy(part)
        if "tie_word_embeddings" in whole.to_diff_dict():
            part.tie_word_embeddings = whole.tie_word_embeddings
        return part
    if part is not whole:
        raise folder.refuse(f"its text part ({part.model_type}) is no model of its own to transformers")
    if type(whole) not in known:
        raise folder.refuse(f"{whole.model_type} is not a causal language model that transformers knows")
    return whole
