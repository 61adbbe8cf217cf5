"""Processes that start in milliseconds: forked from one, for all tests of a process, that has imported what they need.

They run a function of a module. A process of its own is for what is about the process.
"""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    ["pytest", "hypothesis", "prefill_worker.worker.queue_worker", "transformers.models.llama.modeling_llama"]
)


def ran(command: Sequence[str | Path], **more: Any) -> subprocess.CompletedProcess[str]:
    """A command that has run to its end, whatever its exit code, and what it said."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def start(target: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """A process that runs it. Its `exitcode` is negative for the signal that ended it."""
    process = FORKING.Process(target=target, args=arguments)
    process.start()
    return process


def run(target: Callable[..., None], *arguments: object) -> int:
    """The exit code of a process that has run it."""
    process = start(target, *arguments)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def kill_after(seconds: float, target: Callable[..., None], *arguments: object) -> bool:
    """Whether a process was still at it after so long; it has ended then."""
    process = start(target, *arguments)
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode == -9


def killed_at_each_step(target: Callable[..., None], *arguments: object, first: int = 0) -> Iterator[int]:
    """Steps, behind each of which a process was killed that ran it; the one after the last has ended by itself.

    The number of the step at which it kills itself is its last argument.
    """
    for step in count(first):
        code = run(target, *arguments, step)
        if code == 0:
            return
        assert code == -9
        yield step
