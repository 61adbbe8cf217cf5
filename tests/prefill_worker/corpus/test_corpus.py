"""Documents of a corpus, the worker that makes contexts of them, and both on Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from index_store.cli.console import SilentReporter
from index_store.errors import InvalidArgumentError, StoreUnavailableError
from index_store.objects.bucket import Bucket
from index_store.store.catalog import Store
from prefill_worker.__main__ import main
from prefill_worker.config import CorpusConfig, PrefillConfig
from prefill_worker.corpus import making
from prefill_worker.corpus.documents import CorpusFile, Document, documents_of, find_files
from prefill_worker.corpus.making import CorpusWorker
from prefill_worker.jobs.job import run_job
from tests.support.forking import ran
from tests.support.serving.listening import LOOPBACK, listeners
from tests.support.waiting import wait_until

TEXTS = [
    f"Text {number}. " + "It was a dark night, and the harbour lay still. " * number
    for number in range(4, 12)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight documents: files, lines, and what is none."""
    folder = tmp_path / "documents"
    (folder / "below").mkdir(parents=True)
    for number, text in enumerate(TEXTS[:4]):
        (folder / "below" / f"t{number}.txt").write_text(text)
    lines = [json.dumps({"name": f"line {number}", "text": text}) for number, text in enumerate(TEXTS[4:])]
    (folder / "lines.jsonl").write_text(
        "\n".join([*lines[:2], "", "{", '{"text": 3}', '{"text": " "}', *lines[2:]])
    )
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "latin.txt").write_bytes("Käse".encode("latin-1"))
    return folder


@pytest.fixture
def make_corpus(tiny_model: Path, tmp_path: Path, folder: Path) -> Callable[..., CorpusConfig]:
    def make(**changes: Any) -> CorpusConfig:
        settings: dict[str, Any] = {
            "model": str(tiny_model),
            "store": tmp_path / "store",
            "sources": (str(folder),),
            "chunk": 100,
            "dense_layers": "none",
        }
        return CorpusConfig(**{**settings, **changes})

    return make


def all_of(folder: Path) -> list[Document]:
    files, _ = find_files([str(folder)])
    return [document for file in files for document in documents_of(file)]


def test_documents_are_found_and_named(folder: Path) -> None:
    files, others = find_files([str(folder), str(folder / "lines.jsonl"), f"file://{folder}"])
    assert (len(files), others) == (6, 2)  # each once; the picture is met twice
    found = {document.source.removeprefix(f"{folder}/"): document for document in all_of(folder)}
    assert {name: each.title for name, each in found.items() if not each.problem} == {
        **{f"below/t{number}.txt": f"t{number}" for number in range(4)},
        **{f"lines.jsonl:{line}": f"line {number}" for number, line in enumerate((1, 2, 7, 8))},
    }
    assert sorted(each.text for each in found.values() if not each.problem) == sorted(TEXTS)
    problems = {name: each.problem for name, each in found.items() if each.problem}
    assert set(problems) == {"latin.txt", "lines.jsonl:4", "lines.jsonl:5", "lines.jsonl:6"}
    assert "not UTF-8" in problems["latin.txt"]
    assert "not JSON" in problems["lines.jsonl:4"]
    assert "'text' is int" in problems["lines.jsonl:5"]
    assert "empty" in problems["lines.jsonl:6"]


def test_what_utf8_cannot_write_is_a_problem_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "well"}\n[1]\n')
    assert ["character 1" in each.problem for each in all_of(tmp_path)] == [True, False, False]
    assert [bool(each.problem) for each in all_of(tmp_path)] == [True, False, True]


def test_a_file_that_is_named_is_text_whatever_its_ending(tmp_path: Path) -> None:
    (tmp_path / "notes.rst").write_text("words")
    files, others = find_files([str(tmp_path / "notes.rst")])
    assert (files, others) == ([CorpusFile("", str(tmp_path / "notes.rst"))], 0)


def test_sources_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for source in (str(tmp_path / "none"), f"file://{tmp_path}/none", str(tmp_path), "nonsense://a/b"):
        with pytest.raises(InvalidArgumentError, match=r"SOURCE|no documents"):
            find_files([source])
    assert not (tmp_path / "none").exists()


