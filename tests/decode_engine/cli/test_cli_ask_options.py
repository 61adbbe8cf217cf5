"""`ask` with what answers have to be, several answers, log probabilities, and files of questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from tests.decode_engine.cli.conftest import Run

ASK = ("ask", "--context", "lamp", "--max-tokens", "8")


@pytest.fixture(autouse=True)
def asked_server(monkeypatch: pytest.MonkeyPatch, server: DecodeServer, lamp: str) -> None:
    monkeypatch.setenv("SPARSEKV_SERVER", server.address)


def test_several_answers_with_log_probabilities(run: Run) -> None:
    sampled = (
        *ASK,
        "--n",
        "3",
        "--temperature",
        "1.5",
        "--seed",
        "2",
        "--logprobs",
        "2",
        "--prompt-logprobs",
    )
    result = run(*sampled, "--format", "json", "Who lit it?")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert len(told["answers"]) == 3
    for answer in told["answers"]:
        assert [each["token_id"] for each in answer["logprobs"]] == answer["token_ids"]
        assert all(len(each["alternatives"]) == 2 for each in answer["logprobs"])
    assert len(told["prompt_logprobs"]) == told["answers"][0]["prompt_tokens"] - 1
    text = run(*sampled, "Who lit it?").stdout
    assert [f"[{number}] " in text for number in (1, 2, 3)] == [True] * 3
    assert text.count("prompt ") >= len(told["prompt_logprobs"])


def test_answers_that_have_to_be_something(run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [{"lit": true}, {"lit": false}]}')
    as_json = run("ask", "--context", "lamp", "--json-schema", str(schema), "Was it lit?")
    assert as_json.returncode == 0, as_json.stderr
    assert json.loads(as_json.stdout) in ({"lit": True}, {"lit": False})
    assert run(*ASK, "--regex", "[0-9]{3}", "How many?").stdout.strip().isdigit()
    assert run(*ASK, "--choice", "yes", "--choice", "no", "Was it?").stdout.strip() in ("yes", "no")
    cut = run("ask", "--context", "lamp", "--json-schema", str(schema), "--max-tokens", "2", "Was it lit?")
    assert (cut.returncode, "the answer was cut at --max-tokens after 2 tokens" in cut.stderr) == (0, True)
    assert "was cut" not in as_json.stderr
    refused = run(*ASK, "--regex", "(", "How many?")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --regex cannot be obeyed: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--regex", "a", "--choice", "b"), "--regex and --choice are given, expected at most one"),
        (("--logit-bias", "4"), "--logit-bias is '4', expected TOKEN=BIAS"),
        (("--logit-bias", "4=101"), "--logit-bias is '4=101', expected TOKEN=BIAS"),
        (("--n", "2"), "--n is 2 and nothing is sampled"),
        (("--questions", __file__), "--questions and --out together"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_flags(run: Run, options: tuple[str, ...], words: str) -> None:
    question = () if "--questions" in options else ("Who?",)
    result = run(*ASK, *options, *question)
    assert result.returncode in (1, 2)
    assert words in result.stderr


def test_tokens_that_are_biased_and_that_stop(run: Run, client: Client) -> None:
    [letter] = client.tokenize("x").ids
    forced = run(*ASK, "--logit-bias", f"{letter}=100", "--format", "json", "Who?")
    assert json.loads(forced.stdout)["token_ids"] == [letter] * 8
    stop = run(
        *ASK,
        "--logit-bias",
        f"{letter}=100",
        "--stop-token",
        str(letter),
        "--min-tokens",
        "3",
        "--format",
        "json",
        "W?",
    )
    told = json.loads(stop.stdout)
    assert (told["token_ids"][:2].count(letter), told["finish_reason"]) == (0, "stop")


def test_many_questions_are_answered_once_each_and_gone_on_with(run: Run, tmp_path: Path) -> None:
    questions, out = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    asked = [f"Who lit lamp number {number}?" for number in range(9)]
    questions.write_text("\n".join(asked) + "\n\n")
    many = ("--questions", str(questions), "--out", str(out), "--format", "json", "--quiet")
    probable = ("--logprobs", "1", "--prompt-logprobs")
    first = run(*ASK, *many, *probable)
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout)
    assert (told["answered"], told["kept"], told["failed"]) == (9, 0, 0)
    records = {record["index"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert [records[place]["question"] for place in range(9)] == asked
    alone = json.loads(run(*ASK, *probable, "--format", "json", asked[4]).stdout)
    assert {name: records[4][name] for name in ("text", "token_ids")} == {
        name: alone[name] for name in ("text", "token_ids")
    }
    for name in ("logprobs", "prompt_logprobs"):
        assert [each["token_id"] for each in records[4][name]] == [each["token_id"] for each in alone[name]]
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    again = json.loads(run(*ASK, *many).stdout)
    assert (again["answered"], again["kept"]) == (4, 5)
    after = {record["index"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert {place: record["token_ids"] for place, record in after.items()} == {
        place: record["token_ids"] for place, record in records.items()
    }


def test_questions_that_fail_are_told_and_asked_again_later(run: Run, tmp_path: Path) -> None:
    questions, out = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    lines = [
        {"question": "Who lit it?"},
        {"question": "word " * 5000},
        {"question": "Who kept it?", "answer": "?"},
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run(*ASK, "--questions", str(questions), "--out", str(out), "--quiet")
    assert result.returncode == 1
    assert "2 questions answered, 0 were before, 1 failed" in result.stdout
    assert "question 2: " in result.stderr
    assert sorted(json.loads(line)["index"] for line in out.read_text().splitlines()) == [0, 2]
    questions.write_text(json.dumps(lines[2]) + "\n")
    other = run(*ASK, "--questions", str(questions), "--out", str(out), "--quiet")
    assert other.returncode == 2
    assert "answers another question" in other.stderr
