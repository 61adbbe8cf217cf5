"""What does not belong into a store: locks of dead jobs, files beside a context's own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from index_store.errors import UnexpectedFileError
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from tests.support.store import SyntheticContext


def test_gc_removes_locks_that_nobody_holds(store: Store) -> None:
    """A killed job leaves its lock file, without the lock."""
    locks = store.path / "locks"
    left = locks / ("0" * 64)
    left.touch()
    (locks / "notes.txt").touch()
    with store.lock("1" * 64):
        assert [(item.kind, item.path) for item in clean_up(store, dry_run=True)] == [("lock", left)]
        assert left.exists()
        assert [(item.kind, item.path) for item in clean_up(store)] == [("lock", left)]
        assert sorted(os.listdir(locks)) == ["1" * 64, "notes.txt"]
    assert clean_up(store) == []


def test_gc_takes_no_lock_from_jobs_that_come_and_go(store: Store) -> None:
    """Never two holders at once, while clean-ups remove the lock file between one holder and the next."""
    id_, holders, most = "0" * 64, 0, 0

    def work() -> None:
        nonlocal holders, most
        for _ in range(50):
            with store.lock(id_):
                holders += 1
                most = max(most, holders)
                holders -= 1

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(work) for _ in range(3)]
        while not all(job.done() for job in jobs):
            clean_up(store)
        for job in jobs:
            job.result()
    assert most == 1
    assert list((store.path / "locks").iterdir()) == []


def test_verify_names_files_that_are_not_part_of_the_context(
    stored: Store, context: SyntheticContext, tmp_path: Path
) -> None:
    folder = stored.path / "contexts" / context.id
    strays = [folder / "kv" / "c" / "notes.txt", folder / "left" / "over", folder / "link"]
    strays[0].write_text("stray")
    strays[1].parent.mkdir()
    strays[1].touch()
    strays[2].symlink_to(tmp_path, target_is_directory=True)
    problems = stored.verify(context.id)
    assert {type(problem) for problem in problems} == {UnexpectedFileError}
    assert sorted(problem.metadata["path"] for problem in problems) == sorted(map(str, strays))
    stored.open(context.id).close()
