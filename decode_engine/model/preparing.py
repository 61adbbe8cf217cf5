"""Methods are prepared before a request runs by them: compiled, loaded and, on a GPU, captured, beside other requests.

What a step of a method needs is compiled the first time that it runs. On the engine's thread all streams would wait for
that; here only those who asked for the method do. A server prepares what its contexts name before it takes requests,
and anything else when somebody first asks for it. Loops of a host are compiled in processes of their own, the first
ones while a model loads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from queue import SimpleQueue

from decode_engine.engine.drafting import MOST
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import warm_method
from index_store.cli.options import AUTO
from index_store.compiled import beside
from index_store.compiled.beside import loops_of
from index_store.compiled.launch import compiling_told
from index_store.errors import SparseKVError
from index_store.memory.placement import Placement
from index_store.methods.method import FittedMethod, Method
from index_store.methods.presets import METHODS
from index_store.store.description.manifest import Manifest

_MULTIPLY_ROWS = "decode_engine.model.row_products_numba:multiply_{kind}"
_GO_ON = "decode_engine.model.row_layers_numba:go_on_{kind}"


def compile_beside(
    weights: str, checkpoint: str, methods: Sequence[str], *, processes: int, told: Callable[[str], None]
) -> Future[None]:
    """Compiles what decode steps of full attention and of these methods run on a host, as far as the cache lacks it.

    weights: how the model's are to be kept, one of `WEIGHTS`. checkpoint: the dtype that they are stored in. told:
    called with a clause whenever a loop is done, by other threads. A loop that fails is logged, and compiled again when
    it is first called. Cancelling the Future ends the processes; so does the end of this process.
    """
    # What `auto` compares when it measures, and what it takes for matrices that the checkpoint's dtype does not hold.
    kinds = dict.fromkeys((checkpoint, "float32")) if weights == AUTO else (weights,)
    products = [_MULTIPLY_ROWS.format(kind=kind) for kind in kinds]
    go_on = _GO_ON.format(kind=next(iter(kinds)))
    return beside.compile_beside([go_on, *loops_of(methods), *products], processes=processes, told=told)


logger = logging.getLogger(__name__)

Say = Callable[[str, str], None]
"""Takes what is done, and how far it has come."""

Compile = Callable[[Sequence[str]], "Future[None]"]
"""Begins to compile what methods of these names need, into the cache from which this process loads it."""

_LOOK_S = 0.25

_Key = tuple[object, ...]


class Preparation:
    """Prepares methods for contexts, each kind once, on a thread of its own. Thread-safe.

    A kind is what other code runs for: method without its budget's and options' numbers, rows, placement, and on a GPU
    what its captured steps depend on.
    """

    def __init__(self, runner: ModelRunner, sessions: int, compile_beside: Compile) -> None:
        """sessions: that batches may have. compile_beside: where a CPU computes."""
        self._runner = runner
        self._sessions = sessions
        self._compile = compile_beside
        self._kinds: dict[_Key, Future[None]] = {}
        self._lock = threading.Lock()
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._beside = False
        self._compiling: Future[None] | None = None
        self._closed = False
        threading.Thread(target=self._work, name="prepare", daemon=True).start()

    def begin(self, fitted: FittedMethod, placement: Placement) -> Future[None]:
        """Prepares a method for contexts like one, unless that was done; done when no step has to wait for it.

        It never fails: what could not be prepared is logged, and compiled when it first runs.
        """
        key = self._key(fitted, placement)
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                kind = self._kinds[key] = Future()
                self._todo.put(partial(self._prepare_kind, kind, fitted, placement))
        return kind

    def wait(self, fitted: FittedMethod, placement: Placement, check: Callable[[], None]) -> None:
        """Returns when the method is prepared. check: raises when nobody waits any more."""
        kind = self.begin(fitted, placement)
        while not kind.done():
            check()
            try:
                kind.result(_LOOK_S)
            except TimeoutError:
                continue

    def prepare_all(self, wanted: Iterable[tuple[FittedMethod, Placement]], say: Say) -> list[str]:
        """Prepares several, before there are requests; returns the methods' names."""
        names: dict[str, None] = {}
        with compiling_told(say):
            for fitted, placement in wanted:
                kind = self.begin(fitted, placement)
                if not kind.done():
                    say(f"prepare {fitted.method.name} ({placement.value})", "")
                    self.wait(fitted, placement, self._check_open)
                names[fitted.method.name] = None
        return list(names)

    def go_beside(self) -> None:
        """From here on another thread steps."""
        with self._lock:
            self._beside = True

    def close(self) -> None:
        """Prepares nothing more; who waits goes on."""
        with self._lock:
            self._closed = True
            left, compiling = list(self._kinds.values()), self._compiling
        if compiling is not None:
            compiling.cancel()
        self._todo.put(None)
        for kind in left:
            _finish(kind)

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError

    def _key(self, fitted: FittedMethod, placement: Placement) -> _Key:
        method = fitted.method
        specs = tuple(sorted((spec.name, spec.kind) for spec in method.index_specs()))
        code = (specs, method.remainder.name, type(method.budget), method.period > 1, method.drafts is None)
        return (code, fitted.manifest.rows, placement, self._runner.steps_kind(fitted, placement))

    def _work(self) -> None:
        while (work := self._todo.get()) is not None and not self._closed:
            work()

    def _prepare_kind(self, kind: Future[None], fitted: FittedMethod, placement: Placement) -> None:
        begin = time.monotonic()
        try:
            self._prepare(fitted, placement)
        except CancelledError:
            logger.info("method %s is not prepared any more", fitted.method.name)
        except Exception as error:  # a request by it says better what is wrong
            logger.warning("method %s was not prepared: %s", fitted.method.name, error)
        else:
            spent = time.monotonic() - begin
            logger.info("method %s (%s) is prepared, in %.1f s", fitted.method.name, placement.value, spent)
        _finish(kind)

    def _prepare(self, fitted: FittedMethod, placement: Placement) -> None:
        self._check_open()
        if self._runner.device.type == "cpu":
            with self._lock:
                compiling = self._compiling = self._compile([fitted.method.name])
            compiling.result()
            self._check_open()
        if self._runner.ranks.divided:  # the first requests prepare the rest, on all of them
            return
        if fitted.drafting is not None:
            warm_method(self._runner, fitted.drafting.method, placement, rows=fitted.manifest.rows)
        if warm_method(self._runner, fitted.method, placement, rows=fitted.manifest.rows):
            self._check_open()
            # Before there are requests all batches are captured. Beside them the largest, in whose graph all others can
            # step; who waits for the method need not wait for more.
            beside = self._beside
            for each, rows in self._stepping(fitted):
                self._runner.prepare(each, rows, placement, beside=beside, least=rows if beside else 1)
            if beside:
                self._todo.put(partial(self._prepare_smaller, fitted, placement))

    def _stepping(self, fitted: FittedMethod) -> Iterator[tuple[FittedMethod, int]]:
        """Methods whose steps the method takes, and rows of the largest batch."""
        drafts = fitted.method.drafts is not None
        yield fitted, self._sessions * (MOST + 1) if drafts else self._sessions
        if fitted.drafting is not None:
            yield fitted.drafting, self._sessions

    def _prepare_smaller(self, fitted: FittedMethod, placement: Placement) -> None:
        """Steps of smaller batches, behind all that somebody waits for."""
        try:
            for each, rows in self._stepping(fitted):
                self._runner.prepare(each, rows, placement, beside=True)
        except Exception as error:
            logger.warning("batches of method %s are captured when they come: %s", fitted.method.name, error)


def methods_wanted(manifest: Manifest, *more: Method) -> Iterator[FittedMethod]:
    """Full attention and others, on a context that has what they search."""
    for method in {each.name: each for each in (METHODS["full"], *more)}.values():
        try:
            yield method.on(manifest)
        except SparseKVError as error:
            logger.info("method %s is not prepared for context %s: %s", method.name, manifest.id[:12], error)


def _finish(kind: Future[None]) -> None:
    if not kind.done():
        kind.set_result(None)
