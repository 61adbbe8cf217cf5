"""GGUF files as model folders: converted once, kept by content, then served like any Hugging Face folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from contextlib import nullcontext, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_store.models.files.digests import hash_file
from index_store.models.files.folder import ModelFolder, first_line, model_cache

if TYPE_CHECKING:
    import torch

_MAGIC = b"GGUF"
_PACKAGES = ("gguf", "accelerate")
# What a folder of the cache was made with; another number converts anew.
_CONVERSION = 1

log = logging.getLogger(__name__)


def convert_gguf(file: Path, name: str, folder: Path) -> ModelFolder:
    """Converts a GGUF file into the model folder `folder`, unless that is there. Raises as `gguf_folder` does."""
    source = ModelFolder(file, name)
    _check_magic(source)
    if not folder.is_dir():
        _check_packages(source)
        log.info("converting %s to a model folder; this happens once", file.name)
        _publish(source, folder)
    return ModelFolder(folder, name)


def gguf_folder(file: Path, name: str) -> ModelFolder:
    """The model folder that a GGUF file becomes; converts it when the cache does not hold it yet.

    Quantised weights are expanded to bfloat16; those of a float16 or float32 file keep their type. The folder's place
    is a function of the file's content, so a copy or another name finds the same folder, and a changed file another.
    name: what people call the model. Raises ModelUnsupportedError for a file that is no GGUF file, is cut off, or
    holds an architecture that cannot be converted, and when the packages that read GGUF files are missing.
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


def _check_packages(source: ModelFolder) -> None:
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise source.refuse(
            f"reading GGUF files needs the packages {' and '.join(missing)}: pip install 'sparsekv[gguf]'"
        )


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
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = source.path
    arguments: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    # Newer releases keep the blocks packed unless told otherwise.
    packing = getattr(transformers, "GgufConfig", None)
    expanded = {} if packing is None else {"quantization_config": packing(dequantize=True)}
    try:
        dtype = _weights_dtype(file)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **arguments)
        read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **expanded, **arguments)
        config = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        # A model that never heard of GGUF: one that was read from such a file does not save itself.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
        plain.load_state_dict(
            {name: tensor.to(dtype) for name, tensor in read.state_dict().items()}, assign=True
        )
        plain.tie_weights()
        plain.generation_config = read.generation_config
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # every reader of a binary format fails in its own way
        raise source.refuse(f"the GGUF file cannot be converted: {first_line(error)}") from error
    origin = {"file": file.name, "sha256": hash_file(file), "dtype": str(dtype).removeprefix("torch.")}
    (folder / "converted_from.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())


def _weights_dtype(file: Path) -> torch.dtype:
    """bfloat16 where anything is quantised, else the file's own type; norms may be float32 beside halves."""
    import torch
    from gguf import GGMLQuantizationType, GGUFReader

    types = {tensor.tensor_type for tensor in GGUFReader(file).tensors}
    if types <= {GGMLQuantizationType.F32}:
        return torch.float32
    if types <= {GGMLQuantizationType.F32, GGMLQuantizationType.F16}:
        return torch.float16
    return torch.bfloat16
