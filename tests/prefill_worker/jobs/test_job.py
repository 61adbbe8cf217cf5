"""Jobs end to end: what they take in, store, refuse and change, and what a failure leaves."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from index_store.cli.console import LineReporter
from index_store.cli.documents import document_name, read_document
from index_store.errors import (
    InvalidArgumentError,
    MethodUnsupportedError,
    SparseKVError,
    StoreError,
    StoreFullError,
)
from index_store.models.loading import Tokenizer, identify, load_model, load_tokenizer, resolve_model
from index_store.store.catalog import Store, utc_now
from index_store.store.description.manifest import MANIFESTS
from index_store.store.files import durable
from prefill_worker.build.index_choice import ChosenIndexes
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs import document_layers
from prefill_worker.jobs.added_indexes import plan_changes
from prefill_worker.jobs.job import run_job
from prefill_worker.jobs.prepared_job import PrefillReport, fingerprint_prompts, read_prompts
from tests.prefill_worker.conftest import DOCUMENT, MakeConfig, hidden_entries, run
from tests.support.models import write_model_folder
from tests.support.store import synthetic_context
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


TABLES = ("csattention",)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "nowhere"}, SparseKVError, "neither a packaged model"),
        ({"method": ("nonsense",)}, MethodUnsupportedError, "nonsense"),
        ({"dense_layers": "0,2"}, InvalidArgumentError, "names layer 2, model 'tiny' has layers 0 to 1"),
        (
            {"method": TABLES, "index": ("query_tables:subspaces=3",)},
            InvalidArgumentError,
            "does not split into 3 subspaces",
        ),
        (
            {"method": TABLES, "index": ("query_tables:centroids=10000",)},
            InvalidArgumentError,
            r"query_tables has 10000 centroids, expected at most \d+: that many queries",
        ),
    ],
)
def test_what_is_refused_leaves_nothing(
    make_config: MakeConfig, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = make_config(**changes)
    with pytest.raises(error, match=message):
        run(config)
    assert not config.store.exists()


def test_too_long_for_the_model(make_config: MakeConfig, tmp_path: Path) -> None:
    short = write_model_folder(tmp_path / "short", max_positions=128)
    with pytest.raises(InvalidArgumentError, match="more than the 128 positions"):
        run(make_config(model=str(short)))


def test_overflow_of_the_stored_dtype_is_an_error(make_config: MakeConfig, tmp_path: Path) -> None:
    wild = write_model_folder(tmp_path / "wild")
    tensors = load_file(wild / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e6
    save_file(tensors, wild / "model.safetensors", metadata={"format": "pt"})
    config = make_config(model=str(wild), dtype="float16", dense_layers="0,1")
    with pytest.raises(InvalidArgumentError, match=r"layer 1 are not finite in float16"):
        run(config)
    assert hidden_entries(config.store) == []


def test_space_is_checked_before_the_model_runs(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreFullError, match="1000 are free"):
        run(make_config())


@pytest.fixture(scope="module")
def reader() -> Tokenizer:
    return load_tokenizer(resolve_model("reader"))


def test_inputs_are_joined_in_order(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_bytes(b"two\r\n")
    stdin = io.BytesIO("drei é".encode())
    paths = (tmp_path / "b", tmp_path / "a", Path("-"))
    assert read_document(paths, stdin) == "two\r\none\ndrei é"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b" \n\t", "is empty"), (b"ab\xff\xfe", r"not UTF-8 text \(byte 2 is 0xff\)")],
)
def test_unusable_content_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "document.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        read_document([path], io.BytesIO())
    assert "document.txt" in caught.value.message
    with pytest.raises(InvalidArgumentError, match="standard input"):
        read_document([Path("-")], io.BytesIO(content))


def test_missing_files_folders_and_double_standard_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="No such file"):
        read_document([tmp_path / "nothing"], io.BytesIO())
    with pytest.raises(InvalidArgumentError, match="is a folder"):
        read_document([tmp_path], io.BytesIO())
    with pytest.raises(InvalidArgumentError, match="more than once"):
        read_document([Path("-"), Path("-")], io.BytesIO(b"text"))


def test_display_names_are_printable() -> None:
    assert document_name([Path("/books/moby dick.txt"), Path("b")]) == "moby dick"
    assert document_name([Path("-")]) == "standard input"
    assert document_name([Path("a\nb\udce9.txt")]) == "a?b?"


def test_plain_lines_are_worded_as_questions(tmp_path: Path, reader: Tokenizer) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Who is it?\n\n  What is it?  \n")
    prompts = read_prompts(path, reader)
    assert [reader.decode(prompt) for prompt in prompts] == [
        "\nQuestion: Who is it?\nAnswer:",
        "\nQuestion: What is it?\nAnswer:",
    ]


def test_json_lines_hold_prompts_or_questions(tmp_path: Path, reader: Tokenizer) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": " Once more,"}, {"question": "Who?", "answer": "Nobody."}]
    path.write_text("\n".join(map(json.dumps, lines)))
    prompts = read_prompts(path, reader)
    assert [reader.decode(prompt) for prompt in prompts] == [" Once more,", "\nQuestion: Who?\nAnswer:"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl:2: not JSON"),
        ("[1]", r"prompts.jsonl:2: expected \{\"prompt\": text\}"),
        ('{"prompt": 3}', "prompts.jsonl:2: expected"),
        ('{"prompt": "a", "question": "b"}', "prompts.jsonl:2: expected"),
        ('{"question": "b", "why": 1}', "got the members 'question', 'why'"),
        ('{"prompt": ""}', "prompts.jsonl:2: the prompt is empty"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, reader: Tokenizer, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(InvalidArgumentError, match=message):
        read_prompts(path, reader)


def test_prompt_fingerprints_tell_boundaries_apart() -> None:
    assert fingerprint_prompts([]) == ""
    assert fingerprint_prompts([[1, 2], [3]]) != fingerprint_prompts([[1], [2, 3]])


def run_noting(config: PrefillConfig) -> tuple[PrefillReport, str]:
    notes = io.StringIO()
    return run_job(config, LineReporter(notes), io.BytesIO()), notes.getvalue()


def files(store: Path) -> dict[str, int]:
    """Time of the last change of every file and folder."""
    return {str(path): path.stat().st_mtime_ns for path in store.rglob("*")}


def test_a_repeated_job_renames_and_sets_the_time_to_live(make_config: MakeConfig) -> None:
    first = run(make_config(name="night", ttl="1h")).manifest
    kept = run(make_config(name="night"))
    assert (kept.changed, kept.manifest) == ({}, first)
    renamed, notes = run_noting(make_config(name="day"))
    assert dict(renamed.changed) == {"name": "'night' is now 'day'"}
    assert "to be changed: name: 'night' is now 'day'" in notes
    assert renamed.manifest.expires_at == first.expires_at
    extended = run(make_config(ttl="2h"))
    assert not extended.created
    assert list(extended.changed) == ["ttl"]
    assert extended.changed["ttl"].endswith(f"instead of at {first.expires_at:%F %T} UTC")
    store = Store(make_config().store)
    stored = store.manifest(first.id)
    assert stored == extended.manifest
    assert (stored.name, stored.created_at) == ("day", first.created_at)
    assert stored.expires_at is not None
    assert abs(stored.expires_at - utc_now() - timedelta(hours=2)) < timedelta(minutes=1)
    assert store.verify(first.id) == []
    assert [manifest.id for manifest in store.list()] == [first.id]


def test_what_is_called_by_its_file_takes_no_name(make_config: MakeConfig) -> None:
    first = run(make_config()).manifest
    second, notes = run_noting(make_config(salt="another"))
    assert second.manifest.name == f"{first.name} {second.manifest.id[:6]}"
    assert "another context has the name already" in notes


def test_labels_that_are_too_many_together_are_the_callers_mistake() -> None:
    labels = {f"key{number}": "a" for number in range(63)}
    present = replace(synthetic_context().draft, indexes=(), labels=labels)
    chosen = ChosenIndexes((), (), frozenset())
    wanted = plan_changes(present, chosen, labels={"key0": "b", "more": "c"}).wanted
    assert wanted.labels == {**labels, "key0": "b", "more": "c"}
    with pytest.raises(InvalidArgumentError, match="has 63 labels and would have 65, expected at most 64"):
        plan_changes(present, chosen, labels={"more": "c", "most": "d"})


def fail_to_lock(*_: object) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_read_only_store_has_all_that_an_equal_job_wants(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(make_config(name="night")).manifest
    left = make_config().store / "contexts" / f".tmp-{first.id}-0"
    left.mkdir()
    monkeypatch.setattr(durable, "_lock_current", fail_to_lock)
    monkeypatch.setattr(shutil, "rmtree", fail_to_lock)
    before = files(make_config().store)
    again, notes = run_noting(make_config(name="night"))
    assert (again.created, again.changed, again.manifest) == (False, {}, first)
    assert notes == ""
    assert files(make_config().store) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "day"}, "name: 'night' is now 'day'"),
        ({"ttl": "1h"}, "ttl: expires at "),
        ({"method": ("quest",)}, "indexes: added pages; methods: now refined, quest"),
    ],
)
def test_a_read_only_store_says_what_it_cannot_change(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], said: str
) -> None:
    first = run(make_config(name="night")).manifest
    monkeypatch.setattr(durable, "_lock_current", fail_to_lock)
    notes = io.StringIO()
    with pytest.raises(StoreError, match="locking failed: Read-only file system"):
        run_job(make_config(**changes), LineReporter(notes), io.BytesIO())
    assert f"the store has context {first.id[:12]} already, to be changed: {said}" in notes.getvalue()
    assert Store(make_config().store).manifest(first.id) == first
