"""What a store has seen of a bucket: forgotten, or not to be read now, it undoes nobody's change."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from index_store.errors import ContextNotFoundError, StoreUnavailableError
from index_store.objects import records
from index_store.objects.courier import Courier
from index_store.store import catalog, elsewhere
from index_store.store.files import durable, reading
from tests.index_store.objects.sites import Site, memory_bucket
from tests.support.store import SyntheticContext
from tests.support.waiting import wait_until


@pytest.fixture
def here(tmp_path: Path, context: SyntheticContext) -> Site:
    """A site that has the context, and has uploaded it."""
    site = Site.at(tmp_path / "here", memory_bucket())
    context.write(site.store)
    site.settle()
    return site


@pytest.fixture
def there(tmp_path: Path, here: Site) -> Site:
    """Another one, which has nothing."""
    return Site.at(tmp_path / "there", here.tier.bucket)


def test_a_store_that_forgot_what_it_saw_undoes_nobodys_change(
    here: Site, there: Site, context: SyntheticContext
) -> None:
    """Killed before it noted what it has, say. Of what both have, that counts which was changed later."""

    def forget(site: Site) -> None:
        site.tier.marks.remove(context.id)

    there.settle()
    for number, (changer, other) in enumerate([(here, there), (there, here)]):
        labels = {"n": str(number)}
        changer.store.update(context.id, lambda present: replace(present, labels=labels))  # noqa: B023
        changer.settle()
        forget(other)
        other.settle()
        changer.settle()
        assert [site.store.manifest(context.id).labels for site in (here, there)] == [labels] * 2
    here.store.update(context.id, lambda present: replace(present, labels={"n": "2"}))
    forget(here)
    here.settle()
    there.settle()
    assert there.store.manifest(context.id).labels == {"n": "2"}


def test_what_a_store_saw_and_cannot_read_now_is_not_forgotten(
    here: Site, there: Site, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.settle()

    def no_handles(path: object, *how: object, **named: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    again = Site.at(there.store.path, there.tier.bucket)
    with monkeypatch.context() as patch:
        patch.setattr(reading.os, "open", no_handles)
        with pytest.raises(StoreUnavailableError, match="Too many open files"):
            again.tier.held()
    again.settle()
    with monkeypatch.context() as patch:
        patch.setattr(records, "read_file", no_handles)
        assert not Site.at(there.store.path, there.tier.bucket).courier.look()


def test_a_fault_of_a_courier_does_not_end_it(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Semaphore(0)
    courier = Courier(here.store, here.tier, 0.01)
    wait, faults = courier._stopping.wait, [MemoryError()]

    def wait_once(seconds: float) -> bool:
        if faults:
            raise faults.pop()
        return wait(seconds)

    monkeypatch.setattr(courier._stopping, "wait", wait_once)
    monkeypatch.setattr(courier, "look", lambda check: looked.release())
    courier.start()
    assert looked.acquire(timeout=60)
    assert looked.acquire(timeout=60)
    courier.stop()


def test_a_deletion_that_was_killed_half_way_is_not_undone(
    here: Site, there: Site, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context is gone here, so a second call finds none, which is as good as a deletion."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    there.settle()
    with monkeypatch.context() as patch:
        patch.setattr(durable, "remove_tree", die)
        with pytest.raises(KeyboardInterrupt):
            here.store.delete(context.id)
    with pytest.raises(ContextNotFoundError):
        here.store.delete(context.id)
    for site in (here, there, here):
        site.settle()
        with pytest.raises(ContextNotFoundError):
            site.store.manifest(context.id)


def test_a_look_while_a_context_is_deleted_does_not_bring_it_back(
    here: Site, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, looks = catalog.discard, []

    def discard(folder: Path) -> bool:
        looks.append(threading.Thread(target=here.courier.look))
        looks[0].start()
        wait_until(asked.is_set)
        return right(folder)

    noted, asked = here.store.notes.deleted, threading.Event()
    monkeypatch.setattr(here.store.notes, "deleted", lambda id_: (noted(id_), asked.set())[0])
    monkeypatch.setattr(catalog, "discard", discard)
    here.store.update(context.id, lambda present: replace(present, labels={"n": "1"}))
    here.store.delete(context.id)
    looks[0].join(60)
    here.courier._pauses.clear()
    here.settle()
    with pytest.raises(ContextNotFoundError):
        here.store.manifest(context.id)


def test_notes_that_cannot_be_read_now_are_no_fault_of_the_program(
    here: Site, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(StoreUnavailableError, match="Too many open files"):
        here.store.elsewhere(context.id)
    monkeypatch.setattr(elsewhere.os, "listdir", refuse)
    with pytest.raises(StoreUnavailableError, match="Too many open files"):
        here.store.notes.forlorn()
