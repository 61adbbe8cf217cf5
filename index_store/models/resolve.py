"""Which files a model's name or path means. Needs no machine-learning package, but for a GGUF file that is new."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from index_store.errors import ModelUnsupportedError
from index_store.models.model_folder import ModelFolder, model_cache

PACKAGED_MODELS = ("reader",)
# Real models that a registry of Python packages has; `decode-engine fetch-model` puts them into the cache.
FETCHED_MODELS = ("smollm2",)
GGUF_SUFFIX = ".gguf"


def resolve_model(name_or_path: str) -> ModelFolder:
    """The folder of a packaged model ("reader"), of a fetched one ("smollm2"), of a GGUF file or of a path.

    A GGUF file is converted when it is named for the first time. Raises ModelUnsupportedError when there is none.
    """
    if name_or_path in PACKAGED_MODELS:
        return ModelFolder(Path(str(resources.files("index_store.models") / name_or_path)), name_or_path)
    if name_or_path in FETCHED_MODELS:
        return _fetched_model(name_or_path)
    path = Path(name_or_path).expanduser()
    if path.suffix.lower() == GGUF_SUFFIX and path.is_file():
        from index_store.models.gguf_file import gguf_folder

        return gguf_folder(path.resolve(), path.stem)
    if not path.is_dir():
        raise ModelUnsupportedError(
            f"model {name_or_path!r} is neither a packaged model ({', '.join(PACKAGED_MODELS)}), "
            f"nor one that can be fetched ({', '.join(FETCHED_MODELS)}), nor a folder or a {GGUF_SUFFIX} file; "
            "pass the path of a Hugging Face model folder or of a GGUF file; `decode-engine fetch-model` fetches one",
            model=name_or_path,
        )
    if not (path / "config.json").is_file():
        raise ModelUnsupportedError(
            f"model folder {name_or_path!r} has no config.json; expected a Hugging Face model folder",
            model=name_or_path,
        )
    return ModelFolder(path.resolve(), _name(path.resolve()))


def _name(path: Path) -> str:
    """What people call the model of a folder: in the hub's cache the repository, whose folder is named by a commit."""
    repository = path.parent.parent.name
    inside = path.parent.name == "snapshots" and repository.startswith("models--")
    return repository.rpartition("--")[2] if inside else path.name


def _fetched_model(name: str) -> ModelFolder:
    folder = model_cache() / name
    if not (folder / "config.json").is_file():
        raise ModelUnsupportedError(
            f"model {name!r} has not been fetched to {folder}; fetch it once with decode-engine fetch-model {name}",
            model=name,
        )
    return ModelFolder(folder, name)
