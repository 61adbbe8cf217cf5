"""All three commands: they begin and end alike, start quickly, and every option refuses what it cannot take."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import Typer

from index_store.cli.options import (
    AtLeast,
    InputFile,
    OneOf,
    OutputFile,
    OutputFolder,
    Spelled,
    flag_of,
    options_of,
)
from tests.support.forking import ran

PACKAGES = {
    "index-store": "index_store",
    "prefill-worker": "prefill_worker",
    "decode-engine": "decode_engine",
}

# What a command needs besides the option that is looked at. {text}, {folder}: a file and a folder that are there.
NEEDED = {
    "prefill-worker run": "--model reader --store {folder}/store --input {text}",
    "prefill-worker corpus": "--model reader --store {folder}/store",
    "prefill-worker serve": "--model reader --store {folder}/store",
    "prefill-worker add-index": "--store {folder} --context c",
    "prefill-worker detach": "--store {folder} --context c",
    "decode-engine serve": "--model reader --store {folder}",
    "decode-engine ask": "--context c --server 127.0.0.1:1",
    "decode-engine token create": "c",
    "decode-engine token list": "",
    "decode-engine token revoke": "c",
    "decode-engine chat": "c",
    "decode-engine status": "",
    "decode-engine tenants": "",
    "decode-engine drain": "",
    "decode-engine methods": "",
    "decode-engine evaluate": "--out {folder}/out",
    "decode-engine make-document": "--out {folder}/d --questions {folder}/q",
    "decode-engine fetch-model": "smollm2",
    "decode-engine tune": "--store {folder} --context c --target-kl 0.1 --model reader",
    "decode-engine contexts ls": "",
    "decode-engine contexts create": "c",
    "decode-engine contexts show": "c",
    "decode-engine contexts warm": "c",
    "decode-engine contexts rm": "c",
    "decode-engine contexts update": "c",
    "decode-engine operations ls": "",
    "decode-engine operations show": "c",
    "decode-engine operations wait": "c",
    "decode-engine operations cancel": "c",
    "decode-engine operations rm": "c",
}
ARGUMENTS = {
    "prefill-worker corpus": ["text.txt"],
    "decode-engine ask": ["Who?"],
}

NO_NUMBERS = ("nan", "inf", "-inf", "1e400", "-1", "1e30", str(10**30), "", "x", "0x1")


@dataclass(frozen=True)
class CommandOption:
    """A field of a command's configuration."""

    command: str
    flag: str
    kinds: frozenset[type]
    marks: tuple[Any, ...]

    def mark(self, kind: type) -> Any:
        """What the field is annotated with of that kind, None without."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)


def _app(package: str) -> Typer:
    module = import_module(f"{package}.cli.command_line")
    app: Typer = module.commands() if package == "decode_engine" else module.app
    return app


def _callbacks(app: Typer, name: str) -> Iterator[tuple[str, Callable[..., None]]]:
    for command in app.registered_commands:
        yield f"{name} {command.name or command.callback.__name__}", command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from _callbacks(group.typer_instance, f"{name} {group.name}")


def _kinds(hint: Any) -> frozenset[type]:
    """The types that a field may be of, those inside of tuples included."""
    parts = [part for part in get_args(hint) if part not in (type(None), Ellipsis)]
    return frozenset().union(*map(_kinds, parts)) if parts else frozenset({hint})


def _configured() -> Iterator[CommandOption]:
    for name, package in PACKAGES.items():
        for command, callback in _callbacks(_app(package), name):
            config = getattr(callback, "config", None)
            if config is None:
                assert package == "index_store", f"{command} is not made from a configuration"
                continue
            for field, hint, marks in options_of(config):
                yield CommandOption(command, flag_of(field, marks), _kinds(hint), marks)


OPTIONS = tuple(_configured())
NUMBERS = [option for option in OPTIONS if option.kinds & {int, float}]


def _id(option: CommandOption) -> str:
    return f"{option.command} {option.flag}"


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[CommandOption, str], None]:
    """Runs an option's command with a value, and looks that it is refused as wrong usage in one sentence."""
    text = tmp_path / "text.txt"
    text.write_text("words")

    def run(option: CommandOption, value: str) -> None:
        name, *words = option.command.split()
        needed = NEEDED[option.command].format(text=text, folder=tmp_path).split()
        given = dict(zip(needed[::2], needed[1::2], strict=False)) if needed[:1] != ["c"] else {}
        given.pop(option.flag, None)
        line = [*words, *(part for pair in given.items() for part in pair), f"{option.flag}={value}"]
        line += ["c"] if needed[:1] == ["c"] else ARGUMENTS.get(option.command, [])
        with pytest.raises(SystemExit) as ended:
            import_module(f"{PACKAGES[name]}.__main__").main(line)
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, ""), f"{value}: {err}"
        assert err.startswith("error: "), err
        assert err.count("\n") == 1, err
        assert re.search(rf"{option.flag}\b", err), f"{value}: {err}"

    return run


def test_all_commands_are_looked_through() -> None:
    assert {option.command for option in OPTIONS} == set(NEEDED)
    assert len(NUMBERS) > 40


