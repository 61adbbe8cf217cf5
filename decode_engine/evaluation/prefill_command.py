"""Has contexts prefilled by the prefill worker's command, the only way in which this package meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from index_store.errors import SparseKVError


class PrefillFailedError(SparseKVError):
    """The prefill worker's command ended with an error; the message quotes it."""

    reason = "PREFILL_FAILED"


@dataclass(frozen=True, slots=True)
class PrefillCommand:
    """The arguments that all contexts of one evaluation share.

    methods: those whose indexes are built. dense_layers, calibration, device, index: as `prefill-worker run` takes
    them.
    """

    model: str
    store: Path
    methods: Sequence[str]
    dense_layers: str = "auto"
    calibration: Path | None = None
    device: str = "auto"
    index: Sequence[str] = ()

    def run(self, document: Path, name: str) -> dict[str, Any]:
        """Prefills the document unless the store has it already; returns the command's report.

        Raises PrefillFailedError with the last line that the command printed.
        """
        command = [sys.executable, "-m", "prefill_worker", "run", "--model", self.model]
        command += ["--input", str(document), "--store", str(self.store), "--name", name]
        command += [part for method in self.methods or ["full"] for part in ("--method", method)]
        command += [part for index in self.index for part in ("--index", index)]
        command += ["--dense-layers", self.dense_layers, "--device", self.device, "--format", "json"]
        if self.calibration is not None:
            command += ["--calibration", str(self.calibration)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"no message, exit code {done.returncode}"]
            raise PrefillFailedError(f"prefill-worker could not prefill {document}: {lines[-1]}")
        report: dict[str, Any] = json.loads(done.stdout)
        return report
