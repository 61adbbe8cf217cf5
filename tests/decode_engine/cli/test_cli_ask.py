"""`ask`, `contexts` and `chat` with all their options, through pipes and with interruptions; what settings accept."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_engine.cli import chat_command
from decode_engine.cli.ask_command import AskConfig
from decode_engine.cli.evaluate_command import TuneConfig
from decode_engine.evaluation.settings import EvaluationConfig
from decode_engine.rpc.client import Client, Piece, Usage
from decode_engine.rpc.door.options import is_loopback
from decode_engine.rpc.server import DecodeServer
from decode_engine.settings.config import ServeConfig
from index_store.cli.options import Spelled, options_of
from index_store.errors import InvalidArgumentError
from index_store.memory.devices import context_device, default_budget, memory_budget, pick_device
from index_store.memory.placement import SLOT_SHARE, MemoryBytes
from index_store.models.conversation.messages import Message, Role
from tests.decode_engine.cli.conftest import Run
from tests.decode_engine.conftest import Library

ASK = ("ask", "--context", "lamp", "--max-tokens", "5", "--format", "json")
ASK_LONG = ("ask", "--context", "lamp", "--max-tokens", "8")


@pytest.fixture(autouse=True)
def asked_server(monkeypatch: pytest.MonkeyPatch, server: DecodeServer, lamp: str) -> None:
    monkeypatch.setenv("SPARSEKV_SERVER", server.address)


def give_input(monkeypatch: pytest.MonkeyPatch, data: str | bytes) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(data.encode() if isinstance(data, str) else data))
    )


def test_a_question_may_come_from_a_file_or_standard_input(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    question = "Wer zündete sie an — 灯?"
    file = tmp_path / "question.txt"
    file.write_text(f"\n{question}\n", encoding="utf-8")
    asked = run(*ASK, question)
    assert asked.returncode == 0, asked.stderr
    expected = {name: json.loads(asked.stdout)[name] for name in ("text", "token_ids", "prompt_tokens")}
    from_file = json.loads(run(*ASK, "--file", str(file)).stdout)
    assert {name: from_file[name] for name in expected} == expected
    for dash in (("-",), ("--file", "-")):
        give_input(monkeypatch, file.read_bytes())
        from_input = json.loads(run(*ASK, *dash).stdout)
        assert {name: from_input[name] for name in expected} == expected


def test_a_text_is_taken_as_it_is(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("  Who?\n\n")
    asked = json.loads(run(*ASK, "--raw", "  Who?\n\n").stdout)
    read = json.loads(run(*ASK, "--raw", "--file", str(file)).stdout)
    assert (read["prompt_tokens"], read["token_ids"]) == (asked["prompt_tokens"], asked["token_ids"])
    stripped = json.loads(run(*ASK, "--raw", "Who?").stdout)
    assert stripped["prompt_tokens"] < read["prompt_tokens"]


ONE = "error: expected one of a question, - for a question on standard input, --file and --questions\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, ONE),
        ([" \n\t "], 2, "error: the question is empty, expected words\n"),
        (["Who?", "--file", __file__], 2, ONE),
        (["-", "--file", "-"], 2, ONE),
        (["--questions", __file__], 2, "--questions and --out together"),
        (["Who?", "--context", "no such book"], 1, "no such book"),
        (["Who?", "--server", "127.0.0.1:1"], 1, "no server answers"),
        (["Who?", "--method", "guesswork"], 2, "error: --method is 'guesswork'"),
        (["Who?", "--method", "csattention+sixpole"], 2, "expected one of dropped, monopole"),
        (["Who?", "--method", "full", "--keep", "0.1"], 2, "full"),
        (["Who?", "--keep", "0.1", "--mass", "0.9"], 2, "--keep and --mass are given"),
        (["Who?", "--stop", ""], 2, "--stop is '' of 0 characters"),
        (["Who?", *["--stop", "x"] * 17], 2, "--stop is given 17 times, expected at most 16"),
        (
            ["Who?", "--regex", "a", "--choice", "b"],
            2,
            "--regex and --choice are given, expected at most one",
        ),
        (["Who?", "--logit-bias", "4"], 2, "--logit-bias is '4', expected TOKEN=BIAS"),
        (["Who?", "--logit-bias", "4=101"], 2, "--logit-bias is '4=101', expected TOKEN=BIAS"),
        (["Who?", "--n", "2"], 2, "--n is 2 and nothing is sampled"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_flags(
    run: Run, words: list[str], code: int, message: str
) -> None:
    result = run(*ASK_LONG, *words)
    assert (result.returncode, result.stdout) == (code, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_input_that_is_no_text_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, b"Who\xff?")
    result = run(*ASK, "-")
    assert result.returncode == 2
    assert result.stderr == "error: standard input is not UTF-8 text: byte 3 cannot be decoded\n"


def test_contexts_are_listed_and_shown(run: Run, client: Client, lamp: str) -> None:
    id_ = lamp.removeprefix("contexts/")
    header, *lines = run("contexts", "ls").stdout.splitlines()
    assert header.split()[:5] == ["ID", "NAME", "STATE", "MEMORY", "METHODS"]
    (line,) = [line for line in lines if line.startswith(id_)]
    assert line.split()[1:3] == ["lamp", "READY"]
    listed = json.loads(run("contexts", "ls", "--format", "json").stdout)
    (entry,) = [entry for entry in listed["contexts"] if entry["name"] == lamp]
    assert entry == json.loads(run("contexts", "show", id_[:8], "--format", "json").stdout)
    info = client.get_context(lamp)
    assert (entry["token_count"], entry["create_time"]) == (info.token_count, info.create_time.isoformat())
    rows = dict(line.split("  ", 1) for line in run("contexts", "show", "lamp").stdout.splitlines())
    shown = {label.strip(): value.strip() for label, value in rows.items()}
    assert (shown["id"], shown["name"], shown["state"]) == (id_, "lamp", "READY")
    assert shown["dense layers"] == "1 (layer 0)"
    assert shown["index query_tables"].startswith("query_tables, ")


def test_contexts_are_warmed_and_removed(run: Run, library: Library, client: Client) -> None:
    names = ["candle", "torch"]
    ids = {name: library.prefill(name) for name in names}
    first = json.loads(run("contexts", "warm", "candle", "--format", "json").stdout)
    assert first["warmed"][0]["already_resident"] is False
    assert first["warmed"][0]["context"]["resident"] is True
    again = run("contexts", "warm", "candle", ids["candle"], "torch").stdout.splitlines()
    assert again[0] == f"{ids['candle']}: was in memory"
    assert again[1].startswith(f"{ids['torch']}: loaded in ")
    refused = run("contexts", "rm", "torch", "no such book")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no such book" in refused.stderr
    assert json.loads(run("contexts", "rm", "torch", "--format", "json").stdout) == {
        "removed": [ids["torch"]]
    }
    assert run("contexts", "rm", "candle").stdout == f"removed {ids['candle']}\n"
    assert not {context.display_name for context in client.list_contexts()} & set(names)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--out", "{0}/a", "--questions", "{0}/a"], 2, "--out and --questions are both "),
        (["--out", "{0}/kept", "--questions", "{0}/link"], 2, "--out and --questions are both "),
        (
            ["--out", "{0}/a", "--questions", "{0}/b", "--text", "{0}/empty"],
            2,
            "empty is empty; expected words",
        ),
        (["--out", "{0}/a", "--questions", "{0}/b", "--ask", "9", "--facts", "8"], 2, "--ask is 9"),
    ],
)
def test_make_document_writes_nothing_where_it_refuses(
    run: Run, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "kept").write_text("a document")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    result = run("make-document", "--tokens", "1000", *(part.format(tmp_path) for part in arguments))
    assert result.returncode == code
    assert message in result.stderr
    assert (tmp_path / "kept").read_text() == "a document"
    assert not {path.name for path in tmp_path.iterdir()} & {"a", "b"}


def test_without_a_context_the_model_is_asked_alone(
    run: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.generate(question="Who lit it?", max_tokens=5) as generation:
        expected = generation.read()
    asked = run("ask", "Who lit it?", "--max-tokens", "5", "--format", "json")
    assert asked.returncode == 0, asked.stderr
    answer = json.loads(asked.stdout)
    assert (answer["context"], answer["text"]) == ("", expected)
    give_input(monkeypatch, "Who lit it?\n")
    said = json.loads(run("chat", "--max-tokens", "5", "--format", "json").stdout)
    assert (said["context"], said["turns"][0]["assistant"]) == ("", expected)
    assert run("ask", "Who?", "--method", "csattention").returncode != 0
    assert "requests, " in run("status").stdout


def test_several_answers_with_log_probabilities(run: Run) -> None:
    sampled = (
        *ASK_LONG,
        *["--n", "3", "--temperature", "1.5", "--seed", "2", "--logprobs", "2", "--prompt-logprobs"],
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
    assert run(*ASK_LONG, "--regex", "[0-9]{3}", "How many?").stdout.strip().isdigit()
    assert run(*ASK_LONG, "--choice", "yes", "--choice", "no", "Was it?").stdout.strip() in ("yes", "no")
    cut = run("ask", "--context", "lamp", "--json-schema", str(schema), "--max-tokens", "2", "Was it lit?")
    assert (cut.returncode, "the answer was cut at --max-tokens after 2 tokens" in cut.stderr) == (0, True)
    assert "was cut" not in as_json.stderr
    refused = run(*ASK_LONG, "--regex", "(", "How many?")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --regex cannot be obeyed: ")


def test_tokens_that_are_biased_and_that_stop(run: Run, client: Client) -> None:
    [letter] = client.tokenize("x").ids
    asked = [*ASK_LONG, "--logit-bias", f"{letter}=100", "--format", "json", "W?"]
    assert json.loads(run(*asked).stdout)["token_ids"] == [letter] * 8
    told = json.loads(run(*asked, "--stop-token", str(letter), "--min-tokens", "3").stdout)
    assert (told["token_ids"][:2].count(letter), told["finish_reason"]) == (0, "stop")


def test_many_questions_are_answered_once_each_and_gone_on_with(run: Run, tmp_path: Path) -> None:
    questions, out = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    asked = [f"Who lit lamp number {number}?" for number in range(9)]
    questions.write_text("\n".join(asked) + "\n\n")
    many = ("--questions", str(questions), "--out", str(out), "--format", "json", "--quiet")
    probable = ("--logprobs", "1", "--prompt-logprobs")
    first = run(*ASK_LONG, *many, *probable)
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout)
    assert (told["answered"], told["kept"], told["failed"]) == (9, 0, 0)
    records = {record["index"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert [records[place]["question"] for place in range(9)] == asked
    alone = json.loads(run(*ASK_LONG, *probable, "--format", "json", asked[4]).stdout)
    assert {name: records[4][name] for name in ("text", "token_ids")} == {
        name: alone[name] for name in ("text", "token_ids")
    }
    for name in ("logprobs", "prompt_logprobs"):
        assert [each["token_id"] for each in records[4][name]] == [each["token_id"] for each in alone[name]]
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    again = json.loads(run(*ASK_LONG, *many).stdout)
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
    result = run(*ASK_LONG, "--questions", str(questions), "--out", str(out), "--quiet")
    assert result.returncode == 1
    assert "2 questions answered, 0 were before, 1 failed" in result.stdout
    assert "question 2: " in result.stderr
    assert sorted(json.loads(line)["index"] for line in out.read_text().splitlines()) == [0, 2]
    questions.write_text(json.dumps(lines[2]) + "\n")
    other = run(*ASK_LONG, "--questions", str(questions), "--out", str(out), "--quiet")
    assert other.returncode == 2
    assert "answers another question" in other.stderr


CHAT = ("chat", "lamp", "--max-tokens", "4", "--method", "full")


def answer(client: Client, context: str, messages: list[Message]) -> str:
    with client.generate(context, messages=messages, max_tokens=4, method="full") as generation:
        return generation.read()


def test_a_conversation_goes_on_line_by_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, client: Client, lamp: str
) -> None:
    first = [Message(Role.USER, "Who lit\nit?")]
    one = answer(client, lamp, first)
    second = [*first, Message(Role.ASSISTANT, one), Message(Role.USER, "Why\n\nso?")]
    two = answer(client, lamp, second)
    give_input(monkeypatch, '/usage\nWho lit\\\nit?\n\n/help\n"""Why\n\nso?"""\n/usage\n/quit\nnever said\n')
    result = run(*CHAT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{one}\n{two}\n"
    assert "nothing was said yet" in result.stderr
    assert "Ctrl-C stops an answer" in result.stderr
    assert (
        "of conversation, 4 of the last answer, which touched 100.00% of the keys (full); 2 messages"
        in result.stderr
    )


def test_a_conversation_as_json(run: Run, monkeypatch: pytest.MonkeyPatch, client: Client, lamp: str) -> None:
    """The input may end in the middle of a text of several lines."""
    give_input(monkeypatch, 'Who?\n"""Why')
    said = json.loads(run(*CHAT, "--format", "json").stdout)
    assert said["context"] == lamp
    assert [turn["user"] for turn in said["turns"]] == ["Who?", "Why"]
    assert said["turns"][0]["assistant"] == answer(client, lamp, [Message(Role.USER, "Who?")])
    assert said["turns"][1]["summary"]["completion_tokens"] == 4


