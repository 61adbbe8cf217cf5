"""A process that compiles loops into the cache: `python -m index_store.compiled.child [FOLDER]`.

It reads names `module:function` from standard input, a line each, and answers with a line each: the seconds that it
took, or what went wrong. It ends with its input, in the middle of a loop if need be, and so with whoever started it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue


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
