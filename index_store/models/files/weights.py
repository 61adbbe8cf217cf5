"""The files that hold a model's weights: found, checked as far as that goes without reading them, and hashed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from index_store.models.files.folder import ModelFolder, first_line

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_LENGTH_BYTES = 8  # of the header's length, before the header
_LONGEST_HEADER = 100_000_000


def weight_files(folder: ModelFolder) -> list[Path]:
    """The safetensors files that make up the model, in a fixed order.

    Raises ModelUnsupportedError when one is missing, lies outside of the folder, or is shorter or longer than it says,
    and where the folder has weights of two models, or some beside the model's own.
    """
    files = [folder.path / name for name in _names(folder)]
    for file in files:
        if not file.is_file():
            raise folder.refuse(_why_missing(folder, file))
        _check_length(folder, file)
    for name in _ADAPTERS:
        if (folder.path / name).is_file():
            raise folder.refuse(
                f"it has an adapter ({name}) beside its weights; merge the two (`merge_and_unload` of peft) and save "
                f"the result as a folder of its own, or remove {' and '.join(_ADAPTERS)}"
            )
    return files


def weights_entry(folder: ModelFolder) -> str:
    """Name of the file that a loader begins with to load exactly `weight_files`: the index, or the only file."""
    return _INDEX if (folder.path / _INDEX).is_file() else _WEIGHTS


def _names(folder: ModelFolder) -> list[str]:
    named = _read_named(folder)
    if named is not None:
        raise folder.refuse(
            f"its config.json names the weights {named!r} (transformers_weights); rename that file to {_WEIGHTS} and "
            "remove the entry"
        )
    index = folder.path / _INDEX
    if not index.is_file():
        return [_WEIGHTS]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise folder.refuse(f"its {_INDEX} cannot be read: {first_line(error)}") from error
    for name in names:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise folder.refuse(
                f"its {_INDEX} names the file {name!r}; weights must lie in the model's own folder"
            )
    if _WEIGHTS not in names and (folder.path / _WEIGHTS).is_file():
        raise folder.refuse(
            f"it has weights twice: {_WEIGHTS}, and {len(names)} files that {_INDEX} names; remove those that are not "
            "the model's"
        )
    return names


def _read_named(folder: ModelFolder) -> str | None:
    try:
        settings = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # what reads the configuration says it better
        return None
    named = settings.get("transformers_weights") if isinstance(settings, dict) else None
    return None if named in (None, _WEIGHTS, _INDEX) else str(named)


def _why_missing(folder: ModelFolder, file: Path) -> str:
    pickled = sorted(path.name for path in folder.path.iterdir() if path.suffix in _PICKLED)
    if pickled:
        return (
            f"it has no {file.name}, only {pickled[0]}, and pickled weights can run code when they are loaded; "
            "convert them to safetensors (`save_pretrained` of transformers writes them)"
        )
    return f"its weights {file.name} are missing; copy them from where the model comes from, in safetensors format"


def _check_length(folder: ModelFolder, file: Path) -> None:
    """Compares a file's length with what its header says it holds."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or not 0 < length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
            raise folder.refuse(f"its {file.name} is no safetensors file, or was cut off; {_ANEW}")
        try:
            ends = [
                _end(entry)
                for name, entry in json.loads(opened.read(length)).items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise folder.refuse(
                f"the header of its {file.name} cannot be read ({first_line(error)}); {_ANEW}"
            ) from error
    expected = _LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise folder.refuse(f"its {file.name} has {size} bytes, its header promises {expected}; {_ANEW}")


_ANEW = "copy the file anew from where the model comes from"


def _end(entry: Any) -> int:
    return int(entry["data_offsets"][1])