def test_an_error_ends_a_conversation_in_a_pipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, "Who?\nWhy?\n")
    result = run("chat", "lamp", "--method", "nonsense")
    assert (result.returncode, result.stderr.count("error: ")) == (2, 1)
    give_input(monkeypatch, "/dance\nWho?\n")
    result = run(*CHAT)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: /dance is no command; /help lists them\n"


def test_an_interrupt_ends_the_answer_and_not_the_conversation(
    run: Run, monkeypatch: pytest.MonkeyPatch, client: Client, lamp: str
) -> None:
    """What was said of the stopped answer is part of the conversation."""
    asked: list[list[Message]] = []

    class Interrupted(Client):
        def generate(self, context: str, **given: Any) -> Any:
            asked.append(list(given["messages"]))
            generation = super().generate(context, **given)
            return _Stopped(generation) if len(asked) == 1 else generation

    monkeypatch.setattr(chat_command, "Client", Interrupted)
    give_input(monkeypatch, "Who?\n/usage\nWhy?\n")
    result = run(*CHAT)
    assert result.returncode == 0, result.stderr
    assert "(stopped)" in result.stderr
    assert "of the last answer, which was stopped; 1 messages" in result.stderr
    begun = asked[1][1]
    assert begun.role is Role.ASSISTANT
    assert answer(client, lamp, asked[0]).startswith(begun.content)
    assert result.stdout == f"{begun.content}\n{answer(client, lamp, asked[1])}\n"


