"""What a job takes in, and what it changes of a context that is there."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from index_store.cli.documents import document_name, read_document
from index_store.cli.progress import LineReporter
from index_store.errors import InvalidArgumentError, NameTakenError, StoreError
from index_store.models.loading import Tokenizer, load_tokenizer, resolve_model
from index_store.store.catalog import Store, utc_now
from index_store.store.files import locks
from prefill_worker.build.index_choice import ChosenIndexes
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.added_indexes import plan_changes
from prefill_worker.jobs.job import run_job
from prefill_worker.jobs.prepared_job import PrefillReport, fingerprint_prompts, read_prompts
from tests.prefill_worker.jobs.support_jobs import MakeConfig, run
from tests.support.store import synthetic_context


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


def test_the_flag_of_a_file_that_is_no_text_is_named(tmp_path: Path, reader: Tokenizer) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidArgumentError, match=r"^--calibration: .*is not UTF-8 text"):
        read_prompts(path, reader)


def test_a_file_without_prompts_is_refused(tmp_path: Path, reader: Tokenizer) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n")
    with pytest.raises(InvalidArgumentError, match="has no prompts"):
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


def test_a_name_is_refused_where_it_is_taken_and_moves_where_that_is_asked_for(
    make_config: MakeConfig,
) -> None:
    first = run(make_config(name="night")).manifest
    other = {"salt": "another"}
    with pytest.raises(NameTakenError, match=f"belongs to context {first.id[:12]}.*--move-name"):
        run(make_config(name="night", **other))
    store = Store(make_config().store)
    assert len(store.list()) == 1
    moved = run(make_config(name="night", move_name=True, **other))
    assert (moved.created, store.resolve("night")) == (True, moved.manifest.id)
    assert store.manifest(first.id).name == f"night {first.id[:6]}"
    back = run(make_config(name="night", move_name=True))
    assert (back.created, list(back.changed), store.resolve("night")) == (False, ["name"], first.id)
    with pytest.raises(InvalidArgumentError, match="--move-name goes with --name"):
        make_config(move_name=True)


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


def test_a_time_to_live_is_given_to_a_context_without_one(make_config: MakeConfig) -> None:
    run(make_config())
    changed = run(make_config(ttl="1h")).changed
    assert changed["ttl"].endswith("instead of never")


def fail_to_lock(*_: object) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_read_only_store_has_all_that_an_equal_job_wants(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(make_config(name="night")).manifest
    left = make_config().store / "contexts" / f".tmp-{first.id}-0"
    left.mkdir()
    monkeypatch.setattr(locks, "_lock_current", fail_to_lock)
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
    monkeypatch.setattr(locks, "_lock_current", fail_to_lock)
    notes = io.StringIO()
    with pytest.raises(StoreError, match="locking failed: Read-only file system"):
        run_job(make_config(**changes), LineReporter(notes), io.BytesIO())
    assert f"the store has context {first.id[:12]} already, to be changed: {said}" in notes.getvalue()
    assert Store(make_config().store).manifest(first.id) == first


def test_a_job_of_another_owner_learns_nothing(make_config: MakeConfig) -> None:
    """Of equal documents, salts keep apart what jobs say, find, wait for and change."""
    own = run(make_config(salt="one", name="their secret", ttl="1h")).manifest
    store = Store(make_config().store)
    with store.lock(own.id):  # a job of the first owner is at work
        report, notes = run_noting(make_config(salt="two"))
    assert report.created
    assert report.manifest.id != own.id
    assert (report.manifest.name, report.manifest.expires_at) == ("document", None)
    said = notes + str(report)
    assert "their secret" not in said
    assert own.id[:12] not in said
    report, notes = run_noting(make_config(salt="two", name="mine", method=("quest",)))
    assert "their secret" not in notes + str(report)
    assert store.manifest(own.id) == own
