"""GGUF files as model folders: converted once, kept by content, then served like any Hugging Face folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_store.errors import ModelUnsupportedError
from index_store.models.digests import hash_file
from index_store.models.model_folder import ModelFolder, first_line, model_cache

if TYPE_CHECKING:
    import torch
    from gguf import ReaderTensor

_MAGIC = b"GGUF"
# What a folder of the cache was made with; another number converts anew.
_CONVERSION = 2

log = logging.getLogger(__name__)


def convert_gguf(file: Path, name: str, folder: Path) -> ModelFolder:
    """Converts a GGUF file into the model folder `folder`, unless that is there. See `gguf_folder`."""
    source = ModelFolder(file, name)
    _check_magic(source)
    if not folder.is_dir():
        _check_package(source)
        log.info("converting %s to a model folder; this happens once", file.name)
        _publish(source, folder)
    return ModelFolder(folder, name)


def gguf_folder(file: Path, name: str) -> ModelFolder:
    """The model folder that a GGUF file becomes; converts it when the cache does not hold it yet.

    Quantised weights are expanded to bfloat16; those of a float16 or float32 file keep their type. The folder's place
    is a function of the file's content, so a copy or another name finds the same folder, and a changed file another.
    name: what people call the model. Raises ModelUnsupportedError for a file that is no GGUF file, is cut off, or has
    a setting or a tensor that the folder would not have, naming it, and when the package that reads them is missing.
    """
    return convert_gguf(file, name, model_cache() / f"gguf-{_CONVERSION}-{hash_file(file)}")


def _check_magic(source: ModelFolder) -> None:
    try:
        with source.path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as error:
        raise source.refuse(f"its file cannot be read: {error.strerror}") from error
    if start != _MAGIC:
        raise source.refuse(f"the file is no GGUF file (it starts with {start!r}, expected {_MAGIC!r})")


def _check_package(source: ModelFolder) -> None:
    if find_spec("gguf") is None:
        raise source.refuse("reading GGUF files needs the package gguf: pip install 'sparsekv[gguf]'")


def _publish(source: ModelFolder, folder: Path) -> None:
    """Converts beside the final place and renames: a killed conversion leaves nothing that could be taken for one."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    except OSError as error:
        raise source.refuse(
            f"it cannot be converted, because {folder.parent} cannot be written: {error.strerror}; "
            "name another folder in SPARSEKV_CACHE"
        ) from error
    # Bars of the libraries are for people: they do not belong into a log.
    bars = nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO())
    try:
        with bars:
            _convert(source, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first with the same content
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _convert(source: ModelFolder, folder: Path) -> None:
    # Late: a command that names a folder never pays for these.
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM
    from transformers.integrations.gguf import read_gguf_metadata

    from index_store.models.attention_reading import read_layers
    from index_store.models.gguf_settings import (
        USED_BY_SETTINGS,
        GgufSettings,
        UnusedSettingError,
        gguf_tokenizer,
    )

    file = source.path
    try:
        metadata, names = read_gguf_metadata(str(file))
        settings = GgufSettings(metadata, names)
        tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
        factors = {name: _values(tensors.pop(name)).tolist() for name in USED_BY_SETTINGS if name in tensors}
        config = settings.config(factors)
        dtype = _weights_dtype(tensors.values())
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        rotated = [2 * own.numel() for name, own in model.named_buffers() if name.endswith("inv_freq")]
        try:
            readings, _ = read_layers(source, config)
        except ModelUnsupportedError as error:
            raise settings.reason(error) from error
        settings.check(config, readings, rotated)
        tokenizer, ends = gguf_tokenizer(file, metadata)
        model.load_state_dict(
            _placed(settings.architecture, model, tensors, dtype), strict=False, assign=True
        )
        model.tie_weights()
        model.generation_config.eos_token_id = ends or None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except UnusedSettingError as error:
        raise source.refuse(
            f"{error}; take the folder of safetensors that the GGUF file was made from"
        ) from error
    except ModelUnsupportedError:
        raise
    except Exception as error:  # every reader of a binary format fails in its own way
        raise source.refuse(f"the GGUF file cannot be converted: {first_line(error)}") from error
    origin = {"file": file.name, "sha256": hash_file(file), "dtype": str(dtype).removeprefix("torch.")}
    (folder / "converted_from.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())


def _placed(
    architecture: str, model: Any, tensors: Mapping[str, ReaderTensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The model's parameters. Raises UnusedSettingError for tensors without a place, and places without a tensor."""
    import torch
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    from index_store.models.gguf_settings import UnusedSettingError

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    places: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    lost = sorted(name for name in tensors if not {name, name.removesuffix(".weight")} & places.keys())
    if lost:
        raise UnusedSettingError(
            f"its tensor {lost[0]} has no place in a {model.config.model_type} model ({len(lost)} have none)"
        )
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        made = processor.process(
            weights=_values(tensor),
            name=name,
            tensor_key_mapping=places,
            parsed_parameters={"tensors": found},
        )
        if made.name is not None:  # else the processor has put it where it belongs
            found[places[made.name]] = torch.from_numpy(made.weights.copy())
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    absent = sorted(parameters.keys() - found.keys() - tied)
    if absent:
        raise UnusedSettingError(f"it has no tensor for {absent[0]} ({len(absent)} are missing)")
    for name, own in found.items():
        if own.shape != parameters[name].shape:
            raise UnusedSettingError(
                f"its tensor for {name} is {list(own.shape)}, expected {list(parameters[name].shape)}"
            )
    return {name: own.to(dtype) for name, own in found.items()}


def _values(tensor: ReaderTensor) -> Any:
    """A tensor's values in float32, as an array of numpy."""
    from gguf import dequantize

    return dequantize(tensor.data, tensor.tensor_type)


def _weights_dtype(tensors: Iterable[ReaderTensor]) -> torch.dtype:
    """bfloat16 where anything is quantised, else the file's own type; norms may be float32 beside halves."""
    import torch
    from gguf import GGMLQuantizationType

    types = {tensor.tensor_type for tensor in tensors}
    if types <= {GGMLQuantizationType.F32}:
        return torch.float32
    if types <= {GGMLQuantizationType.F32, GGMLQuantizationType.F16}:
        return torch.float16
    return torch.bfloat16