class _Stopped:
    """A generation in whose middle somebody presses Ctrl-C."""

    def __init__(self, generation: Any) -> None:
        self._generation = generation

    def __enter__(self) -> _Stopped:
        return self

    def __exit__(self, *error: object) -> None:
        self._generation.cancel()

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._generation:
            yield piece
            if piece.text.strip():
                raise KeyboardInterrupt

    def cancel(self) -> None:
        self._generation.cancel()

    @property
    def usage(self) -> Usage | None:
        return self._generation.usage  # type: ignore[no-any-return]


def test_contexts_are_pinned_labelled_and_chosen(run: Run, library: Library, client: Client) -> None:
    ids = {name: library.prefill(name) for name in ("shown", "hidden")}
    said = run("contexts", "update", "shown", "--pin", "--label", "team=law", "--label", "year=2026").stdout
    assert "team=law, year=2026" in said
    more = ("--label", "year-", "--label", "place=x", "--format", "json")
    changed = json.loads(run("contexts", "update", "shown", *more).stdout)
    assert (changed["labels"], changed["pinned"]) == ({"place": "x", "team": "law"}, True)
    rows = dict(line.split("  ", 1) for line in run("contexts", "show", "shown").stdout.splitlines())
    assert (rows["labels"].strip(), rows["expires"].strip()) == (
        "place=x, team=law",
        "pinned; otherwise never",
    )
    listed = run("contexts", "ls", "--label", "team=law", "--name-prefix", "sho", "--state", "READY")
    assert [line.split()[1] for line in listed.stdout.splitlines()] == ["NAME", "shown"]
    assert "has no contexts that fit" in run("contexts", "ls", "--label", "team=nowhere").stdout
    refused = run("contexts", "ls", "--state", "GOOD")
    assert (refused.returncode, refused.stderr.startswith("error: state is 'GOOD'")) == (2, True)
    unpinned = run("contexts", "update", "shown", "--unpin", "--format", "json").stdout
    assert not json.loads(unpinned)["pinned"]
    assert (
        run("contexts", "update", "shown", "--label", "law").stderr
        == "error: label 'law': expected KEY=VALUE, or KEY- to remove it\n"
    )
    for id_ in ids.values():
        client.delete_context(f"contexts/{id_}")


