"""Jobs end to end: what is stored, what makes a context another one, when it is made again."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from index_store.cli.progress import LineReporter
from index_store.models.loading import identify, load_model, load_tokenizer, resolve_model
from index_store.store.catalog import Store
from index_store.store.description.manifest import MANIFESTS
from prefill_worker.jobs import document_layers
from prefill_worker.jobs.job import run_job
from tests.prefill_worker.conftest import DOCUMENT
from tests.prefill_worker.jobs.support_jobs import MakeConfig, hidden_entries, run
from tests.support.models import write_model_folder
from tests.support.waiting import wait_until


def test_a_context_holds_what_the_model_computed(make_config: MakeConfig) -> None:
    config = make_config(device="cpu")
    report = run(config)
    manifest = report.manifest
    assert report.created
    assert manifest.name == "document"
    assert manifest.dtype == "bfloat16"
    assert manifest.token_count == len(DOCUMENT)
    assert manifest.dense_layers == ()
    assert {index.name: index.layers for index in manifest.indexes} == {"coarse_rows": (0, 1)}
    assert manifest.expires_at is None
    assert {"tokenize", "hash weights", "load", "prefill", "index", "write", "sync", "publish"} <= set(
        report.seconds
    )
    assert manifest.kv_bytes == 2 * 2 * len(DOCUMENT) * 2 * 16 * 2

    store = Store(config.store)
    assert [found.id for found in store.list()] == [manifest.id]
    assert store.verify(manifest.id) == []
    folder = resolve_model(config.model)
    assert manifest.model == identify(folder)
    ids = load_tokenizer(folder).encode(DOCUMENT)
    model: Any = load_model(folder, "sdpa").model
    with torch.inference_mode():
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    with store.open(manifest.id) as context:
        assert context.tokens().tolist() == ids
        for layer, head in ((0, 0), (1, 1)):
            stored = context.array("kv", layer, head).float()
            expected = torch.stack(
                [cache.layers[layer].keys[0, head], cache.layers[layer].values[0, head]], dim=1
            )
            torch.testing.assert_close(stored, expected, rtol=0.05, atol=0.05)
    assert hidden_entries(config.store) == []


def test_the_same_content_again_does_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(make_config())

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("the weights were loaded although the context is there")

    monkeypatch.setattr(document_layers, "load_model", refuse)
    again = run(make_config(chunk=7))
    assert not again.created
    assert again.changed == {}
    assert again.manifest == first.manifest


def test_a_second_job_waits_for_the_first_and_finds_its_context(make_config: MakeConfig) -> None:
    id_ = run(make_config()).manifest.id
    config, notes = make_config(name="renamed"), io.StringIO()
    store = Store(config.store)
    with ThreadPoolExecutor(1) as pool:
        with store.lock(id_):
            second = pool.submit(run_job, config, LineReporter(notes), io.BytesIO())
            wait_until(lambda: "waiting for it" in notes.getvalue())
            assert not second.done()
        report = second.result(timeout=60)
    assert not report.created
    assert report.manifest == store.manifest(id_)
    assert f"another job is writing context {id_[:12]}" in notes.getvalue()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"salt": "tenant-2"},
        {"seed": 1},
        {"query_sample": 64},
        {"dense_layers": "0"},
        {"dense_layers": "auto"},
        {"attention": "muse", "muse_block": 256},
    ],
)
def test_whatever_changes_the_reading_changes_the_id(
    make_config: MakeConfig, changes: dict[str, Any]
) -> None:
    reference = run(make_config())
    other = run(make_config(**changes))
    assert other.created
    assert other.manifest.id != reference.manifest.id
    assert Store(make_config().store).verify(other.manifest.id) == []


def test_calibration_changes_id_and_tables_but_not_keys(make_config: MakeConfig, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Where does the harbour lie?\nHow was the night?\n")
    tables = make_config(method=("csattention",))
    plain, calibrated = run(tables), run(replace(tables, calibration=prompts))
    assert calibrated.manifest.id != plain.manifest.id
    assert calibrated.manifest.prefill["calibration_prompts"] == 2
    store = Store(make_config().store)
    with store.open(plain.manifest.id) as one, store.open(calibrated.manifest.id) as two:
        assert torch.equal(one.array("kv", 1, 1), two.array("kv", 1, 1))
        paths = [array.path for array in plain.manifest.indexes[0].arrays]
        assert any(not torch.equal(one.array(path, 1, 0), two.array(path, 1, 0)) for path in paths)


def test_time_to_live_and_expiry(make_config: MakeConfig) -> None:
    first = run(make_config(ttl="1s")).manifest
    assert first.expires_at == first.created_at + timedelta(seconds=1)
    folder = make_config().store / "contexts" / first.id
    past = first.created_at - timedelta(hours=1)
    expired = replace(first, created_at=past, expires_at=past + timedelta(seconds=1))
    (folder / "manifest.json").write_bytes(MANIFESTS.render(expired))
    again = run(make_config())
    assert again.created
    assert again.manifest.id == first.id
    assert again.manifest.expires_at is None


def test_a_damaged_context_is_made_again(make_config: MakeConfig) -> None:
    first = run(make_config()).manifest
    chunk = next((make_config().store / "contexts" / first.id / "kv").rglob("c/*/*/*/*/*"))
    chunk.write_bytes(chunk.read_bytes()[:-10])
    again = run(make_config())
    assert again.created
    assert Store(make_config().store).verify(first.id) == []


@pytest.mark.parametrize("length", [1, 2, 17])
def test_short_documents(make_config: MakeConfig, length: int) -> None:
    config = make_config(input=(Path("-"),), dense_layers="auto")
    report = run(config, b"x" * length)
    assert report.manifest.token_count == length
    assert Store(config.store).verify(report.manifest.id) == []


def test_begin_tokens_start_the_context(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "begins", add_begin=True)
    config = make_config(model=str(folder))
    manifest = run(config).manifest
    with Store(config.store).open(manifest.id) as context:
        assert context.tokens()[:2].tolist() == [2, load_tokenizer(resolve_model(str(folder))).encode("I")[0]]
