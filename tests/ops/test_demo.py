"""The demonstration asks over gRPC, judges the answers, and leaves nothing running whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from index_store.models.resolve import resolve_model
from index_store.models.tokenizer import load_tokenizer
from tests.ops.scripts import load_script
from tests.support.forking import ran

DEMONSTRATION = Path(__file__).resolve().parents[2] / "ops" / "demonstration"
DEMO = [sys.executable, str(DEMONSTRATION / "demo_run.py")]
SMALL = ["--tokens", "1500", "--facts", "4", "--ask", "3"]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load_script(DEMONSTRATION / "demo_run.py")


@pytest.fixture(scope="module")
def answers() -> ModuleType:
    return load_script(DEMONSTRATION / "demo_answers.py")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments for a text of one's own with a question about it, which is the least that a demonstration can do."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "text").write_text(
        "It was a quiet morning in the village. " * 40 + "The price of the lantern is 4821. " + "Rain. " * 90
    )
    (folder / "questions").write_text('{"question": "What is the price of the lantern?", "answer": "4821"}\n')
    return [str(folder / "text"), "--questions", str(folder / "questions")]


def processes_naming(text: str) -> list[int]:
    """Ids of the processes whose command line holds the text."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DEMO, *arguments],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("text", "expected", "correct"),
    [
        ("The code of the falcon is 48213.", "48213", True),
        ("Silver Fox", "silver fox", True),
        ("The code is 482130.", "48213", False),
        ("148213", "48213", False),
        ("", "48213", False),
        ("anything", None, None),
        ("It costs 3.", "3.", True),
    ],
)
def test_an_answer_is_right_when_the_expected_words_stand_in_it(
    answers: ModuleType, text: str, expected: str | None, correct: bool | None
) -> None:
    assert answers.is_correct(text, expected) is correct


def test_clearly_worse_means_more_than_one_in_ten(answers: ModuleType) -> None:
    summary = {
        "with_known_answer": 20,
        "correct_full": 20,
        "correct_sparse": 18,
        "questions": 20,
        "same_answer": 0,
    }
    assert not answers.is_clearly_worse(summary)
    assert answers.is_clearly_worse(summary | {"correct_sparse": 17})
    unknown = summary | {"with_known_answer": 0}
    assert answers.is_clearly_worse(unknown | {"same_answer": 13})
    assert not answers.is_clearly_worse(unknown | {"same_answer": 14})


def test_questions_that_cannot_be_read_are_named(answers: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "q").write_text('{"question": "What?"}\n\n{"answer": "1"}\n')
    with pytest.raises(answers.DemoError, match="line 3"):
        answers.read_questions(tmp_path / "q")
    (tmp_path / "q").write_text('{"question": "What?"}\n')
    assert answers.read_questions(tmp_path / "q") == [{"question": "What?"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": 7.0}, "--keep is 7, expected"),
        ({"keep": 0.0}, "--keep is 0, expected"),
        ({"tokens": 0}, "--tokens is 0"),
        ({"ask": 25}, "--ask is 25 and --facts is 24"),
        ({"questions": Path("q")}, "--questions needs the text"),
        ({"file": Path("nowhere")}, "nowhere is not a file"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    demo: ModuleType, changes: dict[str, object], message: str
) -> None:
    settings = {"file": None, "questions": None, "model": "reader", "tokens": 32768, "facts": 24}
    settings |= {"ask": 20, "keep": 0.05, "seed": 0}
    demo.Demo(**settings).check()
    with pytest.raises(demo.DemoError, match=message):
        demo.Demo(**(settings | changes)).check()


@pytest.mark.slow
def test_a_small_demonstration_answers_and_cleans_up(tmp_path: Path) -> None:
    running = start(tmp_path, *SMALL, "--format", "json")
    out, errors = running.communicate(timeout=2400)
    assert running.returncode == 0, errors
    report = json.loads(out)
    assert len(report["rows"]) == 3
    assert report["summary"]["context_tokens"] == 1500
    assert report["summary"]["correct_sparse"] == report["summary"]["correct_full"] == 3
    for row in report["rows"]:
        # every layer searches, also the flat one: its other keys are approximated
        assert row["sparse"]["fraction_sparse"] == row["sparse"]["fraction_all"]
        assert row["sparse"]["fraction_all"] < row["full"]["fraction_all"] == 1.0
        assert row["sparse"]["milliseconds_per_token"] > 0
    assert list(tmp_path.iterdir()) == []
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.nightly
def test_own_text_and_questions(tmp_path: Path, own: list[str]) -> None:
    running = start(tmp_path, *own, "--format", "json")
    out, errors = running.communicate(timeout=2400)
    assert running.returncode == 0, errors
    (row,) = json.loads(out)["rows"]
    assert (row["depth"], row["full"]["correct"]) == (None, True)
    assert "answers only questions worded as" in errors


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "during"),
    [(signal.SIGTERM, "make-document"), (signal.SIGHUP, "prefill_worker"), (signal.SIGINT, "serve")],
)
def test_an_interrupt_leaves_nothing_running(
    tmp_path: Path, own: list[str], number: signal.Signals, during: str
) -> None:
    running = start(tmp_path, *(SMALL if during == "make-document" else own))
    wait_for_command(running, tmp_path, during)
    running.send_signal(number)
    _, errors = running.communicate(timeout=240)
    assert running.returncode == 130, errors
    assert "interrupted" in errors
    assert processes_naming(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_kill_leaves_nothing_running(tmp_path: Path, own: list[str]) -> None:
    running = start(tmp_path, *own)
    wait_for_command(running, tmp_path, "serve")
    running.kill()
    running.communicate(timeout=240)
    deadline = time.monotonic() + 120
    while processes_naming(str(tmp_path)) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_command(running: subprocess.Popen[str], folder: Path, name: str) -> None:
    """Waits for a command of that name, whose arguments name a path below TMPDIR."""
    deadline = time.monotonic() + 240
    while not any(name in command_line(pid) for pid in processes_naming(str(folder))):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""


# In a process of its own: the demonstration forks, which a process in which gRPC has run does not survive.
MAKE_DOCUMENT = """
import json, sys
from pathlib import Path
from rich.console import Console
from demo_run import Demo
demo = Demo(Path(sys.argv[1]), None, "reader", tokens=4000, facts=4, ask=1, keep=0.05, seed=0)
document, questions = demo.make_document(Path(sys.argv[2]), Console(stderr=True))
print(json.dumps({"document": document.read_text(), "questions": questions}))
"""


@pytest.mark.nightly
def test_a_short_text_is_used_as_it_is_long(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("It was a quiet morning in the village. " * 150)
    paths = os.pathsep.join([str(DEMONSTRATION), *sys.path])
    done = ran(
        [sys.executable, "-c", MAKE_DOCUMENT, str(text), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert "fewer than --tokens 4000: using them all" in done.stderr
    made = json.loads(done.stdout)
    assert 1000 < len(load_tokenizer(resolve_model("reader")).encode(made["document"])) < 4000
    (question,) = made["questions"]
    assert str(question["answer"]) in made["document"]


@pytest.mark.nightly
def test_a_failure_is_one_sentence(tmp_path: Path) -> None:
    running = start(tmp_path, "--model", "no-such-model", *SMALL)
    _, errors = running.communicate(timeout=240)
    assert running.returncode == 1
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("error: ")
    assert list(tmp_path.iterdir()) == []