def test_a_conversation_is_kept_as_one_context(
    run: Run, server: DecodeServer, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_input(monkeypatch, "Who lit it?\nAnd when?\n")
    place = ("--server", server.address)
    with Client(server.address) as client:
        others = {context.name for context in client.list_contexts()}
    said = run(
        "chat", lamp, "--keep-as", "talk", "--max-tokens", "6", "--method", "full", "--format", "json", *place
    )
    assert said.returncode == 0, said.stderr
    document = json.loads(said.stdout)
    with Client(server.address) as client:
        children = [context for context in client.list_contexts() if context.name not in others]
        assert [(child.name, child.display_name) for child in children] == [(document["kept"], "talk")]
        assert children[0].parent == lamp
        summary = document["turns"][1]["summary"]
        context_tokens = summary["context_tokens"] + summary["prompt_tokens"] + summary["completion_tokens"]
        assert children[0].token_count == context_tokens
        with client.generate(document["kept"], question="Where?", max_tokens=3) as generation:
            generation.read()
        client.delete_context(document["kept"])


def test_loopback() -> None:
    assert all(is_loopback(address) for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "127.1.2.3:1"))
    assert not any(is_loopback(address) for address in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1"))


def test_slots_are_as_many_as_contexts_have_otherwise() -> None:
    assert ServeConfig(Path(), "reader").slot_share == SLOT_SHARE


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == pick_device("cpu").type == "cpu"
    for refuse in (pick_device, lambda name: ServeConfig(Path(), "reader", device=name).check_devices()):
        with pytest.raises(InvalidArgumentError, match="--device is cuda, but torch sees no CUDA device"):
            refuse("cuda")
        with pytest.raises(InvalidArgumentError, match="--device is 'cuda:0', expected auto, cpu or cuda"):
            refuse("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto").type == pick_device("cuda").type == "cuda"
    assert pick_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({}, ("\n",)),
        ({"raw": True}, ()),
        ({"stop": ("x",)}, ("x",)),
        ({"stop": ("x",), "raw": True}, ("x",)),
        ({"regex": "a"}, ()),
        ({"regex": "a", "stop": ("x",)}, ("x",)),
    ],
)
def test_questions_end_at_the_line_break_unless_told_otherwise(
    options: dict[str, Any], stops: tuple[str, ...]
) -> None:
    config = AskConfig(context="c", prompt="q", **options)
    assert config.generate_options("q", raw=config.raw)["stop"] == stops


