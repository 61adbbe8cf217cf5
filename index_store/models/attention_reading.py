"""How a model attends, layer by layer, as it tells transformers' attention interface: windows, scales, caps, sinks.

The model's skeleton (no weights, no memory) is run once with an attention function that only takes notes. Masks are
read as functions of positions, so that a window of thousands of tokens shows in a pass over a few.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from index_store.models.model_folder import ModelFolder, first_line
from index_store.models.quantized import widened
from index_store.models.state_cache import IndexCache, StateCache, cache_layers
from index_store.store.description.context_id import ModelStates


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
    quantized = value(config, "quantization_config") or value(whole, "quantization_config")
    if quantized is not None:
        config.quantization_config = widened(folder, quantized)
    if (
        value(config, "recurrent_kv_cache_mode") == "last_loop"
    ):  # what was read in one pass or in several would differ
        raise folder.refuse(
            "its earlier loops read keys of the last one's (recurrent_kv_cache_mode last_loop)"
        )
    absent = [name for name in ("num_hidden_layers", "vocab_size") if not value(config, name)]
    if absent:
        raise folder.refuse(f"its configuration has no {', '.join(absent)}")
    return config


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


_NOTES = "sparsekv_notes"
_TOKENS = 5
_FEATURES: Mapping[str, str] = {
    "position_bias": "learnt biases of positions",
    "sinks": "sinks that depend on the text",
    "block_indices": "blocks of keys that a learnt index of its own selects",
}
"""Arguments of the attention interface that no store of keys and values can serve, in words."""

_UNDERSTOOD = frozenset({"sliding_window", "softcap", "s_aux", "is_causal", "indices"})
_WITHOUT_EFFECT = frozenset(
    {"dropout", "output_attentions", "position_ids", "use_cache", "cache_position", "encoder_hidden_states"}
)


@dataclass(frozen=True, slots=True)
class LayerReading:
    """Attention of one layer.

    head_dim: of queries and keys, or of values where those are wider; the narrower ones are filled up with zeros.
    window: a query sees so many keys, its own included; None for all. chunked: those of its own chunk of so many.
    scale: of the logits. cap: see `LogitForm`. sinks: name of the decoder's parameter with a learnt sink for
    every query head; None without. index_keys: numbers in a token's key of the model's own index, for which the last KV
    head stands in layers without a window; 0 without such an index.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    scale: float
    cap: float | None
    sinks: str | None
    chunked: bool = False
    index_keys: int = 0


def logit_cap(readings: Sequence[LayerReading]) -> float | None:
    """The soft cap of the model's logits; None without one. No model has different ones."""
    return next((own.cap for own in readings if own.cap is not None), None)


@dataclass(slots=True)
class _Notes:
    """Of one pass. cache: of a model with states. index: of one with an index of its own. names: of the decoder's
    parameters, by id. masks: those that were made, with the functions that they show. calls: of attention, in order.
    """

    cache: StateCache | None
    index: IndexCache | None = None
    names: dict[int, str] = field(default_factory=dict)
    masks: list[tuple[Tensor, Callable[..., Tensor]]] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the attention function. mask: its function; None without one. foreign: the mask is the layer's own.

    sinks: name of the parameter that was given for them.
    """

    layer: int | None
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    scale: float
    causal: bool
    mask: Callable[..., Tensor] | None
    foreign: bool
    sinks: str | None
    arguments: Mapping[str, Any]


_running = threading.local()
"""The notes of the pass that this thread runs: masks are made without a word from the caller."""


def read_layers(folder: ModelFolder, config: Any) -> tuple[tuple[LayerReading, ...], ModelStates | None]:
    """How every layer attends that does, and what the others keep.

    Raises ModelUnsupportedError, naming the feature, for a layer that keeps what no cache of transformers holds, whose
    mask is neither causal nor a sliding window, or that needs what the attention function here does not do.
    """
    notes = _take_notes(folder, config)
    calls = notes.calls
    attending = [call.layer for call in calls]
    states = _check_order(folder, config, notes, attending)
    limit = max_positions(folder, config)
    width = 0 if notes.index is None else notes.index.width
    readings = tuple(_read(folder, config, call, limit, width) for call in calls)
    _check_cache(folder, config, dict(zip(attending, readings, strict=True)), limit)
    return readings, states


def _check_cache(
    folder: ModelFolder, config: Any, readings: Mapping[int | None, LayerReading], limit: int
) -> None:
    """Refuses a model that would see other keys with transformers' own cache than its masks show."""
    for layer, cached in enumerate(cache_layers(config)):
        size = getattr(cached, "sliding_window", None)
        kept, reading = size if isinstance(size, int) and size < limit else None, readings.get(layer)
        if kept is not None and reading is not None and reading.window != kept:
            raise folder.refuse(
                f"layer {layer} sees {reading.window or 'all'} keys by its mask and {kept} by transformers' cache of it"
            )