def test_documents_of_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the verbs that each object store has; a folder stands for one."""
    (tmp_path / "bucket" / "in").mkdir(parents=True)
    (tmp_path / "bucket" / "in" / "a.txt").write_text("from afar")
    opened = Bucket.open
    monkeypatch.setattr(Bucket, "open", lambda url: opened(url.replace("s3://", f"file://{tmp_path}/")))
    files, _ = find_files(["s3://bucket"])
    assert files == [CorpusFile("s3://bucket", "in/a.txt")]
    assert find_files(["s3://bucket/in/a.txt"])[0] == [CorpusFile("s3://bucket/in", "a.txt")]
    assert list(documents_of(files[0])) == [Document("s3://bucket/in/a.txt", "a", "from afar")]
    with pytest.raises(InvalidArgumentError, match="password"):
        find_files(["s3://me:secret@bucket/a"])


def test_a_worker_makes_what_run_makes(
    make_corpus: Callable[..., CorpusConfig],
    make_config: Callable[..., PrefillConfig],
    folder: Path,
    tmp_path: Path,
) -> None:
    alone = {
        run_job(make_config(store=tmp_path / "alone", input=(path,)), SilentReporter()).manifest.id
        for path in sorted((folder / "below").iterdir())
    }
    worker = CorpusWorker(make_corpus())
    outcomes = worker.make(all_of(folder))
    made = {each.id for each in outcomes if each.created}
    assert alone < made
    assert len(made) == len(TEXTS)
    assert {each.id for each in Store(tmp_path / "store").list()} == made
    assert sum(bool(each.problem) for each in outcomes) == 4
    assert {each.tokens for each in outcomes if each.created} == {len(text) for text in TEXTS}
    again = CorpusWorker(make_corpus(model=make_corpus().model)).make(all_of(folder))
    assert {each.id for each in again if not each.problem} == made
    assert not any(each.created for each in again)


def test_failures_that_may_pass_are_tried_again(
    make_corpus: Callable[..., CorpusConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = CorpusWorker(make_corpus(retries=2))
    carry_out, failures = making.carry_out, [StoreUnavailableError("away"), RuntimeError("odd")]

    def failing(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return carry_out(*given)

    monkeypatch.setattr(making, "carry_out", failing)
    monkeypatch.setattr(making, "_PAUSE_S", 0.0)
    documents = [Document("a", "a", TEXTS[0])]
    assert [each.created for each in worker.make(documents)] == [True]
    failures += [StoreUnavailableError("away")] * 3
    assert [(each.reason, each.problem) for each in worker.make(documents)] == [("STORE_UNAVAILABLE", "away")]
    failures += [InvalidArgumentError("never")] * 2
    assert [each.problem for each in worker.make(documents)] == ["never"]
    assert len(failures) == 1  # not tried again


def test_what_is_made_is_uploaded_and_found_by_others(
    make_corpus: Callable[..., CorpusConfig], folder: Path, tmp_path: Path
) -> None:
    objects = f"file://{tmp_path / 'objects'}"
    made = CorpusWorker(make_corpus(objects=objects)).make(all_of(folder))
    other = CorpusWorker(make_corpus(objects=objects, store=tmp_path / "other")).make(all_of(folder))
    assert [each.id for each in made] == [each.id for each in other]
    assert not any(each.created for each in other)


def test_ray_is_named_where_it_is_missing(
    folder: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as ended:
        main(["corpus", str(folder), "--store", str(tmp_path / "store"), "--model", str(tiny_model)])
    assert ended.value.code == 2
    assert "pip install 'sparsekv[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


@pytest.mark.nightly
def test_a_corpus_on_ray_is_killed_and_goes_on(folder: Path, tiny_model: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    assert ray is not None
    import pyarrow.parquet

    rows = [f"Row {number}. {TEXTS[0]}" for number in range(20)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / "rows.parquet")
    (folder / "broken.parquet").write_bytes(b"PAR1")
    store = tmp_path / "store"
    line = [
        *(
            sys.executable,
            "-m",
            "prefill_worker",
            "corpus",
            str(folder),
            "--store",
            str(store),
            "--workers",
            "2",
        ),
        *("--model", str(tiny_model), "--chunk", "100", "--format", "json", "--dense-layers", "none"),
        *("--failures", str(tmp_path / "failures.jsonl")),
    ]
    first = subprocess.Popen(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_until(lambda: (store / "contexts").is_dir() and len(Store(store).list()) >= 3, 300)
    listening = listeners(first.pid)
    assert len(listening) > 3
    assert set(listening) <= LOOPBACK
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    kept = {each.id: each.created_at for each in Store(store).list()}
    done = ran(line)
    report = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert report["documents"] == 33
    assert report["made"] + report["present"] == 28
    assert report["present"] >= len(kept)
    failures = [json.loads(each) for each in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert failures == report["failures"]
    assert len(failures) == 5
    after = {each.id: each.created_at for each in Store(store).list()}
    assert len(after) == 28
    assert kept.items() <= after.items()  # nothing was made twice