def test_placement_and_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServeConfig(Path(), "reader").placement == "auto"
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert memory_budget(cpu, None, None, 2**40) == MemoryBytes(host=default_budget(cpu))
    assert default_budget(cpu) == 8 * 2**30
    assert memory_budget(cpu, 7, None, 2**40) == MemoryBytes(host=7)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**30, 140 * 2**30))
    assert memory_budget(cuda, None, None, 2**40) == MemoryBytes(2**39, 50 * 2**30)
    assert memory_budget(cuda, 7, 9, 2**40) == MemoryBytes(7, 9)
    assert (context_device(cpu), context_device(cuda)) == (None, cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match="expected auto, device, hybrid"):
        ServeConfig(Path(), "reader", placement="disk").check_devices()
    with pytest.raises(InvalidArgumentError, match="--placement is hybrid, but the CPU computes"):
        ServeConfig(Path(), "reader", placement="hybrid").check_devices()
    with pytest.raises(InvalidArgumentError, match="--device-memory is given, but the CPU computes"):
        ServeConfig(Path(), "reader", device_memory=5).check_devices()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ServeConfig(Path(), "reader", placement="hybrid", device_memory=5).check_devices()


@pytest.mark.parametrize("config", [ServeConfig, EvaluationConfig, TuneConfig])
def test_a_flags_default_means_the_fields_default(config: type[Any]) -> None:
    for field, _, marks in options_of(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        for mark in marks:
            if isinstance(mark, Spelled):
                assert mark.read(mark.default) == default


@pytest.mark.parametrize(("cores", "doors"), [(1, 0), (3, 0), (4, 1), (11, 2), (16, 4), (128, 4)])
def test_doors_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, doors: int) -> None:
    monkeypatch.setattr("decode_engine.settings.config.available_cores", lambda: cores)
    assert ServeConfig(store=tmp_path, model="m", threads=1, search_threads=1).doors == doors
