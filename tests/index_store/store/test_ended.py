"""What it takes to make contexts again: kept within a bound, told from damage, and gone with a deletion."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from index_store.errors import ContextNotFoundError, SparseKVError
from index_store.store.catalog import Store
from index_store.store.clean_up import KEPT_BEGINNING, StoreRoom, clean_up
from index_store.store.description.callers import Caller
from index_store.store.ended import KEPT_FOR, Ended, _bytes
from tests.support.store import CREATED, MODEL, SyntheticContext, flip, synthetic_context


def expire(store: Store, id_: str) -> None:
    store.update(id_, lambda manifest: replace(manifest, expires_at=CREATED))


def test_an_expired_context_leaves_what_was_read(stored: Store, context: SyntheticContext) -> None:
    expire(stored, context.id)
    manifest = stored.manifest(context.id)
    clean_up(stored)
    with pytest.raises(ContextNotFoundError):
        stored.manifest(context.id)
    again = Store(stored.path).ended
    assert again.known(context.id) == manifest
    for ref in (context.id, manifest.name):
        assert again.find(ref, "", MODEL.fingerprint) == manifest
        assert again.find(ref, "other", MODEL.fingerprint) is None
        assert again.find(ref, "", "f" * 64) is None
    with again.files(manifest) as files:
        assert files.token_ids().tolist() == context.tokens.tolist()
    assert {path.name for path in (again.folder / context.id).iterdir()} == {"manifest.json", "tokens"}
    assert stored.delete(context.id) == [context.id]
    assert again.known(context.id) is None
    with pytest.raises(ContextNotFoundError):
        stored.delete(context.id)


def test_others_neither_find_nor_delete_it(tmp_path: Path, context: SyntheticContext) -> None:
    store = Store(tmp_path, create=True)
    context = replace(context, draft=replace(context.draft, tenant="acme"))
    context.write(store)
    expire(store, context.id)
    clean_up(store)
    other, own = (Caller(name, frozenset({"read", "create", "delete"})) for name in ("other", "acme"))
    with pytest.raises(ContextNotFoundError) as raised:
        store.seen_by(other).delete(context.id)
    with pytest.raises(ContextNotFoundError) as missing:
        store.seen_by(other).delete("0" * 64)
    assert raised.value.message.replace(context.id, "0" * 64) == missing.value.message
    assert store.ended.known(context.id) is not None
    assert store.seen_by(own).delete(context.id) == [context.id]


def test_nothing_is_kept_of_beginnings_that_nobody_named(stored: Store, context: SyntheticContext) -> None:
    stored.update(context.id, lambda each: replace(each, labels={KEPT_BEGINNING: "automatic"}))
    expire(stored, context.id)
    clean_up(stored)
    assert stored.ended.known(context.id) is None


def test_who_has_most_loses_the_oldest_and_all_go_in_time(tmp_path: Path) -> None:
    store = Store(tmp_path, create=True)
    made = [synthetic_context(seed=seed, name=f"book {seed}") for seed in range(4)]
    for number, each in enumerate(made):
        replace(each, draft=replace(each.draft, tenant="large" if number else "small")).write(store)
        expire(store, each.id)
    size = max(_bytes(store.manifest(each.id)) for each in made)
    ended = store.ended = Ended(tmp_path, most_bytes=3 * size)
    for number, each in enumerate(made):
        ended.keep(store.manifest(each.id))
        at = time.time() - 1000 + number
        os.utime(ended.folder / each.id, (at, at))
    ended.trim()
    assert [ended.known(each.id) is not None for each in made] == [True, False, True, True]
    long_ago = time.time() - KEPT_FOR.total_seconds() - 10
    os.utime(ended.folder / made[2].id, (long_ago, long_ago))
    stray = ended.folder / ".tmp-killed"
    stray.mkdir()
    os.utime(stray, (long_ago, long_ago))
    StoreRoom(store).sweep()
    assert ended.known(made[2].id) is None
    assert not stray.exists()


def test_one_that_is_damaged_is_not_used(stored: Store, context: SyntheticContext) -> None:
    expire(stored, context.id)
    clean_up(stored)
    (tokens,) = (
        path for path in (stored.ended.folder / context.id / "tokens" / "c").rglob("*") if path.is_file()
    )
    flip(tokens, 3)
    kept = stored.ended.known(context.id)
    assert kept is not None
    with pytest.raises(SparseKVError, match="array 'tokens' has"), stored.ended.files(kept) as files:
        files.token_ids()
    manifest = stored.ended.folder / context.id / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"toy", b"toi"))
    assert Store(stored.path).ended.known(context.id) is None
