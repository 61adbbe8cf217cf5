"""Writers that are killed or that meet: nothing half-written is ever visible, and clean-up takes the rest."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from tests.index_store.store.writing.writer_processes import write, write_unless_there
from tests.support.forking import FORKING, kill_after, killed_at_each_step, run, start
from tests.support.store import synthetic_context


def names(store: Store) -> list[str]:
    return sorted(os.listdir(store.path / "contexts"))


def test_writer_killed_at_any_step(store: Store) -> None:
    context = synthetic_context(tokens=50, seed=1)
    kept = synthetic_context(seed=2)
    kept.write(store)
    steps = 0
    for _ in killed_at_each_step(write, store.path, 1, 50):
        steps += 1
        visible = {manifest.id for manifest in store.list()}
        if context.id in visible:
            # Killed after the rename, before it was made durable: complete, or not there at all.
            assert store.verify(context.id) == []
            store.delete(context.id)
        else:
            assert visible == {kept.id}
            (left,) = (name for name in names(store) if name.startswith("."))
            assert left.startswith(f".tmp-{context.id}-")
            assert [item.kind for item in clean_up(store)] == ["temporary"]
        assert names(store) == [kept.id]
    # 7 arrays, 1 + 6 + 6 + 4 * 4 chunks, the sync, and the rename's sync
    assert steps == 7 + 29 + 2
    assert store.verify(context.id) == []


@pytest.mark.nightly
def test_writer_killed_at_random_moments(store: Store) -> None:
    chooser = random.Random(0)
    expected = set()
    for seed in (100, 101):  # the first one waits for what it is forked from
        began = time.monotonic()
        assert run(write, store.path, seed) == 0
        duration = time.monotonic() - began
        expected.add(synthetic_context(tokens=400, seed=seed).id)
    killed = 0
    for seed in range(1, 91):
        if kill_after(chooser.uniform(0, duration), write, store.path, seed):
            killed += 1
        else:  # it was done before the blow: the machine has less to do than when the duration was taken
            duration *= 0.8
        visible = {manifest.id for manifest in store.list()}
        assert expected <= visible <= expected | {synthetic_context(tokens=400, seed=seed).id}
        expected = visible
        if killed == 8:
            break
    assert killed == 8
    for id_ in expected:
        assert store.verify(id_) == []
    clean_up(store)
    assert set(names(store)) == expected


def test_two_jobs_on_the_same_content(store: Store) -> None:
    said, go_on = FORKING.SimpleQueue(), FORKING.Event()
    jobs = [start(write_unless_there, store.path, 3, said, go_on)]
    assert said.get() == "holds"
    jobs.append(start(write_unless_there, store.path, 3, said, go_on))
    assert said.get() == "waits"
    go_on.set()
    assert [said.get(), said.get()] == ["wrote", "found"]
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0]
    assert names(store) == [synthetic_context(tokens=400, seed=3).id]
    assert os.listdir(store.path / "locks") == []


def test_a_killed_holder_gives_up_its_lock(store: Store) -> None:
    said, never = FORKING.SimpleQueue(), FORKING.Event()
    holder = start(write_unless_there, store.path, 3, said, never)
    assert said.get() == "holds"
    with store.lock(synthetic_context(tokens=400, seed=3).id, holder.kill):
        holder.join()
    assert holder.exitcode == -9


def test_unlocked_writers_of_the_same_content(store: Store) -> None:
    writers = [start(write, store.path, 4) for _ in range(4)]
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    context = synthetic_context(tokens=400, seed=4)
    assert names(store) == [context.id]
    assert store.verify(context.id) == []


def test_clean_up_never_takes_a_living_writer(store: Store) -> None:
    contexts = [synthetic_context(tokens=20, seed=seed, index_dtypes=("int8",)) for seed in range(12)]
    done = threading.Event()

    def clean() -> None:
        while not done.is_set():
            # It may take a folder that is empty and not locked yet: the writer then makes another.
            assert sum(item.nbytes for item in clean_up(store)) == 0

    with ThreadPoolExecutor(5) as pool:
        cleaners = [pool.submit(clean) for _ in range(2)]
        try:
            for written in [pool.submit(context.write, store) for context in contexts]:
                written.result()
        finally:
            done.set()
        for cleaner in cleaners:
            cleaner.result()
    assert names(store) == sorted(context.id for context in contexts)