@pytest.mark.parametrize("option", NUMBERS, ids=_id)
def test_what_is_no_number_in_range_is_refused(
    option: CommandOption, refuse: Callable[[CommandOption, str], None]
) -> None:
    spelled = option.mark(Spelled)
    for value in NO_NUMBERS:
        if value == "" and spelled is not None and not isinstance(spelled.default, int):
            continue  # an empty list, where a list is written
        mark = option.mark(AtLeast)
        if value == "-1" and isinstance(mark, AtLeast) and mark.least <= -1:
            continue
        refuse(option, value)


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.mark(OneOf)], ids=_id)
def test_other_words_are_refused(option: CommandOption, refuse: Callable[[CommandOption, str], None]) -> None:
    for value in ("nonsense", "", "AUTO", "int4"):
        if not (value == "" and option.mark(Spelled)):
            refuse(option, value)


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.kinds & {Path}], ids=_id)
def test_files_that_do_not_fit_are_refused(
    option: CommandOption, refuse: Callable[[CommandOption, str], None], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    if option.flag != "RUN":
        for value in ("s3://bucket/x", "file:///x"):  # which would be folders named `s3:` and `file:`
            refuse(option, value)
    if option.mark(InputFile):
        for value in (tmp_path / "none", tmp_path / "folder", ""):
            refuse(option, str(value))
    elif option.mark(OutputFile):
        for value in (tmp_path / "none" / "new", tmp_path / "folder", tmp_path / "file" / "new"):
            refuse(option, str(value))
    elif option.mark(OutputFolder):
        for value in (tmp_path / "file", tmp_path / "file" / "new"):
            refuse(option, str(value))
    else:
        assert option.flag in ("--store", "RUN")  # which the store, and what reads results, look at


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.flag in ("--server", "--listen")], ids=_id
)
def test_what_is_no_address_is_refused(
    option: CommandOption, refuse: Callable[[CommandOption, str], None]
) -> None:
    for value in ("", "here", "127.0.0.1:-1", "127.0.0.1:65536", "::1:80", ":80", "host:x", "a b:1"):
        refuse(option, value)


def all_commands() -> Iterator[tuple[str, ...]]:
    """Words of commands and groups of them, such as `decode-engine contexts ls`."""
    for name, package in PACKAGES.items():
        app = _app(package)
        groups = [name, *(f"{name} {group.name}" for group in app.registered_groups)]
        for command in (*groups, *(command for command, _ in _callbacks(app, name))):
            yield tuple(command.split())


@pytest.mark.parametrize("command", tuple(all_commands()), ids=" ".join)
def test_help_is_text_that_wraps(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *words = command
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    with pytest.raises(SystemExit) as ended:
        import_module(f"{PACKAGES[name]}.__main__").main([*words, "-h"])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"Usage: {' '.join(command)} ")
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines[1:] if line.endswith("...")], (
        "a sentence of the list of commands is too long"
    )
    text = lines[2 : lines.index("Arguments:" if "Arguments:" in lines else "Options:")]
    for line, following in itertools.pairwise(text):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 78, "a line breaks in mid-sentence"


def test_help_keeps_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        import_module("decode_engine.__main__").main(["ask", "--help"])
    assert "PRESET[+REMAINDER][@OPTION]" in capsys.readouterr().out


HEAVY = ("torch", "transformers", "numba", "triton", "faiss", "zarr")
QUICK = {
    "index_store": ["--help", "--version", "ls --store .", "gc --store . --dry-run", "show --store . x"],
    "prefill_worker": ["--help", "run --help", "run --model reader --store . --input missing"],
    "decode_engine": [
        "--help",
        *(
            f"{word} --help"
            for word in (
                *("serve", "ask", "chat", "evaluate", "fetch-model", "make-document", "tune", "contexts"),
                "operations",
            )
        ),
        "ask --context c --server 127.0.0.1:1 Who?",
        "status --server 127.0.0.1:1",
        "contexts ls --server 127.0.0.1:1",
        "methods",
        "methods --format json",
        "methods --server 127.0.0.1:1",
        "serve --store missing --model reader",
        "serve --store . --model missing",
        "tune --store . --context x --target-kl 0.1 --model reader",
    ],
}

# Runs command lines in one interpreter and tells which of the modules are there after each.
IMPORTED = """
import contextlib, io, runpy, sys
module, heavy, *lines = sys.argv[1:]
for line in lines:
    sys.argv = [module, *line.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit:
            pass
    print(line, [name for name in heavy.split(",") if name in sys.modules], sep=": ")
"""


@pytest.mark.parametrize("module", QUICK)
def test_what_needs_no_model_imports_no_library_for_models(module: str, tmp_path: Path) -> None:
    (tmp_path / "contexts").mkdir()
    done = python("-c", IMPORTED, module, ",".join(HEAVY), *QUICK[module], cwd=tmp_path)
    assert done.stdout.splitlines() == [f"{line}: []" for line in QUICK[module]], done.stderr


COMMANDS = {"index_store": "ls --store .", "prefill_worker": "--help", "decode_engine": "methods"}

