"""The order of the tests, the numbers that they draw, the processes that run them, and how Triton's kernels run.

Also small launches for those that run them in its interpreter.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import index_store  # noqa: F401 - before torch: it says that idle OpenMP threads sleep, and tests import torch first
from index_store.compiled.places import make, own_place
from tests.support.interpreter.speed import patch_once, remember_types, round_sums_once

# Looking for cycles of objects takes time where there are a million, as in tests.
gc.set_threshold(10_000)

# Triton reads this once, when it is imported first: without a device its kernels run in its interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "TRITON_INTERPRET" in os.environ:
    patch_once()
    remember_types()
    round_sums_once()

# Tests start processes while clients and servers of others have run in this one. gRPC's own handling of forks ends some
# of these processes before they have begun (it is read when gRPC is used first).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# Processes that tests start keep the bytecode of what they import, beside compiled loops, for those that come after.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests that run side by side share the cores, as do the processes that they start. Libraries read this when they load.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))


# What is remembered about models goes into a folder of this run, also that of processes which are started. Compiled
# loops do not: each is named by all that it is compiled from, and to compile those of all methods takes a minute.
_LOOPS = own_place().resolve()
_CACHE = tempfile.TemporaryDirectory(prefix="sparsekv-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
with suppress(OSError):  # then this run compiles them for itself
    make(_LOOPS)
    own_place().parent.mkdir(exist_ok=True)
    own_place().symlink_to(_LOOPS)

# A busy machine is no failure, and the same numbers are drawn in every run, so that none fails by chance.
# `--hypothesis-profile=drawn-anew` looks for examples that nobody has seen.
settings.register_profile("drawn-anew", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("tests", settings.get_profile("drawn-anew"), derandomize=True)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What tests/decode_engine/pins compares replies with is written anew; how servers are reached."""
    parser.addoption("--front-door", action="store_true", help="reach servers by a cluster's front door")
    parser.addoption("--record", action="store_true", help="record the replies of both doors anew")


def pytest_configure() -> None:
    """Undoes an inherited "ignore SIGINT", which shells give to background jobs.

    Processes started by tests would inherit it, and those tests that interrupt one would wait for nothing.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: a mistake shows within seconds, not after the slow tests of the packages before it.

    Of the slow ones those of documents, commands and demonstration, which take longest, so that none of them
    runs when the others are done.
    """

    def place(item: pytest.Item) -> tuple[bool, bool]:
        slow = item.get_closest_marker("slow") is not None
        return slow, slow and Path(__file__).parent not in item.path.parents[:2]

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a generator of its own depends on no test that ran before it in this process.

    Tests for a CUDA device, which who runs one file selects, too, are left out where there is none.
    """
    import torch  # not above: it reads how many threads it may have when it is imported

    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Nor does it depend on whether the test is the first one that asks for a fixture which several share."""
    if fixturedef.scope == "function":
        return (yield)
    import torch

    before = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        return (yield)
    finally:
        torch.set_rng_state(before)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches of few programs, which interpreters run one by one, also of kernels of one warp."""
    from decode_engine.kernels.slots.slot_cache import CopyShape
    from tests.support.warps.warp_launches import warps_interpreted

    monkeypatch.setattr("decode_engine.steps.batch_kinds._LEAST_KEYS", 256)
    monkeypatch.setattr("decode_engine.kernels.attention.sparse_attention._PROGRAMS", 8)
    monkeypatch.setattr("decode_engine.kernels.slots.slot_fetch._FIND_PROGRAMS", 8)
    if "TRITON_INTERPRET" in os.environ:  # on a GPU as many race as where contexts are served
        fetch = CopyShape(programs=5)  # beside three that claim slots; many rows take several rounds
        monkeypatch.setattr("decode_engine.kernels.slots.slot_fetch._FETCH", fetch)
    with warps_interpreted():
        yield


@pytest.fixture
def prefilled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that have contexts prefilled by another one start no process for it, which takes seconds to import."""
    from tests.support.serving.prefills import prefill_here

    prefill_here(monkeypatch)


@pytest.fixture(scope="module")
def _left_alone() -> Iterator[None]:
    """What there is when the first test of a module is watched is not looked through again by those that follow."""
    from tests.support.interpreter.addresses import left_alone

    with left_alone():
        yield


@pytest.fixture
def watched(_left_alone: None) -> Iterator[None]:
    """Kernels in the interpreter come to no memory but that of tensors, or raise."""
    from tests.support.interpreter.addresses import watched_addresses

    with watched_addresses():
        yield
