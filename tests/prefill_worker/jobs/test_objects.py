"""Contexts that are made where an object store is behind the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from index_store.objects.records import look
from index_store.objects.tier import Tier, open_store
from index_store.store.catalog import Store
from prefill_worker.__main__ import main
from tests.support.models import write_model_folder

TEXT = "The lamp of the grey harbour was lit by a keeper who counted ships. " * 8


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_what_others_made_is_neither_made_again_nor_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model_folder(tmp_path / "model", "llama", layers=3, head_dim=32)
    document, url = tmp_path / "notes.txt", (tmp_path / "bucket").as_uri()
    document.write_text(TEXT)
    shared = ["run", "--model", str(model), "--input", str(document), "--method", "csattention", "--quiet"]
    shared += ["--dense-layers", "0", "--objects", url, "--format", "json", "--store"]
    assert run(*shared, str(tmp_path / "one")) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["created"]
    assert run(*shared, str(tmp_path / "two"), "--name", "notes of two") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["id"], found["created"], list(found["changed"])) == (made["id"], False, ["name"])
    two = open_store(tmp_path / "two", objects=url)
    assert two.elsewhere(made["id"])
    held = look(Tier.of(two).bucket)[made["id"]]
    assert (held.number, len(held.contents)) == (2, 1)
    assert run(*shared, str(tmp_path / "two"), "--method", "quest") == 0  # which needs all of it
    capsys.readouterr()
    assert not two.elsewhere(made["id"])
    assert {index.name for index in two.manifest(made["id"]).indexes} >= {"pages"}
    assert two.verify(made["id"]) == []


def test_an_object_store_that_does_not_answer_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model_folder(tmp_path / "model", "llama", layers=3, head_dim=32)
    (tmp_path / "notes.txt").write_text(TEXT)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setattr("index_store.objects.bucket._RETRIES", 0)
    arguments = ["run", "--model", str(model), "--input", str(tmp_path / "notes.txt"), "--method", "full"]
    arguments += ["--quiet", "--objects", "s3://contexts", "--store", str(tmp_path / "store")]
    assert run(*arguments) == 1
    assert "is stored here, and not in s3://contexts" in capsys.readouterr().err
    (kept,) = Store(tmp_path / "store").list()
    assert Store(tmp_path / "store").verify(kept.id) == []
