"""Which model: finds a Hugging Face folder, identifies it by content, checks that it can be served, loads it.

The only place where transformers loads a model. Nothing is downloaded and no code from a model folder is run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from index_store.attention.attention_state import PLAIN, LogitForm
from index_store.errors import InvalidArgumentError, ModelUnsupportedError
from index_store.models.attention_reading import (
    LayerReading,
    decoder_of,
    is_text_part,
    max_positions,
    quietly,
    read_config,
    read_layers,
)
from index_store.models.digests import Progress, Stamp, hash_files
from index_store.models.model_folder import ModelFolder, first_line, weight_files, weights_entry
from index_store.models.resolve import resolve_model
from index_store.models.self_check import (
    Examination,
    Verdict,
    agrees,
    examine,
    in_float32,
    remembered,
    short_lists,
)
from index_store.models.token_by_token import noting_readers, read_singly
from index_store.models.tokenizer import Tokenizer, load_tokenizer, tokenizer_fingerprint
from index_store.store.description.context_id import LayerShape, ModelIdentity, ModelStates, WindowLayers
from index_store.store.description.dtypes import KV_DTYPES, stored_dtype

_SINGLY = "singly"  # in a verdict: the modules that read single tokens
_UNKNOWN = "unknown"  # in place of a fingerprint that is still being computed

# Entries of config.json that name the software or the place, not the function that the model computes.
_INCIDENTAL_CONFIG = frozenset({"_name_or_path", "transformers_version", "use_cache", "_attn_implementation"})


@dataclass(frozen=True, slots=True)
class Identifying:
    """A model whose weights are being hashed. described: all that is known without, the fingerprint a placeholder."""

    described: ModelIdentity
    _fingerprint: Future[str]

    def result(self) -> ModelIdentity:
        """Waits for the fingerprint. Raises ModelUnsupportedError for a file that changed while it was read."""
        return replace(self.described, fingerprint=self._fingerprint.result())


def identify(folder: ModelFolder, progress: Progress | None = None) -> ModelIdentity:
    """What the model is, from its files alone; weights are hashed but not loaded.

    The fingerprint covers the configuration and the bytes of the weights, whatever the folder's name or place.
    progress: of hashing weights that are new or have changed. Raises ModelUnsupportedError for a model that cannot be
    served, naming the feature.
    """
    with identifying(folder, progress) as model:
        return model.result()


@contextmanager
def identifying(folder: ModelFolder, progress: Progress | None = None) -> Iterator[Identifying]:
    """Hashes a model's weights by threads beside what the block does; an error in the block ends the hashing.

    A model that cannot be served is refused before the block begins. Leaving the block waits for the fingerprint, and
    raises ModelUnsupportedError if a file of the model changed since it was entered.
    """
    described = describe(folder)
    before = _stamps(folder)
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="identify") as pool:
        model = Identifying(described, pool.submit(_fingerprint, folder, progress, stop))
        try:
            yield model
            model.result()
        finally:
            stop.set()
    for earlier, now in zip(before, _stamps(folder), strict=False):
        if earlier != now:
            raise folder.refuse(
                f"its {Path(now.path).name} changed while it was read; try again when nobody writes to it"
            )


def describe(folder: ModelFolder) -> ModelIdentity:
    """Everything but the fingerprint: no weights are read. Raises ModelUnsupportedError as `read_layers` does."""
    config = read_config(folder)
    readings, states = _read_once(folder, (folder.path / "config.json").read_bytes())
    full = _common(
        folder, "that see all keys", (shape for shape in _shapes(readings) if shape.window is None)
    )
    windowed = _common(
        folder, "with a sliding window or chunks", (shape for shape in _shapes(readings) if shape.window)
    )
    window = None
    if windowed is not None and windowed.window is not None:
        layers = tuple(layer for layer, reading in enumerate(readings) if reading.window)
        window = WindowLayers(
            layers,
            windowed.window,
            windowed.query_heads,
            windowed.kv_heads,
            windowed.head_dim,
            windowed.chunked,
        )
    shape = full or windowed
    if shape is None:
        raise folder.refuse("it has no layers")
    return ModelIdentity(
        name=folder.name,
        architecture=_architecture(config),
        fingerprint=_UNKNOWN,
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        layers=len(readings),
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=int(config.vocab_size),
        max_positions=max_positions(folder, config),
        window=window,
        states=states,
        index_keys=max((reading.index_keys for reading in readings), default=0),
    )


def attention_of(folder: ModelFolder) -> tuple[LayerReading, ...]:
    """How every layer of the model attends that does. Raises ModelUnsupportedError as `read_layers` does."""
    return _read_once(folder, (folder.path / "config.json").read_bytes())[0]


@lru_cache(maxsize=64)
def _read_once(folder: ModelFolder, settings: bytes) -> tuple[tuple[LayerReading, ...], ModelStates | None]:
    return read_layers(folder, read_config(folder))


def checkpoint_dtype(folder: ModelFolder) -> str:
    """Name of the dtype that the configuration gives; ModelUnsupportedError when K and V cannot be stored in it."""
    dtype = getattr(read_config(folder), "dtype", None) or torch.float32
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


def _shapes(readings: Sequence[LayerReading]) -> Iterable[LayerShape]:
    return (
        LayerShape(own.query_heads, own.kv_heads, own.head_dim, own.window, own.chunked) for own in readings
    )


def _common(folder: ModelFolder, which: str, shapes: Iterable[LayerShape]) -> LayerShape | None:
    """The one shape of these layers; None where there are none."""
    different = list(dict.fromkeys(shapes))
    if len(different) > 1:
        raise folder.refuse(
            f"its layers {which} differ ({different[0]} and {different[1]}); they must be alike"
        )
    return different[0] if different else None


def _architecture(config: Any) -> str:
    names: Sequence[str] = getattr(config, "architectures", None) or ()
    return names[0] if names else str(AutoModelForCausalLM._model_mapping[type(config)].__name__)


def _stamps(folder: ModelFolder) -> list[Stamp]:
    return [Stamp.of(file) for file in (folder.path / "config.json", *weight_files(folder))]


def _fingerprint(folder: ModelFolder, progress: Progress | None, stop: threading.Event) -> str:
    raw = json.loads((folder.path / "config.json").read_text())
    meaningful = {name: value for name, value in raw.items() if name not in _INCIDENTAL_CONFIG}
    digest = hashlib.sha256(json.dumps(meaningful, sort_keys=True).encode())
    for own in hash_files(folder, weight_files(folder), progress, stop):
        digest.update(own.encode())
    return digest.hexdigest()


__all__ = [
    "LoadedModel",
    "ModelFolder",
    "Tokenizer",
    "check_positions",
    "checkpoint_dtype",
    "describe",
    "identify",
    "identifying",
    "load_model",
    "load_tokenizer",
    "resolve_model",
]

logger = logging.getLogger(__name__)

# Where the text part of a larger model has its weights, and where they belong without the rest.
_WRAPPED = {
    r"^(model\.)?language_model\.(model\.)?(?!lm_head)": "model.",
    r"^language_model\.lm_head": "lm_head",
}

# Errors of transformers and of what it reads, for a folder that is not what it says.
_UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    SafetensorError,
)

_SENDERS, _STAGED_BYTES = 8, 32 << 20
"""Threads that send weights to a GPU, and how much each copies at a time."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, in evaluation mode, without gradients.

    kv_dtype: name of the checkpoint's dtype, which is the one keys and values are stored in unless asked otherwise.
    readings: how every layer attends. forms: what every layer does to logits, sinks on the model's device.
    weights: how they are kept, where that is not in the dtype that is computed in. remembers: whether what was found
    out about it is kept for other processes.
    """

    model: torch.nn.Module
    identity: ModelIdentity
    kv_dtype: str
    readings: Sequence[LayerReading] = ()
    forms: Sequence[LogitForm] = ()
    weights: str = ""
    remembers: bool = True

    def verify(self, what: str, check: Callable[[Examination], Verdict]) -> Verdict:
        """Compares the model with itself (`self_check`), and what `check` runs with both; remembered under `what`.

        Raises ModelUnsupportedError, with what differs, unless the entries "attention" and `what` are None.
        """

        def compare() -> Verdict:
            with short_lists(self.model):
                seen = examine(self.model, self.identity, self.readings, self.forms)
                if seen.difference is not None:
                    return {"attention": seen.difference}
                with noting_readers(self.model) as readers:
                    found = check(seen)
                if found.get(what) is not None and readers:
                    undo = read_singly(self.model, readers)
                    if (again := check(seen)).get(what) is None:
                        found = {**again, _SINGLY: " ".join(readers)}
                    else:
                        undo()
                return {"attention": None, **found}

        def find_out() -> Verdict:
            try:
                found = compare()
                if agrees(found, what) or next(self.model.parameters()).dtype == torch.float32:
                    return found
                # Rounding has routers choose other experts, and more of them with every layer.
                with suppress(Exception), in_float32(self.model):
                    if agrees(wide := compare(), what):
                        logger.info(
                            "%s %s; in float32 nothing differs", what, found.get(what) or found["attention"]
                        )
                        return wide
                return found
            except Exception as error:  # whatever an unusual layer may raise
                raise ModelUnsupportedError(
                    f"model {self.identity.name!r} cannot be served: it cannot be compared with its own attention "
                    f"({type(error).__name__}: {first_line(error)})",
                    model=self.identity.name,
                ) from error

        verdict = (
            remembered(self.identity, self.model, what, find_out, self.weights)
            if self.remembers
            else find_out()
        )
        read_singly(self.model, (verdict.get(_SINGLY) or "").split())
        for part in ("attention", what):
            if verdict.get(part) is not None:
                with_what = "attention as its layers describe it" if part == "attention" else f"{what} here"
                raise ModelUnsupportedError(
                    f"model {self.identity.name!r} cannot be served: compared with its own attention, logits of "
                    f"{with_what} {verdict[part]}",
                    model=self.identity.name,
                )
        return verdict


def load_model(
    folder: ModelFolder,
    attention: str,
    compute_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    hashing: Progress | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    arrange: Callable[[Any], None] = lambda model: None,
) -> LoadedModel:
    """Loads the weights, with the attention function registered under the name `attention` in place of the model's.

    Weights whose digests are not known yet are hashed meanwhile, which tells `hashing` how far it is. options: further
    ones of transformers' loader. arrange: gets the model as soon as its weights are there.

    `compute_dtype` None: float32 on CPU (where lower precisions are slower and less exact), the checkpoint's
    own elsewhere. On a GPU small functions of its layers are one launch each (`fuse_layers`).
    Raises ModelUnsupportedError, before the weights are read, for a model that cannot be served.
    """
    kv_dtype = checkpoint_dtype(folder)
    if compute_dtype is None:
        on_cpu = torch.device(device).type == "cpu"
        compute_dtype = torch.float32 if on_cpu else stored_dtype(kv_dtype).torch_dtype
    with identifying(folder, hashing) as found:
        model = _load_weights(folder, attention, compute_dtype, options)
        model.requires_grad_(False)
        arrange(model)
        if torch.device(device).type == "cuda":
            _send_weights(model, torch.device(device))
        model = model.to(device).eval()
        if torch.device(device).type == "cuda":
            from index_store.models.fused.layers import fuse_layers  # loads Triton, which a CPU does without

            begin = time.perf_counter()
            logger.info(
                "model %s: %s in one launch each, tried in %.1f s",
                folder.name,
                ", ".join(f"{count} {name}" for name, count in fuse_layers(model).items()),
                time.perf_counter() - begin,
            )
        identity = found.result()
    readings = attention_of(folder)
    return LoadedModel(model, identity, kv_dtype, readings, _forms(model, readings))


def _load_weights(
    folder: ModelFolder, attention: str, compute_dtype: torch.dtype, options: Mapping[str, Any]
) -> Any:
    config = read_config(folder)
    config.transformers_weights = weights_entry(folder)  # else a loader chooses among what lies in the folder
    try:
        with quietly():  # what bars and tables of the library say is said below
            model, report = AutoModelForCausalLM.from_pretrained(
                folder.path,
                config=config,
                dtype=compute_dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **({"key_mapping": _WRAPPED} if is_text_part(folder) else {}),
                **options,
            )
    except _UNREADABLE as error:
        raise ModelUnsupportedError(f"model {folder.name!r} cannot be loaded: {first_line(error)}") from error
    _check_report(folder, model, report)
    return model


def _send_weights(model: torch.nn.Module, device: torch.device) -> None:
    """Moves parameters to a GPU through page-locked memory of several threads: a third of the time `to` takes alone."""
    own = threading.local()

    def send(weight: torch.nn.Parameter) -> None:
        if not hasattr(own, "lanes"):
            held = torch.empty(2, _STAGED_BYTES, dtype=torch.uint8, pin_memory=True)
            own.lanes = [(part, torch.cuda.Event()) for part in held]  # type: ignore[no-untyped-call]
            own.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        sent = torch.empty_like(weight.data, device=device, memory_format=torch.contiguous_format)
        source, target = (tensor.reshape(-1).view(torch.uint8) for tensor in (weight.data.contiguous(), sent))
        with torch.cuda.stream(own.stream):
            for number, start in enumerate(range(0, len(source), _STAGED_BYTES)):
                held, copied = own.lanes[number % 2]
                copied.synchronize()  # what it held last has left
                part = source[start : start + _STAGED_BYTES]
                held.numpy()[: len(part)] = (
                    part.numpy()
                )  # torch would copy with all cores, in each of the threads
                target[start : start + len(part)].copy_(held[: len(part)], non_blocking=True)
                copied.record()
        own.stream.synchronize()
        weight.data = sent

    weights = [weight for weight in model.parameters() if weight.numel() and not weight.is_cuda]
    with ThreadPoolExecutor(_SENDERS, thread_name_prefix="send") as pool:
        list(pool.map(send, weights))


def _check_report(folder: ModelFolder, model: Any, report: Mapping[str, Any]) -> None:
    """Raises ModelUnsupportedError for a model whose weights are not those that its configuration describes."""
    absent = sorted(report["missing_keys"])
    if absent:
        raise ModelUnsupportedError(
            f"model {folder.name!r} has no weights for {len(absent)} parameters, the first is {absent[0]!r}; "
            "the folder is incomplete or its config.json belongs to another model"
        )
    for name, found, expected in sorted(report["mismatched_keys"]):
        vocabulary = model.config.vocab_size
        said = f", whose vocab_size is {vocabulary}," if expected[:1] == (vocabulary,) else ""
        raise ModelUnsupportedError(
            f"model {folder.name!r} cannot be loaded: its weights have {list(found)} for {name}, its config.json{said} "
            f"means {list(expected)}; they belong to different models: copy both from where the model comes from"
        )
    modules = {name for name, _ in model.named_modules() if name}
    unused = sorted(name for name in report["unexpected_keys"] if name.rpartition(".")[0] in modules)
    if unused:
        raise ModelUnsupportedError(
            f"model {folder.name!r} cannot be loaded: its weights have {unused[0]!r} ({len(unused)} such tensors), "
            f"for which a {type(model).__name__} of its config.json has no place; the config.json belongs to another "
            "model or lacks a setting: copy both from where the model comes from"
        )
    others = sorted(report["unexpected_keys"])
    if others and not is_text_part(folder):
        logger.warning(
            "model %s: %d tensors of its weights belong to no part of a %s and are not used, the first is %s",
            folder.name, len(others), type(model).__name__, others[0],
        )  # fmt: skip


def _forms(model: Any, readings: Sequence[LayerReading]) -> tuple[LogitForm, ...]:
    """What every layer does to logits, with its sinks."""
    decoder = decoder_of(model)

    def form(own: LayerReading) -> LogitForm:
        if own.sinks is None:
            return PLAIN if own.cap is None else LogitForm(own.cap)
        sinks = decoder.get_parameter(own.sinks).detach().float()
        return LogitForm(own.cap, pad(sinks, (0, own.query_heads - len(sinks))).view(own.kv_heads, -1))

    return tuple(map(form, readings))
