"""Children that have outgrown what they continue: who finds them, and what a killed worker leaves of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from index_store.family.children import publish_child, read_own_rows
from index_store.jobs.job_record import MOST_PRIORITY, JobRecord, JobState
from index_store.store.catalog import utc_now
from index_store.store.clean_up import find_leftovers
from index_store.store.description.manifest import Manifest
from prefill_worker.build.layer_writing import IndexWriting
from prefill_worker.worker.queue_worker import QueueWorker
from tests.prefill_worker.worker.test_queue_worker import TOKENS, Shop, work_in_process
from tests.support.forking import kill_after, start
from tests.support.store import continuation
from tests.support.waiting import wait_until

GROWN = TOKENS // 4 + 1


@pytest.fixture
def shop(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """With one context, and without the least number of tokens and the time that a child has to be there."""
    monkeypatch.setattr("index_store.family.parents.GROWN_TOKENS", 10)
    monkeypatch.setattr("prefill_worker.worker.queue_worker.SETTLED", timedelta(0))
    shop = Shop(tmp_path, tiny_model)
    shop.order()
    assert shop.worker().work_once()
    return shop


def child_of(shop: Shop, count: int = GROWN, **changes: Any) -> Manifest:
    (root,) = [entry for entry in shop.contexts.list() if entry.parent is None]
    return publish_child(shop.contexts, continuation(shop.contexts, root, count, **changes))


def ordered(shop: Shop) -> list[JobRecord]:
    return [job for job in shop.queue.entries() if isinstance(job, JobRecord) and job.order.whole]


def test_a_grown_child_is_made_whole_behind_all_else(shop: Shop) -> None:
    child = child_of(shop)
    (root,) = [entry for entry in shop.contexts.list() if entry.parent is None]
    rows = read_own_rows(shop.contexts, child)
    worker = shop.worker()
    worker.order_grown()
    worker.order_grown()
    (job,) = ordered(shop)
    assert (job.order.context, job.order.parent, job.priority) == (child.id, root.id, -MOST_PRIORITY)
    other = shop.order("Another document. " * 20, 7)
    assert worker.work_once()
    assert not shop.queue.get(other.id).open
    assert shop.queue.get(job.id).open
    shop.contexts.update(child.id, lambda manifest: replace(manifest, name="renamed", pinned=True))
    assert worker.work_once()
    whole = shop.made(job)
    assert (whole.id, whole.parent, whole.token_count) == (child.id, None, child.token_count)
    assert (whole.name, whole.pinned, whole.created_at) == ("renamed", True, child.created_at)
    assert [index.name for index in whole.indexes] == [index.name for index in root.indexes]
    with shop.contexts.open(whole.id) as found, shop.contexts.open(root.id) as before:
        assert torch.equal(found.tokens(), torch.cat([before.tokens(), rows.token_ids]))
        for layer in range(whole.model.layers):
            joined = torch.cat([before.array("kv", layer, 1), rows.rows[layer][1]])
            assert torch.equal(found.array(whole.kv.path, layer, 1), joined)
    worker.order_grown()
    assert not worker.work_once()
    assert shop.queue.get(job.id).progress.tokens_done == child.token_count


def test_others_are_left_alone(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    child_of(shop, GROWN - 2)
    child_of(shop, expires_at=utc_now() - timedelta(1), seed=2)
    shop.worker().order_grown()
    grown = child_of(shop, seed=3)
    QueueWorker(replace(shop.config(), grown_share=0)).order_grown()
    QueueWorker(replace(shop.config(), grown_share=1)).order_grown()
    monkeypatch.setattr("index_store.family.parents.GROWN_TOKENS", GROWN + 1)
    shop.worker().order_grown()
    with monkeypatch.context() as patch:
        patch.setattr("index_store.family.parents.GROWN_TOKENS", GROWN)
        patch.setattr("prefill_worker.worker.queue_worker.SETTLED", timedelta(seconds=60))
        shop.worker().order_grown()
    assert ordered(shop) == []
    monkeypatch.setattr("index_store.family.parents.GROWN_TOKENS", GROWN)
    worker = shop.worker()
    worker.order_grown()
    (job,) = ordered(shop)
    shop.queue.cancel(job.id)
    worker.order_grown()
    assert [job.state for job in ordered(shop)] == [JobState.CANCELLED]  # and is not ordered again
    assert shop.contexts.manifest(grown.id) == grown


def test_a_worker_that_ends_in_between_leaves_the_child_to_the_next(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = child_of(shop)
    worker, build = shop.worker(), IndexWriting.build
    worker.order_grown()

    def end(writing: IndexWriting, layer: int, *arguments: Any) -> Any:
        if layer == 1:
            raise SystemExit(143)
        return build(writing, layer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(IndexWriting, "build", end)
        with pytest.raises(SystemExit):
            worker.work_once()
    (job,) = ordered(shop)
    assert (job.open, shop.queue.held(job.id)) == (True, False)
    assert (shop.contexts.manifest(child.id), shop.contexts.verify(child.id)) == (child, [])
    assert shop.worker().work_once()
    assert shop.made(job).parent is None


def test_a_child_that_is_deleted_meanwhile_stays_so(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_of(shop)
    worker, build = shop.worker(), IndexWriting.build
    worker.order_grown()

    def delete_first(writing: IndexWriting, layer: int, *arguments: Any) -> Any:
        if layer == 0:
            shop.contexts.delete(child.id)
        return build(writing, layer, *arguments)

    monkeypatch.setattr(IndexWriting, "build", delete_first)
    assert worker.work_once()
    (job,) = ordered(shop)
    assert job.failure is not None
    assert job.failure.reason == "CONTEXT_NOT_FOUND"
    assert [entry.id for entry in shop.contexts.entries()] != [child.id]
    assert find_leftovers(shop.contexts) == []


@pytest.mark.nightly
def test_killed_workers_lose_no_child_and_show_nothing_half(shop: Shop) -> None:
    """Killed at moments spread over the whole of it, of children each of which is made whole in the end."""
    children = [child_of(shop, seed=seed) for seed in range(2, 8)]
    shop.worker().order_grown()
    for number in range(8):
        assert kill_after(0.05 + 0.07 * number, work_in_process, shop.config())
        for child in children:
            found = shop.contexts.manifest(child.id)
            assert found == child or found.parent is None
            if found.parent is None:
                assert shop.contexts.verify(child.id) == []
            else:
                assert read_own_rows(shop.contexts, child)
    process = start(work_in_process, shop.config())
    wait_until(lambda: not any(job.open for job in ordered(shop)))
    process.kill()
    process.join()
    for job in ordered(shop):
        assert shop.made(job).parent is None
