"""Loops that decode steps run, compiled in processes of their own beside whatever the caller does.

Who calls one then finds it in the cache.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MappingProxyType

_ATTENTION = "index_store.attention"
_TABLES = "index_store.indexes.query_tables"
_COARSE_ROWS = "index_store.indexes.coarse_rows"
_SELECTION = "index_store.selection"

_ATTEND = f"{_ATTENTION}.listed_keys_numba:_attend"
_POOL = f"{_ATTENTION}.rows_in_line_numba:_pooled_weights"
_LEAVE_OUT = f"{_SELECTION}.remainders_numba:_leave_out"
_TOP_K = f"{_SELECTION}.top_k_numba:_top_k_rows"
_COLLECT = f"{_SELECTION}.collect_numba:_collect_rows"
_KEEP_INSIDE = f"{_SELECTION}.collect_numba:_keep_inside"
_CLUSTER_SUMS = f"{_SELECTION}.remainders_numba:_cluster_sums"
_TABLE_SUMS = f"{_TABLES}.search_numba:_softmax_sum_rows"
_SCORE_LISTS, _INSERT_KEYS = f"{_TABLES}.search_numba:_score_lists", f"{_TABLES}.search_numba:_insert_keys"
_SEARCH_TREE = "index_store.indexes.key_clusters.tree_numba:_search_tree"

CODE_ROWS = (f"{_COARSE_ROWS}.coding_numba:_write_codes", f"{_COARSE_ROWS}.coding_numba:_find_ranges")
"""What makes a coarse copy: of a context that is read, and of keys that a session appends."""

_COARSE_STEP = (f"{_COARSE_ROWS}.coded_steps_numba:go_over_rows", *CODE_ROWS)
_COARSE = (*_COARSE_STEP, _POOL, f"{_COARSE_ROWS}.key_scores_numba:_weigh", _TOP_K, _LEAVE_OUT)
"""Several positions of a prompt ask for more than a step does."""

_OF_METHODS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "full": (),
        "exact": _COARSE_STEP,
        "oracle": (_POOL, _TOP_K),
        "csattention": (_TABLE_SUMS, _TOP_K, _CLUSTER_SUMS),
        "csattention-paper": (_SCORE_LISTS, _TOP_K, _INSERT_KEYS),
        "squeezed": (_COLLECT,),
        "squeezed-tree": (_COLLECT, _SEARCH_TREE),
        "multipole": (_COLLECT, _CLUSTER_SUMS),
        "multipole-windowed": (_COLLECT, _CLUSTER_SUMS),
        "multipole-tree": (_COLLECT, _CLUSTER_SUMS, _SEARCH_TREE),
        "tactic": (_COLLECT, _KEEP_INSIDE),
        "quest": (_COLLECT,),
        "refined": _COARSE,
        "refined-3": _COARSE,
    }
)


def loops_of(methods: Sequence[str]) -> list[str]:
    """`module:function` of what decode steps of these methods and of full attention run on a host, each once.

    Of a method with options (`oracle+centred`, `refined@sinks=16`): that of its preset.
    """
    presets = [name.partition("+")[0].partition("@")[0] for name in methods]
    found = [_ATTEND, *(loop for name in presets for loop in _OF_METHODS.get(name, ()))]
    return list(dict.fromkeys(found))


def compile_loop(name: str, into: Path | None = None) -> None:
    """Compiles one loop for the signature that it declares, or finds it in the cache."""
    from index_store.compiled.loop_cache import LoopCache

    module, _, function = name.partition(":")
    loop = getattr(import_module(module), function)
    if into is not None:
        loop._cache = LoopCache(loop.py_func, into)
    loop.compile(loop.declared)


def main() -> int:
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    names: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(names,), daemon=True).start()
    while True:
        name = names.get()
        begin = time.perf_counter()
        try:
            compile_loop(name, into)
        except Exception as error:  # told to whoever asked, who goes on without
            answer = f"error: {type(error).__name__}: {error}".replace("\n", " ")
        else:
            answer = f"{time.perf_counter() - begin:.2f}"
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _read(names: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        names.put(line.strip())
    os._exit(0)  # nobody waits for the loop that is being compiled


if __name__ == "__main__":
    sys.exit(main())


logger = logging.getLogger(__name__)


def compile_beside(
    loops: Sequence[str], *, processes: int, told: Callable[[str], None], into: Path | None = None
) -> Future[None]:
    """Compiles what the cache lacks; the Future is done when all of it is there, or failed, which is logged.

    loops: `module:function`, those that take longest first: each process takes the next one when it has done one. told:
    called with a clause after every loop, in threads of this function. into: a folder for them instead of the cache.
    Cancelling the Future ends the processes; so does the end of this process.
    """
    from index_store.compiled.loop_cache import is_kept  # numba and llvmlite take a while to import

    done: Future[None] = Future()
    missing = [name for name in loops if into is not None or not is_kept(*name.split(":"))]
    if not missing or processes < 1:
        done.set_result(None)
        return done
    work = _Work(missing, told, into, done)
    threads = [
        threading.Thread(target=work.drive, name=f"compiling-{number}", daemon=True)
        for number in range(min(processes, len(missing)))
    ]
    work.left_processes = len(threads)
    done.add_done_callback(work.end)
    for thread in threads:
        thread.start()
    return done


class _Work:
    """Loops that are to be compiled, and the processes that do it."""

    def __init__(
        self, loops: Sequence[str], told: Callable[[str], None], into: Path | None, done: Future[None]
    ) -> None:
        self._loops: SimpleQueue[str] = SimpleQueue()
        for name in loops:
            self._loops.put(name)
        self._count, self._told, self._into, self._done = len(loops), told, into, done
        self._begin = time.perf_counter()
        self._lock = threading.Lock()
        self._compiled = 0
        self._children: list[subprocess.Popen[str]] = []
        self.left_processes = 0

    def drive(self) -> None:
        """Gives one process loops until there are none; the last of these threads completes the Future."""
        try:
            self._drive()
        except OSError as error:
            logger.warning("a process that compiles loops ended: %s", error)
        with self._lock:
            self.left_processes -= 1
            last = self.left_processes == 0
        if last and self._done.set_running_or_notify_cancel():
            self._done.set_result(None)

    def _drive(self) -> None:
        command = [sys.executable, "-m", "index_store.compiled.beside"]
        command += [] if self._into is None else [str(self._into)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with child:
            self._children.append(child)
            if self._done.cancelled():  # meanwhile, when the child was not in the list yet
                child.kill()
            while not self._done.cancelled():
                try:
                    name = self._loops.get_nowait()
                except Empty:
                    break
                self._compile(child, name)
            child.kill()

    def _compile(self, child: subprocess.Popen[str], name: str) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(name + "\n")
        child.stdin.flush()
        answer = child.stdout.readline().strip()
        if self._done.cancelled():
            return
        if not answer or answer.startswith("error"):
            logger.warning("loop %s is not compiled beforehand: %s", name, answer or "its process ended")
            if not answer:
                raise BrokenPipeError(f"while it compiled {name}")
        with self._lock:
            self._compiled += 1
            seconds = time.perf_counter() - self._begin
            self._told(f"compiled {self._compiled} of {self._count} loops in {seconds:.0f} s")

    def end(self, _: Future[None]) -> None:
        """Ends the processes; they have nothing that could be lost."""
        for child in list(self._children):
            with suppress(ProcessLookupError):
                child.kill()