def _check_order(
    folder: ModelFolder, config: Any, notes: _Notes, found: Sequence[int | None]
) -> ModelStates | None:
    """Every layer must attend, one after another, or several times, or keep a state; returns what those keep."""
    layers = int(config.num_hidden_layers)
    if not found and notes.cache is not None:
        raise folder.refuse(
            "none of its layers attends: there are no keys to be searched, and only a state to be kept"
        )
    if not found:
        raise folder.refuse("its attention does not go through transformers' attention interface")
    if len(set(found)) < len(found):
        if notes.cache is not None or notes.index is not None:
            raise folder.refuse(
                f"its {len(set(found))} layers attend {len(found)} times in a pass, and keep more than keys and values"
            )
        return None  # each time with keys of its own: calls are counted
    attending = [layer for layer in found if layer is not None]
    if attending != sorted(found, key=lambda layer: -1 if layer is None else layer):
        raise folder.refuse(f"its layers attend in the order {list(found)}, expected one after another")
    without = sorted(set(range(layers)) - set(attending))
    states = None if notes.cache is None else notes.cache.found(attending)
    if states is not None and notes.cache is not None:  # others neither attend nor keep anything
        kept = {layer for part in states.parts for layer in part.layers}
        without = [layer for layer in without if notes.cache.numbers[layer] and layer not in kept]
    if without:
        kinds = layer_kinds(config)
        named = sorted({kinds[layer] for layer in without if layer < len(kinds)})
        which = f"layer {without[0]} and others ({len(without)} of {layers}{': ' if named else ''}{', '.join(named)})"
        raise folder.refuse(
            f"{which} keep a state that is not in transformers' cache, so no session can have its own"
        )
    return states


def _read(folder: ModelFolder, config: Any, call: _Call, limit: int, index_keys: int) -> LayerReading:
    layer, given = call.layer, call.arguments
    _check_arguments(folder, call)
    (_, query_heads, tokens, head_dim), (_, kv_heads, keys, _), width = call.query, call.key, call.value[-1]
    if (tokens, keys, call.value[1:3]) != (_TOKENS, _TOKENS, (kv_heads, keys)) or query_heads % kv_heads:
        raise folder.refuse(
            f"layer {layer} has queries {call.query}, keys {call.key} and values {call.value} for {_TOKENS} tokens; "
            "expected one key and one value a token, and query heads in equal groups"
        )
    if not call.causal or given.get("is_causal") is False:
        raise folder.refuse(f"layer {layer} is not causal: it also attends to later tokens")
    if call.foreign:
        raise folder.refuse(f"layer {layer} makes an attention mask of its own")
    sinks = given.get("s_aux")
    if sinks is not None and (call.sinks is None or sinks.numel() != query_heads):
        raise folder.refuse(f"layer {layer} has sinks that are not one learnt number for every query head")
    cap = given.get("softcap")
    window, chunked = _window(folder, config, call, limit)
    if index_keys > 2 * max(head_dim, width):
        raise folder.refuse(
            f"keys of its own index have {index_keys} numbers, more than a key and a value ({2 * max(head_dim, width)})"
        )
    if window is not None:
        index_keys = 0
    if index_keys:  # they are kept as those of one KV head more
        query_heads, kv_heads = query_heads + query_heads // kv_heads, kv_heads + 1
    return LayerReading(
        query_heads,
        kv_heads,
        max(head_dim, width),
        window,
        call.scale,
        None if not cap else float(cap),
        call.sinks,
        chunked,
        index_keys,
    )


def _check_arguments(folder: ModelFolder, call: _Call) -> None:
    for name in call.arguments:
        if name not in _UNDERSTOOD | _WITHOUT_EFFECT:
            feature = _FEATURES.get(name, "a feature that is not known here")
            raise folder.refuse(f"layer {call.layer} needs {feature} (attention argument {name})")


