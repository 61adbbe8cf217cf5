"""What belongs to a tenant is not there for another one, by whichever way a store, a queue or an upload is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from index_store.errors import (
    ContextCorruptError,
    ContextNotFoundError,
    ManifestError,
    PermissionDeniedError,
    QueueFullError,
    SparseKVError,
)
from index_store.family.children import publish_child
from index_store.family.parents import parent_of
from index_store.jobs import job_queue, uploads
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import JobOrder, JobRecord, JobState
from index_store.jobs.uploads import Uploads
from index_store.store.catalog import Store, utc_now
from index_store.store.description.callers import EVERYBODY, Caller
from index_store.store.description.context_id import context_id, continued_digests, first_digest
from tests.support.store import MODEL, continuation, synthetic_context

ACME = Caller("acme", frozenset({"read", "create", "delete"}))
BETA = replace(ACME, tenant="beta")
ADMIN = Caller("ops", frozenset({"read", "delete", "admin"}))
ABSENT = "f" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", create=True)


def put(store: Store, tenant: str = "acme", seed: int = 0, **changes: Any) -> str:
    """A context of a tenant, of the same text and name as those of others with this seed."""
    made = synthetic_context(seed=seed, tokens=300)
    ids = made.tokens
    id_ = context_id(MODEL, "bfloat16", {}, "", ids, tenant)
    digests = continued_digests(first_digest(MODEL, "bfloat16", "", tenant), ids)
    draft = replace(made.draft, id=id_, tenant=tenant, prefix_digests=digests, **changes)
    return replace(made, draft=draft).write(store)


def test_the_same_text_of_two_tenants_has_two_ids_and_that_of_none_keeps_its_own() -> None:
    ids = [1, 2, 3]
    made = [
        context_id(MODEL, "float32", {}, salt, ids, tenant) for salt in ("", "s") for tenant in ("", "a", "b")
    ]
    first = [first_digest(MODEL, "float32", salt, tenant) for salt in ("", "s") for tenant in ("", "a", "b")]
    assert len(set(made)) == len(set(first)) == 6
    assert made[0] == context_id(MODEL, "float32", {}, "", ids)
    assert first[3] == first_digest(MODEL, "float32", "s")
    # Nothing that a caller may give as a salt makes it another tenant.
    for salt in ("a", '","tenant":"a', "tenant", '{"tenant":"a"}'):
        assert context_id(MODEL, "float32", {}, salt, ids) not in made


def refusal(work: Callable[[], object], id_: str) -> tuple[type[SparseKVError], str, dict[str, str]]:
    """What is said of an id, without that."""
    with pytest.raises(SparseKVError) as caught:
        work()
    error = caught.value
    told = {name: value.replace(id_, "ID").replace(id_[:12], "ID") for name, value in error.metadata.items()}
    return type(error), error.message.replace(id_, "ID").replace(id_[:12], "ID"), told


@pytest.mark.parametrize("readers", [("beta",), (EVERYBODY,)])
def test_a_reader_reads_and_does_no_more(store: Store, readers: tuple[str, ...]) -> None:
    id_ = put(store)
    store.seen_by(ACME).update(id_, lambda present: replace(present, readers=readers))
    seen = store.seen_by(BETA)
    assert seen.manifest(id_).readers == readers
    assert seen.resolve("handbook") == id_
    with seen.open(id_) as context:
        assert len(context.tokens()) == 300
    for change in (lambda: seen.delete(id_), lambda: seen.update(id_, lambda present: present)):
        with pytest.raises(PermissionDeniedError, match="another tenant's"):
            change()
    own = put(store, "beta")
    assert seen.resolve("handbook") == own  # one's own name goes first
    store.seen_by(ACME).update(id_, lambda present: replace(present, readers=()))
    with pytest.raises(ContextNotFoundError):
        seen.manifest(id_)


def test_a_child_is_its_parents_tenants_and_a_reader_of_it_reads_its_beginning(store: Store) -> None:
    parent = put(store)
    child = publish_child(store, continuation(store, parent))
    assert child.tenant == "acme"
    assert [entry.id for entry in store.seen_by(ACME).children(parent)] == [child.id]
    assert not store.seen_by(BETA).children(parent)
    store.update(child.id, lambda present: replace(present, readers=("beta",)))
    seen = store.seen_by(BETA)
    base = parent_of(seen, seen.manifest(child.id))
    assert base.id == parent
    with pytest.raises(ContextNotFoundError):
        seen.manifest(parent)


def test_a_damaged_context_is_its_tenants_and_nobody_elses(store: Store) -> None:
    id_ = put(store)
    store.list()
    path = store.folders.context(id_) / "manifest.json"
    path.write_text("{}")
    with pytest.raises(ContextCorruptError):
        store.seen_by(ACME).manifest(id_)
    beta = store.seen_by(BETA)
    assert refusal(lambda: beta.manifest(id_), id_) == refusal(lambda: beta.manifest(ABSENT), ABSENT)
    afresh = Store(store.path)  # which never read it: only an admin learns of it
    with pytest.raises(ContextNotFoundError):
        afresh.seen_by(ACME).manifest(id_)
    with pytest.raises(ContextCorruptError):
        afresh.seen_by(ADMIN).manifest(id_)
    assert store.seen_by(ACME).delete(id_) == [id_]


@pytest.mark.parametrize(
    ("readers", "tenant"),
    [((EVERYBODY, EVERYBODY), "a"), (("../x",), "a"), (("",), "a"), ((), "a/b"), ((), "*")],
)
def test_what_is_no_tenant_is_in_no_manifest(readers: tuple[str, ...], tenant: str) -> None:
    with pytest.raises(ManifestError, match=r"tenant|readers"):
        replace(synthetic_context().draft, readers=readers, tenant=tenant)


def job(number: int, tenant: str) -> JobRecord:
    order = JobOrder(
        f"{number:064x}", "m", "model", "", "title", ("csattention",), "float32", None, 3, tenant=tenant
    )
    return JobRecord(f"{number:032x}", order, utc_now() - timedelta(seconds=number))


def test_many_jobs_of_a_tenant_keep_no_other_one_waiting(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tenants take turns, whatever the age and priority of their jobs; and those that ended are forgotten so, too."""
    monkeypatch.setattr(job_queue, "MOST_ENDED", 4)
    queue = JobQueue(store.path)
    for number in range(9, 3, -1):
        queue.add(replace(job(number, "acme"), priority=100))
    theirs = [queue.add(job(number, "beta")).id for number in (2, 1)]
    taken = []
    for _ in range(5):
        with queue.claim() as claim:
            taken.append(claim.record.order.tenant)
            claim.end(queue.cancelled(claim.record))
    assert taken == ["acme", "beta", "acme", "beta", "acme"]
    for number in range(10, 20):
        queue.cancel(queue.add(job(number, "acme")).id)
    queue.tidy()
    assert all(queue.get(id_).state is JobState.CANCELLED for id_ in theirs)


def test_a_tenant_leaves_some_of_the_queue_and_of_uploads_to_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = JobQueue(store.path, most_jobs=4)
    for number in (1, 2, 3):
        queue.add(job(number, "acme"))
    with pytest.raises(QueueFullError):
        queue.add(job(4, "acme"))
    queue.add(job(5, "beta"))
    monkeypatch.setattr(uploads, "MOST_DOCUMENT_BYTES", 4)
    documents = Uploads(store.path, most_bytes=16)
    for _ in range(3):
        writing = documents.begin("acme")
        writing.add(b"text")
        writing.finish("")
    with pytest.raises(QueueFullError):
        documents.begin("acme")
    documents.begin("beta").discard()
