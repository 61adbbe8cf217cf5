"""Documents and calibration prompts: read, joined, refused with a sentence."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from index_store.cli.documents import document_name, read_document
from index_store.errors import InvalidArgumentError
from index_store.models.loading import Tokenizer, load_tokenizer, resolve_model
from prefill_worker.jobs.inputs import fingerprint_prompts, read_prompts


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
