"""The command line: what its options take, what it prints where, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from index_store.cli.options import parse_ttl
from index_store.errors import InvalidArgumentError, MemoryBudgetError, StoreError
from index_store.methods.default import DEFAULT_METHOD
from index_store.store.catalog import Store
from prefill_worker.__main__ import main
from prefill_worker.cli.command_line import app
from prefill_worker.config import PrefillConfig, WorkerConfig, parse_dense_layers
from prefill_worker.worker.queue_worker import QueueWorker
from tests.prefill_worker.conftest import DOCUMENT

PHASES = [
    *("find model", "hash weights", "tokenize", "load", "prefill", "layers", "index", "thresholds", "write"),
    *("sync", "publish"),
]


def arguments(model: Path, document: Path, store: Path, *more: str) -> list[str]:
    common = ["--model", str(model), "--store", str(store), "--dense-layers", "none"]
    return ["run", *common, "--input", str(document), *more]


def test_json_is_one_object(tiny_model: Path, document: Path, tmp_path: Path) -> None:
    command = arguments(
        tiny_model, document, tmp_path / "store", "--format", "json", "--name", "night", "--ttl", "7d"
    )
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    manifest = Store(tmp_path / "store").manifest(report["id"])
    assert report["created"] is True
    assert report["name"] == "night"
    assert report["tokens"] == len(DOCUMENT)
    assert report["kv_bytes"] == manifest.kv_bytes
    assert report["index_bytes"] == {index.name: index.nbytes for index in manifest.indexes}
    assert set(report["index_bytes"]) == {"coarse_rows"}
    assert report["index_bytes_per_token"]["coarse_rows"] == round(
        report["index_bytes"]["coarse_rows"] / len(DOCUMENT), 1
    )
    assert report["bytes_per_token"] == round(manifest.bytes_per_token(), 1)
    assert report["dense_layers"] == list(manifest.dense_layers)
    assert report["expires_at"] is not None
    assert sorted(report["seconds"]) == sorted(PHASES)
    assert done.stderr.splitlines() == [
        f"context {manifest.id[:12]}: {len(DOCUMENT)} tokens, model tiny",
        "dense layers: none of 2",
    ]
    assert report["changed"] == {}
    assert report["memory"] == {"keys_and_values": "device", "device_limit": None, "device_peak": None}

    again = CliRunner().invoke(app, [*command[:-1], "9d"])
    assert list(json.loads(again.stdout)["changed"]) == ["ttl"]
    assert json.loads(again.stdout)["created"] is False
    assert json.loads(again.stdout)["id"] == report["id"]


def test_text_names_everything(tiny_model: Path, document: Path, tmp_path: Path) -> None:
    command = arguments(tiny_model, document, tmp_path / "store")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    manifest = Store(tmp_path / "store").list()[0]
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    printed = {label.strip(): value.strip() for label, value in rows.items()}
    assert printed["context"] == manifest.id
    assert printed["tokens"] == f"{len(DOCUMENT):,}"
    assert printed["keys and values"] == f"{manifest.kv_bytes:,} bytes, bfloat16"
    copy = manifest.index("coarse_rows")
    assert printed["index coarse_rows"] == (
        f"{copy.nbytes:,} bytes, {copy.nbytes / len(DOCUMENT):,.1f} per token, 2 of 2 layers"
    )
    assert printed["expires"] == "never"
    assert all(f"seconds, {phase}" in printed for phase in PHASES)

    again = CliRunner().invoke(app, command)
    assert again.stdout.startswith("The store has this context already, made at ")
    assert again.stdout.splitlines()[0].endswith("UTC. Nothing was done.")
    assert manifest.id in again.stdout

    renamed = CliRunner().invoke(app, [*command, "--name", "night", "--method", "quest"])
    first = renamed.stdout.splitlines()[0]
    assert (
        "Changed: indexes: added pages; methods: now refined, quest; name: 'document' is now 'night'."
        in first
    )


def test_several_files_after_one_flag_and_standard_input(
    tiny_model: Path, document: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second.txt"
    second.write_text("More.")
    command = [*arguments(tiny_model, document, tmp_path / "store", str(second), "-"), "--format", "json"]
    done = CliRunner().invoke(app, command, input="And more.")
    assert json.loads(done.stdout)["tokens"] == len(f"{DOCUMENT}\nMore.\nAnd more.")


def test_too_little_device_memory_is_refused_with_what_would_do(
    tiny_model: Path, document: Path, tmp_path: Path
) -> None:
    command = arguments(
        tiny_model, document, tmp_path / "store", "--device-memory", "1KB", "--format", "json"
    )
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, MemoryBudgetError)
    assert "--device-memory is 1000 bytes" in refused.exception.message


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs the whole command in this process and returns its exit code."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*given: str) -> int:
        monkeypatch.setattr(sys, "argv", ["prefill-worker", *given])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0)

    yield run
    signal.signal(signal.SIGTERM, before)


def test_an_error_of_the_system_is_one_sentence_too(
    run_main: Callable[..., int], tmp_path: Path, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / ("m" * 300)
    assert run_main(*arguments(model, document, tmp_path / "store")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {model}: File name too long\n"


def test_a_worker_refuses_a_store_that_is_not_there_or_not_to_be_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(store=tmp_path / "stroe", model=str(tiny_model), device="cpu")
    with pytest.raises(StoreError, match="no store here"):
        QueueWorker(config)
    assert not config.store.exists()
    Store(config.store, create=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may do everything
    with pytest.raises(StoreError, match="nothing may be written here, but contexts are to be made"):
        QueueWorker(config)


def config(**changes: Any) -> PrefillConfig:
    return PrefillConfig(**{"model": "reader", "store": Path("store"), "input": (Path("-"),), **changes})


@pytest.mark.parametrize(
    ("text", "ttl"),
    [
        (None, None),
        ("90s", timedelta(seconds=90)),
        ("30m", timedelta(minutes=30)),
        ("12h", timedelta(hours=12)),
        ("7d", timedelta(days=7)),
        ("1.5h", timedelta(minutes=90)),
        ("0.5m", timedelta(seconds=30)),
        ("36500d", timedelta(days=36_500)),
        (f"{36_500 * 86_400}s", timedelta(days=36_500)),
    ],
)
def test_times_to_live(text: str | None, ttl: timedelta | None) -> None:
    assert parse_ttl(text) == ttl


UNREADABLE = ("", "7", "d", "7 d", "-1d", "1.h", ".5h", "1e3s", "nan", "infd", "7w", "７d")
OUT_OF_RANGE = ("0", "0m", "0.5s", "36501d", "99999999999d", "9" * 5000 + "s")


@pytest.mark.parametrize("text", [*UNREADABLE, *OUT_OF_RANGE])
def test_other_times_to_live_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--ttl is") as refused:
        parse_ttl(text)
    told_apart = "out of range: expected 1s to 36500d" in refused.value.message
    assert told_apart == (text in OUT_OF_RANGE)


@pytest.mark.parametrize(("text", "layers"), [("auto", None), ("none", ()), ("0", (0,)), ("3, 1,1", (1, 3))])
def test_dense_layers(text: str, layers: tuple[int, ...] | None) -> None:
    assert parse_dense_layers(text) == layers


@pytest.mark.parametrize("text", ["", "all", "-1", "1,,2", "1.5", "0;1"])
def test_other_dense_layers_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--dense-layers is"):
        parse_dense_layers(text)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"query_sample": 10}, "--query-sample"),
        ({"input": ()}, "no input"),
        ({"method": ("full", "full")}, "--method"),
        ({"method": ("full", "full"), "index": ("pages",)}, "--method"),
        ({"name": "two\nlines"}, "--name"),
        ({"name": ""}, "--name"),
        ({"ttl": "soon"}, "--ttl"),
        ({"dense_layers": "some"}, "--dense-layers"),
    ],
)
def test_bad_flags_are_named(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(InvalidArgumentError, match=flag):
        config(**changes)


def test_the_default_method_is_built_unless_something_is_named() -> None:
    assert config().methods == (DEFAULT_METHOD,)
    assert config(method=("quest",)).methods == ("quest",)
    assert config(index=("pages",)).methods == ()
    assert config(method=("quest",), index=("pages",)).methods == ("quest",)
