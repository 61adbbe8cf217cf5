"""A model's folder on this machine and its weights, the user's cache, and what is fetched into it.

Needs no machine-learning package.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from index_store.compiled.places import cache_folder
from index_store.errors import FetchError, ModelUnsupportedError, format_bytes


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face model folder on this machine. `name` is what people call it; it is no part of the fingerprint."""

    path: Path
    name: str

    def refuse(self, why: str) -> ModelUnsupportedError:
        """The error that says why this model cannot be served."""
        return ModelUnsupportedError(f"model {self.name!r} cannot be served: {why}", model=self.name)


def model_cache() -> Path:
    """Where fetched and converted models are kept."""
    return cache_folder() / "models"


def first_line(error: Exception) -> str:
    """The first line of an error's message, for a sentence that quotes it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
                int(entry["data_offsets"][1])
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


_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_ROOM = 2**28
"""Bytes of a disk that stay free."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model that is there: a folder, or a GGUF file. size, fetched: bytes of all files, and of those that were not
    there."""

    path: Path
    files: Sequence[str]
    size: int
    fetched: int


def fetch_model(
    repo: str,
    revision: str,
    file: str | None,
    on_plan: Callable[[int, int, Path], None],
    on_bytes: Callable[[int], None],
) -> Fetched:
    """Fetches what is loaded of a repository, and nothing else: settings, tokenizer and safetensors, or one GGUF file.

    What is there already is not fetched again; where the hub cannot be reached, that has to suffice. file: the GGUF
    file. on_plan: told the size of all files, of those to fetch, and the cache's folder. on_bytes: told of each piece.
    Raises FetchError.
    """
    from huggingface_hub import HfApi, constants, errors, try_to_load_from_cache

    cache = Path(constants.HF_HUB_CACHE)
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    except errors.HFValidationError as error:
        raise FetchError(f"the repository is {repo!r}, expected OWNER/NAME: {first_line(error)}") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise FetchError(
            f"{repo} at {revision} cannot be fetched: {first_line(error)} Gated and private ones need HF_TOKEN"
        ) from error
    except Exception as error:  # errors of the network have no class of their own
        return _kept(repo, revision, file, error)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or () if "/" not in each.rfilename}
    get = _Getter(repo, revision, on_bytes)
    names = _loaded(repo, sizes, file, lambda name: get(name).read_text(encoding="utf-8"))
    missing = [
        name for name in names if not isinstance(try_to_load_from_cache(repo, name, revision=info.sha), str)
    ]
    size, needed = (sum(sizes[name] for name in some) for some in (names, missing))
    on_plan(size, needed, cache)
    _require_room(repo, cache, needed)
    folders = {get(name).parent for name in names}
    if len(folders) > 1:
        raise FetchError(f"{repo} changed while it was fetched; fetch it again")
    (folder,) = folders
    return Fetched(folder if file is None and _is_folder(names) else folder / names[0], names, size, needed)


class _Getter:
    """Brings files of a repository into the cache. Raises FetchError."""

    def __init__(self, repo: str, revision: str, on_bytes: Callable[[int], None]) -> None:
        from huggingface_hub.utils.tqdm import tqdm

        class Counted(tqdm):
            """Tells others what it is told, and shows nothing."""

            def __init__(self, *given: Any, **settings: Any) -> None:
                super().__init__(*given, **{**settings, "disable": True})  # type: ignore[no-untyped-call]

            def update(self, n: float | None = 1) -> None:
                on_bytes(int(n or 0))

        self._repo, self._revision, self._counted = repo, revision, Counted

    def __call__(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            found = hf_hub_download(self._repo, name, revision=self._revision, tqdm_class=self._counted)
        except Exception as error:  # errors of the network have no class of their own
            raise FetchError(f"{name} of {self._repo} cannot be fetched: {first_line(error)}") from error
        return Path(str(found))


def _loaded(repo: str, names: Collection[str], file: str | None, read: Callable[[str], str]) -> Sequence[str]:
    """The files that are loaded; a GGUF file alone."""
    gguf = sorted(name for name in names if name.lower().endswith(".gguf"))
    if file is not None:
        if file not in gguf:
            raise FetchError(f"{repo} has no GGUF file {file!r}; it has {', '.join(gguf) or 'none'}")
        return (file,)
    if _INDEX in names:
        weights = sorted({_INDEX, *json.loads(read(_INDEX)).get("weight_map", {}).values()})
    elif _WEIGHTS in names:
        weights = [_WEIGHTS]
    elif len(gguf) == 1:
        return (gguf[0],)
    elif gguf:
        raise FetchError(
            f"{repo} has {len(gguf)} GGUF files; name one of them with --file: {', '.join(gguf)}"
        )
    else:
        raise FetchError(
            f"{repo} has neither safetensors nor GGUF files; pickled weights can run code, and are not loaded"
        )
    lacking = [name for name in ("config.json", *weights) if name not in names]
    if lacking:
        raise FetchError(f"{repo} has no {', '.join(lacking)}, so that its weights cannot be loaded")
    return [*(name for name in _SETTINGS if name in names), *weights]


def _is_folder(names: Sequence[str]) -> bool:
    return "config.json" in names


def _kept(repo: str, revision: str, file: str | None, error: Exception) -> Fetched:
    """What was fetched before. Raises FetchError where that is not all."""
    from huggingface_hub import snapshot_download

    away = f"the hub cannot be reached ({first_line(error)})"
    try:
        folder = Path(str(snapshot_download(repo, revision=revision, local_files_only=True)))
    except Exception:
        raise FetchError(f"{away}, and {repo} at {revision} was not fetched before") from error
    there = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    try:
        names = _loaded(repo, there, file, lambda name: (folder / name).read_text(encoding="utf-8"))
        if _is_folder(names):
            weight_files(ModelFolder(folder, repo))
    except (FetchError, ModelUnsupportedError) as lack:
        raise FetchError(f"{away}, and what was fetched before is not all: {lack.message}") from error
    path = folder if _is_folder(names) else folder / names[0]
    return Fetched(path, names, sum(there[name] for name in names), 0)


def _require_room(repo: str, cache: Path, needed: int) -> None:
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed and needed + _ROOM > free:
        raise FetchError(
            f"{repo} takes {format_bytes(needed)} more, and the disk of {cache} has {format_bytes(free)} free; make "
            "room, or name another folder (HF_HOME)",
            needed=needed,
            free=free,
        )
