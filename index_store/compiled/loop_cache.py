"""numba's cache of one loop: a file by the content of all sources that the loop is compiled from.

So every checkout, wheel and container layer of the same code uses one file, and a change of a called function's file is
seen like one of the loop's own. Which vectors loops take is chosen here, before the first one is compiled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba.core import codegen, config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator

from index_store.compiled.places import distrust, make, own_place, remove_unused, shared_place, touch

_SOURCES = re.compile(r"^(?:from|import) ((?:index_store|decode_engine)[\w.]*)", re.MULTILINE)
_COMPILED = re.compile(r"\.vectors\.|_numba$|\.compiled\.")

logger = logging.getLogger(__name__)


def _prefer_wide_vectors() -> None:
    """Lets loops take vectors of 512 bits where the processor has them, unless NUMBA_CPU_FEATURES says something else.

    LLVM takes 256 on Intel's, for the sake of old ones whose clock fell with 512. Sums of tables on current ones take
    a quarter less time with 512 (docs/gpu.md).
    """
    features = codegen.get_host_cpu_features()
    if config.CPU_FEATURES is None and "+avx512bw" in features.split(","):
        config.CPU_FEATURES = f"{features},-prefer-256-bit"


_prefer_wide_vectors()


class _LoopFiles(CompileResultCacheImpl):  # type: ignore[misc]
    """How numba turns a compiled loop into bytes. It would look for a folder by itself; ours is known."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._locator = _Nowhere(function)
        self._lineno = function.__code__.co_firstlineno
        self._filename_base = file_name(function.__module__, function.__qualname__)


class _Nowhere(_CacheLocator):  # type: ignore[misc]
    """Tells numba the loop's source file, which its warnings name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._py_file = function.__code__.co_filename

    def get_cache_path(self) -> str:
        return str(own_place())

    def get_source_stamp(self) -> str:
        return ""

    def get_disambiguator(self) -> str:
        return ""


class LoopCache(FunctionCache):  # type: ignore[misc]
    """What numba calls to load and save a loop. It reads the user's folder, then the shared one; it writes the first.

    into: where to write instead, which is then read alone.
    """

    _impl_class = _LoopFiles

    def __init__(self, function: Callable[..., Any], into: Path | None = None) -> None:
        super().__init__(function)
        places = (own_place(), shared_place()) if into is None else (into,)
        self._files = [_file_in(place, function) for place in places if _trusted(place)]
        self._writes = _trusted(places[0])

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        key = self._index_key(sig, target_context.codegen())
        for file in self._files:
            found = file.load(key)
            if found is not None:
                numba.get_num_threads()  # names what spreads tasks among threads, which the loop is linked with
                touch(Path(file._index_path))
                touch(Path(file._data_path(file._data_name(1))))
                return self._impl.rebuild(target_context, found)
        return None

    def _save_overload(self, sig: Any, data: Any) -> None:
        if not self._writes or not self._impl.check_cachable(data):
            return
        try:
            folder = Path(self._files[0]._cache_path)
            if not folder.exists():
                make(folder)
                remove_unused(folder.parent)
            self._files[0].save(self._index_key(sig, data.codegen), self._impl.reduce(data))
        except OSError as error:
            _tell_once(f"compiled loops are not kept: {error}")


def _file_in(place: Path, function: Callable[..., Any]) -> Any:
    name = file_name(function.__module__, function.__qualname__)
    return IndexDataCacheFile(str(place / environment()), name, "")


def is_kept(module: str, function: str) -> bool:
    """Whether the loop is in a folder already. Its module is not imported."""
    name = f"{file_name(module, function)}.nbi"
    places = (place for place in (own_place(), shared_place()) if _trusted(place))
    return any((place / environment() / name).exists() for place in places)


def file_name(module: str, function: str) -> str:
    """Without an ending: the loop's name, and a hash over its module and the compiled modules that this imports."""
    return f"{module.rpartition('.')[2]}.{function}-{_content(module)}"


@lru_cache(maxsize=1)
def environment() -> str:
    """A hash over all that compiling depends on besides the sources: versions, the processor and numba's settings."""
    settings = [config.CPU_NAME, config.CPU_FEATURES, config.OPT, config.LOOP_VECTORIZE, config.SLP_VECTORIZE]
    settings += [config.BOUNDSCHECK, config.DEBUGINFO_DEFAULT, config.ENABLE_AVX]
    processor = (binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten())
    parts = (numba.__version__, llvmlite.__version__, sys.version, *processor, *settings)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@lru_cache(maxsize=512)
def _content(module: str) -> str:
    digest = hashlib.sha256()
    for name in sorted(compiled_from(module)):
        digest.update(name.encode() + b"\0" + _source(name))
    return digest.hexdigest()[:16]


def compiled_from(module: str) -> set[str]:
    """The module, all of ours that it imports, whose numbers become part of the code, and of compiled ones theirs."""
    found, left = {module}, [module]
    while left:
        named = set(_SOURCES.findall(_source(left.pop()).decode())) - found
        found |= named
        left += [each for each in named if _COMPILED.search(each)]
    return found


@lru_cache(maxsize=512)
def _source(module: str) -> bytes:
    file: str | None = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        found = importlib.util.find_spec(module)
        file = None if found is None else found.origin
    if file is None:
        raise ModuleNotFoundError(f"no source of module {module}, from which loops are compiled")
    return Path(file).read_bytes()


@lru_cache(maxsize=16)
def _trusted(place: Path) -> bool:
    why = distrust(place)
    if why is not None:
        _tell_once(f"compiled loops are not kept in {place}, nor read from there: {why}")
    return why is None


@lru_cache(maxsize=16)
def _tell_once(sentence: str) -> None:
    logger.warning(sentence)
