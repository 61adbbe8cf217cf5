"""Scripts of ops/ as modules, for tests of their functions, and as commands."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_script(path: Path) -> ModuleType:
    """The script, imported as it is when it runs: what lies beside it can be imported from it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec.loader.exec_module(module)
    return module


def check_refusal_without_device(script: Path) -> None:
    """Asserts that a benchmark for GPUs says in one sentence that it needs one."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=hidden)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: this benchmark needs a CUDA device\n"
