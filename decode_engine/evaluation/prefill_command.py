"""Has contexts prefilled by the prefill worker's command, the only way in which this package meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.store.description.dtypes import AS_DTYPE

MUSE_SETTINGS: Mapping[str, type[int] | type[float]] = {
    "block": int,
    "clusters": int,
    "cap": float,
    "iterations": int,
}
"""What follows `muse:` as name=number; `monopole` stands for itself."""


class PrefillFailedError(SparseKVError, reason="PREFILL_FAILED"):
    """The prefill worker's command ended with an error; the message quotes it."""


@dataclass(frozen=True, slots=True)
class PrefillCommand:
    """The arguments that all contexts of one evaluation share.

    attention: of the prefill, see `attention_flags`. methods: those whose indexes are built. dense_layers,
    calibration, device, index, rows: as `prefill-worker run` takes them.
    """

    model: str
    store: Path
    methods: Sequence[str]
    dense_layers: str = "auto"
    calibration: Path | None = None
    device: str = "auto"
    index: Sequence[str] = ()
    attention: str = "exact"
    rows: str = AS_DTYPE

    def run(self, document: Path, name: str) -> dict[str, Any]:
        """Prefills the document unless the store has it already; returns the command's report.

        Raises PrefillFailedError with the last line that the command printed.
        """
        command = [sys.executable, "-m", "prefill_worker", "run", "--model", self.model]
        command += ["--input", str(document), "--store", str(self.store)]
        command += ["--name", name, "--move-name"]  # contexts are known by their ids
        command += [part for method in self.methods or ["full"] for part in ("--method", method)]
        command += [part for index in self.index for part in ("--index", index)]
        command += ["--dense-layers", self.dense_layers, "--device", self.device, "--format", "json"]
        command += ["--rows", self.rows, *attention_flags(self.attention)]
        if self.calibration is not None:
            command += ["--calibration", str(self.calibration)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr.splitlines() or [f"no message, exit code {done.returncode}"]
            raise PrefillFailedError(
                f"prefill-worker could not prefill {document}: {said[-1].removeprefix('error: ')}"
            )
        report: dict[str, Any] = json.loads(done.stdout)
        return report


def attention_flags(expression: str) -> list[str]:
    """The flags of `prefill-worker run` for "exact", "muse", or "muse:block=1024,clusters=64,monopole".

    Raises InvalidArgumentError for anything else; what numbers are in range, the command says.
    """
    name, separator, listed = expression.partition(":")
    if name not in ("exact", "muse") or (separator and name == "exact"):
        raise InvalidArgumentError(f"--attention is {expression!r}, expected exact or muse:NAME=NUMBER,...")
    flags = [] if name == "exact" else ["--attention", name]
    for setting in listed.split(",") if separator else ():
        key, _, value = setting.strip().partition("=")
        if setting.strip() == "monopole":
            flags.append("--no-muse-dipole")
        elif key in MUSE_SETTINGS and _is_number(value, MUSE_SETTINGS[key]):
            flags += [f"--muse-{key}", value]
        else:
            raise InvalidArgumentError(
                f"--attention is {expression!r}: cannot read {setting!r}, expected "
                f"{', '.join(f'{known}=NUMBER' for known in MUSE_SETTINGS)} or monopole"
            )
    return flags


def _is_number(text: str, kind: type[int] | type[float]) -> bool:
    """Whether the text is an integer, or a number where `kind` is float."""
    try:
        kind(text)
    except ValueError:
        return False
    return True
