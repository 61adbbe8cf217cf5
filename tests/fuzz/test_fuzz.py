"""Inputs in numbers for everything that reads what comes from outside: by day a few, by night a million."""

from __future__ import annotations

import gc
import logging
import os
import time
from pathlib import Path

import pytest

from tests.fuzz.inputs import input_of
from tests.fuzz.parsers import Case, cases, tried

CASES = cases()
BY_DAY = 60
MILLION = 1_000_000
GROWN_BYTES, GROWN_HANDLES = 48 << 20, 4

logger = logging.getLogger(__name__)


def try_out(name: str, case: Case, first: int, count: int) -> list[str]:
    """What is wrong with how the inputs of these numbers are read."""
    wrong = []
    for number in range(first, first + count):
        given = input_of(name, number, case.make)
        try:
            said = tried(case, given)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # the panics of compiled parsers are no Exceptions
            said = f"{type(error).__name__}: {error}"
        if said:
            wrong.append(f"{name}, input {number}: {said[:300]}; {given[:400]!r}")
            if len(wrong) == 20:
                break
    return wrong


def held() -> tuple[int, int]:
    """Bytes of memory and open files of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def count_of(case: Case) -> int:
    """Of a million inputs."""
    return round(MILLION * case.share / sum(each.share for each in CASES.values())) + 1


@pytest.mark.parametrize("name", CASES)
def test_some(name: str) -> None:
    case = CASES[name]
    assert not try_out(name, case, 0, min(BY_DAY, max(3, case.share // 100)))


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_million_in_all_and_nothing_is_left_behind(name: str) -> None:
    case = CASES[name]
    count = count_of(case)
    wrong = try_out(name, case, 0, count // 10)
    memory, handles = held()
    begun = time.process_time()
    wrong += try_out(name, case, count // 10, count - count // 10)
    assert not wrong, "\n".join(wrong)
    now, open_now = held()
    each_us = (time.process_time() - begun) / count * 1e6
    logger.info(
        "%s: %d inputs, %.0f us each, memory grew by %d KiB", name, count, each_us, now - memory >> 10
    )
    assert now < memory + GROWN_BYTES
    assert open_now < handles + GROWN_HANDLES
