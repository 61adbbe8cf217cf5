"""Tuned defaults: kept beside an unchanged context, gone with it, refused when damaged."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from index_store.errors import ContextNotFoundError, InvalidArgumentError, ManifestError
from index_store.store.catalog import DEFAULTS, Store, TunedDefault, TunedDefaultError
from index_store.store.clean_up import clean_up
from tests.support.store import CREATED, synthetic_context

ID = "5" * 64


def record(id_: str = ID) -> TunedDefault:
    reached = {"mass": 0.991, "keys": 0.034}
    created = datetime(2026, 3, 4, 5, 6, 7, 8, tzinfo=UTC)
    return TunedDefault(id_, "csattention@period=2", 0.0125, None, None, "mass", 0.99, reached, created)


@pytest.mark.parametrize(
    "default",
    [
        record(),
        replace(record(), keep=None, mass=0.95),
        replace(record(), keep=None, tokens=512),
        replace(record(), method="full", keep=None, target="kl", wanted=0.004),
    ],
)
def test_a_record_survives_the_store(tmp_path: Path, default: TunedDefault) -> None:
    store = Store(tmp_path, create=True)
    id_ = synthetic_context().write(store)
    assert store.default_method(id_) is None
    files = {path: path.read_bytes() for path in (tmp_path / "contexts").rglob("*") if path.is_file()}
    store.set_default_method(id_, replace(record(id_), method="quest"))
    default = replace(default, context=id_)
    store.set_default_method(id_, default)
    assert store.default_method(id_) == default
    assert files == {path: path.read_bytes() for path in (tmp_path / "contexts").rglob("*") if path.is_file()}
    assert [path.name for path in (tmp_path / "defaults").iterdir()] == [f"{id_}.json"]
    assert not store.verify(id_)
    assert clean_up(store) == []


def test_it_goes_with_its_context(tmp_path: Path) -> None:
    now = CREATED
    store = Store(tmp_path, create=True, clock=lambda: now)
    one = synthetic_context(seed=1).write(store)
    two = synthetic_context(seed=2, ttl=timedelta(days=1)).write(store)
    for id_ in (one, two):
        store.set_default_method(id_, record(id_))
    store.delete(one)
    assert store.default_method(one) is None
    now += timedelta(days=2)
    assert [item.kind for item in clean_up(store, dry_run=True)] == ["expired"]
    assert store.default_method(two) is not None
    assert [item.kind for item in clean_up(store)] == ["expired", "default"]
    assert list((tmp_path / "defaults").iterdir()) == []


def test_a_clean_up_removes_what_killed_writers_left(tmp_path: Path) -> None:
    store = Store(tmp_path, create=True)
    id_ = synthetic_context().write(store)
    store.set_default_method(id_, record(id_))
    left = tmp_path / "defaults" / f".tmp-{id_}"
    left.write_bytes(b"{")
    foreign = tmp_path / "defaults" / "notes.txt"
    foreign.write_text("keep me")
    with store.lock(id_):
        assert clean_up(store) == []
    assert [(item.kind, item.path, item.nbytes) for item in clean_up(store)] == [("default", left, 1)]
    assert store.default_method(id_) == record(id_)
    assert foreign.exists()


def test_only_a_context_that_is_there_has_one(tmp_path: Path) -> None:
    store = Store(tmp_path, create=True)
    id_ = synthetic_context().write(store)
    with pytest.raises(InvalidArgumentError, match="is of context 5555"):
        store.set_default_method(id_, record())
    with pytest.raises(ContextNotFoundError):
        store.set_default_method(ID, record())
    assert not list((tmp_path / "defaults").glob("*"))
    for outside in ("../x", "x" * 64, ""):
        with pytest.raises(InvalidArgumentError):
            store.default_method(outside)


def test_a_record_of_another_context_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, create=True)
    id_ = synthetic_context().write(store)
    path = tmp_path / "defaults" / f"{id_}.json"
    path.parent.mkdir()
    path.write_bytes(DEFAULTS.render(record()))
    with pytest.raises(TunedDefaultError, match="is of context 5555"):
        store.default_method(id_)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mass": 0.5}, "at most one of keep, mass and tokens"),
        ({"keep": -0.1}, "above 0 and at most 1"),
        ({"target": "speed"}, "one of mass, kl"),
        ({"wanted": float("nan")}, "not JSON"),
        ({"method": ""}, "printable"),
        ({"context": "short"}, "hex digits"),
        ({"created_at": datetime(2026, 1, 1)}, "UTC"),
    ],
)
def test_a_record_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        DEFAULTS.render(replace(record(), **changes))  # type: ignore[arg-type]