def _window(folder: ModelFolder, config: Any, call: _Call, limit: int) -> tuple[int | None, bool]:
    """How many keys a query sees by the call's mask, where that is fewer than all positions, and whether in chunks."""
    if call.mask is None:
        return None, False
    windows: dict[int, int] = {}
    chunk = value(config, "attention_chunk_size")
    for position in sorted({0, 1, limit // 3, limit // 2 + 1, limit - 1}):
        try:
            seen = _seen(call.mask, position)
        except Exception as error:
            if (
                chunk
            ):  # counted from padding of which there are no numbers; whether it is so shows in the self-check
                return (int(chunk), True) if chunk < limit else (None, False)
            what = f"has a mask that {type(error).__name__} hides"
            raise folder.refuse(f"layer {call.layer} {what}; {_EXPECTED}") from error
        size = int(seen.sum())
        if not bool(seen[len(seen) - size :].all()):
            raise folder.refuse(f"layer {call.layer} has an attention mask of another shape; {_EXPECTED}")
        if size < position + 1:
            windows[position] = size
    if windows and chunk and all(size == position % chunk + 1 for position, size in windows.items()):
        return int(chunk), True
    if len(set(windows.values())) > 1 or 0 in windows.values():
        raise folder.refuse(f"layer {call.layer} has an attention mask whose width changes; {_EXPECTED}")
    return next(iter(windows.values()), None), False


_EXPECTED = "every layer must see all earlier tokens, a sliding window of them, or those of its chunk"


def _seen(mask: Callable[..., Tensor], position: int) -> Tensor:
    """Which keys up to its own a query at the position sees, [position + 1] bool."""
    none = torch.zeros(1, dtype=torch.long)
    seen = mask(none, none, torch.tensor([position]), torch.arange(position + 1))
    return torch.as_tensor(seen).expand(position + 1)


def _take_notes(folder: ModelFolder, config: Any) -> _Notes:
    """Runs the model's skeleton; notes of one pass over a few tokens."""
    AttentionInterface.register(_NOTES, _note_call)
    AttentionMaskInterface.register(_NOTES, _note_mask)
    try:
        with torch.device("meta"), torch.inference_mode(), quietly():
            # bfloat16, whatever the checkpoint has: kernels for experts take nothing else without data.
            skeleton = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=_NOTES, dtype=torch.bfloat16
            ).eval()
    except Exception as error:
        raise folder.refuse(_why_it_fails("its configuration does not make a model", error)) from error
    decoder = decoder_of(skeleton)
    if getattr(skeleton, "_is_stateful", False) and StateCache.noting(decoder.config) is None:
        raise folder.refuse("it keeps a recurrent state that is not in transformers' cache of such layers")
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise folder.refuse("its decoder takes no position_ids, so it cannot go on after a stored text")
    first: Exception | None = None
    # Some need numbers: all zero then, in memory of one number for each weight.
    tries: dict[str, Callable[[], Any]] = {
        "meta": lambda: decoder,
        "cpu": lambda: decoder_of(_hollow(skeleton)),
    }
    for device, made in tries.items():
        cache = StateCache.noting(decoder.config)
        notes = _Notes(cache, IndexCache.noting(decoder.config) if cache is None else None)
        try:
            _run(made(), device, notes)
            return notes
        except Exception as error:
            for call in notes.calls:  # a feature that has a name says more than what it broke
                _check_arguments(folder, call)
            first = first or error
    what = "its decoder does not run on token ids and positions alone"
    raise folder.refuse(_why_it_fails(what, first)) from first


def decoder_of(model: Any) -> Any:
    """The part of a causal language model that runs its layers, without the output head."""
    decoder = model.get_decoder()
    # Some call their output layer so.
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def _why_it_fails(what: str, error: Exception | None) -> str:
    if isinstance(error, KeyError) and error.args == (_NOTES,):
        return "its attention does not go through transformers' attention interface"
    return what if error is None else f"{what} ({type(error).__name__}: {first_line(error)})"


def _run(decoder: Any, device: str, notes: _Notes) -> None:
    notes.names.update({id(parameter): name for name, parameter in decoder.named_parameters()})
    _running.notes = notes
    try:
        with torch.device(device), torch.inference_mode(), quietly():
            # Without position_ids, which count from 0, and with a mask, so that nobody looks for numbers in them.
            ids = torch.zeros(1, _TOKENS, dtype=torch.long)
            cache = notes.cache or notes.index
            states = {} if cache is None else {"cache": cache}
            mask = torch.ones_like(ids)
            decoder(input_ids=ids, attention_mask=mask, use_cache=False, **states)
    finally:
        _running.notes = None


def _hollow(skeleton: Any) -> Any:
    """The skeleton on the CPU, every weight and buffer a single zero that is shown everywhere."""

    def zero(tensor: Tensor) -> Tensor:
        return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)

    with suppress(ValueError, AttributeError):  # where there are some; others want weights of their own
        skeleton.set_experts_implementation("eager")
    with torch.inference_mode():
        return skeleton._apply(zero)


@contextmanager
def quietly() -> Iterator[None]:
    """Without what transformers has to say, and without its bars, which are for who calls it by hand."""
    before, bars_shown = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars_shown:
            transformers_logging.enable_progress_bar()


def _note_mask(
    batch_size: int, q_length: int, kv_length: int, *positional: Any, mask_function: Any = None, **_: Any
) -> Tensor:
    """A mask of the usual shape, without content, which is told from others by its memory."""
    notes: _Notes | None = getattr(_running, "notes", None)
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=torch.bool)
    if notes is not None and mask_function is not None:
        notes.masks.append((mask, mask_function))
    return mask


def _note_call(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    notes: _Notes = _running.notes
    mask = None
    if attention_mask is not None:
        memory = attention_mask.untyped_storage()._cdata
        mask = next((seen for made, seen in notes.masks if made.untyped_storage()._cdata == memory), None)
    notes.calls.append(
        _Call(
            getattr(module, "layer_idx", None) if notes.cache is None else notes.cache.attending,
            tuple(query.shape),
            tuple(key.shape),
            tuple(value.shape),
            float(query.shape[-1] ** -0.5 if scaling is None else scaling),
            bool(getattr(module, "is_causal", True)),
            mask,
            attention_mask is not None and mask is None,
            notes.names.get(id(arguments.get("s_aux"))),
            arguments,
        )
    )
    batch, heads, tokens, _ = query.shape
    return torch.zeros(batch, tokens, heads, value.shape[-1], dtype=query.dtype, device=query.device), None