# Sends the process the signal as soon as the first of these modules is looked for.
INTERRUPTED_AT = """
import os, runpy, sys
module, awaited, number, *sys.argv[1:] = sys.argv[1:]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == awaited:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Finder())
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def python(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run([sys.executable, *arguments], text=True, check=False, **pipes)


SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


@pytest.mark.parametrize(
    ("module", "number"),
    [*((module, signal.SIGTERM) for module in COMMANDS), *(("index_store", number) for number in SIGNALS)],
)
def test_a_signal_while_modules_are_imported(module: str, number: signal.Signals) -> None:
    done = python("-c", INTERRUPTED_AT, module, "typer", str(int(number)), *COMMANDS[module].split())
    assert (done.returncode, done.stdout, done.stderr) == (SIGNALS[number], "", "")


CLOSED = (
    "import os, sys; [os.close(int(n)) for n in sys.argv[1].split(',')]; os.execv(sys.argv[2], sys.argv[2:])"
)


@pytest.mark.parametrize(
    ("module", "closed"),
    [*((module, (0, 1, 2)) for module in COMMANDS), *(("index_store", (number,)) for number in range(3))],
)
def test_closed_standard_streams(module: str, closed: tuple[int, ...]) -> None:
    done = python("-c", CLOSED, ",".join(map(str, closed)), sys.executable, "-m", module, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    name = module.replace("_", "-")
    assert (1 in closed) if not done.stdout else done.stdout.startswith(f"{name} 0.1.0 (Python 3.")


@pytest.mark.parametrize("module", COMMANDS)
def test_an_output_that_cannot_be_written(module: str, tmp_path: Path) -> None:
    (tmp_path / "contexts").mkdir()
    with open("/dev/full", "w") as full:
        done = python("-m", module, *COMMANDS[module].split(), stdout=full, cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: standard output")


ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "index-store": "index_store.__main__:main",
    "prefill-worker": "prefill_worker.__main__:main",
    "decode-engine": "decode_engine.__main__:main",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel; building happens in a copy, because setuptools leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("index_store", "prefill_worker", "decode_engine", "protos"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    ]
    built = ran([*command, str(source)])
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    target = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run(unpacked: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs python in an empty folder with the unpacked wheel as the only addition to its path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    elsewhere = unpacked.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    return ran([sys.executable, *arguments], cwd=elsewhere, env=environment | {"PYTHONPATH": str(unpacked)})


@pytest.mark.nightly
def test_every_module_and_data_file_is_in_the_wheel(unpacked: Path) -> None:
    for package, base in (("index_store", ROOT), ("prefill_worker", ROOT), ("decode_engine", ROOT)):
        expected = {path.relative_to(base) for path in (base / package).rglob("*.py")}
        assert {path for path in expected if not (unpacked / path).is_file()} == set()
    stubs = {path.name for path in (ROOT / "protos" / "sparsekv" / "v1").iterdir() if path.is_file()}
    assert {path.name for path in (unpacked / "sparsekv" / "v1").iterdir()} == stubs
    for folder in ("index_store/models/reader", "decode_engine/evaluation/data"):
        assert {path.name for path in (unpacked / folder).iterdir()} == {
            path.name for path in (ROOT / folder).iterdir() if path.is_file()
        }


@pytest.mark.nightly
def test_metadata(unpacked: Path) -> None:
    (info,) = unpacked.glob("sparsekv-*.dist-info")
    entry_points = (info / "entry_points.txt").read_text()
    for command, target in SCRIPTS.items():
        assert f"{command} = {target}" in entry_points
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    assert "License-Expression: Apache-2.0" in (info / "METADATA").read_text()


@pytest.mark.nightly
def test_imports_come_from_the_wheel(unpacked: Path) -> None:
    names = (
        "index_store, prefill_worker, decode_engine, sparsekv.v1.generation_pb2, sparsekv.v1.context_pb2_grpc"
    )
    code = f"import {names}, sys; print([sys.modules[n.strip()].__file__ for n in {names!r}.split(',')])"
    done = run(unpacked, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(unpacked)) == len(names.split(","))


@pytest.mark.nightly
def test_the_packaged_reader_prefills_and_the_store_lists_it(unpacked: Path, tmp_path: Path) -> None:
    document, questions, store = tmp_path / "document.txt", tmp_path / "questions.jsonl", tmp_path / "store"
    made = run(
        *(unpacked, "-m", "decode_engine", "make-document", "--tokens", "600", "--facts", "2"),
        *("--out", str(document), "--questions", str(questions)),
    )
    assert made.returncode == 0, made.stderr
    prefilled = run(
        *(unpacked, "-m", "prefill_worker", "run", "--model", "reader", "--format", "json"),
        *("--input", str(document), "--store", str(store)),
    )
    assert prefilled.returncode == 0, prefilled.stderr
    report = json.loads(prefilled.stdout)
    assert report["tokens"] == 600
    listed = run(unpacked, "-m", "index_store", "ls", "--store", str(store), "--format", "json")
    assert listed.returncode == 0, listed.stderr
    assert report["id"] in listed.stdout
