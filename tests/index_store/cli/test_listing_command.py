"""`index-store ls` and `show`: text, JSON, terminals of any width."""

from __future__ import annotations

import json
import os
import re

import pytest
from rich.cells import cell_len

from index_store.cli import report
from index_store.store.catalog import Store
from tests.index_store.cli.conftest import Command
from tests.support.store import THRESHOLDS, SyntheticContext, synthetic_context


def test_ls_in_a_pipe(command: Command, context: SyntheticContext, expired: SyntheticContext) -> None:
    header, *lines = command.ok("ls").splitlines()
    assert header.split() == [
        "ID",
        "NAME",
        "STATE",
        "METHODS",
        "TOKENS",
        "KV",
        "INDEX",
        "MODEL",
        "CREATED",
        "EXPIRES",
    ]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows[context.id][:5] == ["handbook", "READY", "csattention", "37", "6.9"]
    assert rows[context.id][-3:] == ["2026-01-02", "03:04:05Z", "never"]
    assert rows[expired.id][:2] == ["old", "EXPIRED"]
    assert "6.9 KiB" in lines[0]


def test_ls_json(command: Command, context: SyntheticContext, expired: SyntheticContext) -> None:
    document = command.json("ls")
    assert document["store"] == str(command.store.path)
    by_id = {entry["id"]: entry for entry in document["contexts"]}
    assert by_id[context.id] == {
        "id": context.id,
        "name": "handbook",
        "state": "READY",
        "model": "toy",
        "dtype": "bfloat16",
        "rows": "dtype",
        "methods": ["csattention"],
        "tokens": 37,
        "parent": None,
        "parent_tokens": 0,
        "kv_bytes": 7104,
        "index_bytes": 9768,
        "bytes_per_token": 456.0,
        "created_at": "2026-01-02T03:04:05.678901+00:00",
        "expires_at": None,
        "pinned": False,
        "labels": {},
        "messages": False,
    }
    assert by_id[expired.id]["state"] == "EXPIRED"
    assert by_id[expired.id]["expires_at"] == "2026-01-02T04:04:05.678901+00:00"


def test_ls_of_a_broken_context(command: Command, context: SyntheticContext) -> None:
    path = command.store.path / "contexts" / context.id / "manifest.json"
    path.write_text("{")
    code, out, err = command.run("ls")
    assert code == 0
    assert f"{context.id}  -     CORRUPT" in out
    assert "the manifest is damaged: it is not JSON" in err
    code, out, _ = command.run("ls", "--format", "json")
    (entry,) = json.loads(out)["contexts"]
    assert (entry["id"], entry["state"]) == (context.id, "CORRUPT")
    assert entry["error"]["reason"] == "MANIFEST_INVALID"
    assert entry["error"]["path"] == str(path)


def test_ls_of_nothing(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no contexts" in Command(store, capsys).ok("ls")
    assert Command(store, capsys).json("ls")["contexts"] == []


def test_ls_on_a_terminal(
    command: Command, monkeypatch: pytest.MonkeyPatch, context: SyntheticContext
) -> None:
    synthetic_context(seed=3, name="[bold]x[/bold]").write(command.store)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    out = command.ok("ls")
    assert f"{context.id[:12]}  handbook" in out
    assert context.id not in out
    assert "[bold]x[/bold]" in out
    assert "\x1b[1m" in out


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_ls_fits_a_terminal(
    command: Command, monkeypatch: pytest.MonkeyPatch, context: SyntheticContext, width: int
) -> None:
    other = synthetic_context(seed=3, name="a handbook of 灯 and of lighthouses")
    other.write(command.store)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    header, *lines = re.sub(r"\x1b\[[0-9]*m", "", command.ok("ls")).splitlines()
    assert all(cell_len(line.rstrip()) <= width for line in (header, *lines))
    shown = header.split()
    assert shown[:2] == ["ID", "NAME"]
    rows, hint = lines[:2], " ".join(lines[2:])
    assert {row[:12] for row in rows} == {id_[:12] for id_ in (context.id, other.id)}
    left_out = [column for column in report.COLUMNS if column not in (*shown, "MEMORY")]
    assert ("CREATED" in left_out) == (hint != "")
    assert all(column in hint for column in left_out)


def test_columns_of_wide_letters_are_aligned_in_a_pipe(command: Command) -> None:
    synthetic_context(seed=3, name="灯台の本").write(command.store)
    _, *lines = command.ok("ls").splitlines()
    places = {cell_len(line[: line.index("READY")]) for line in lines}
    assert len(places) == 1


def test_leftovers_are_told(command: Command, context: SyntheticContext) -> None:
    contexts = command.store.path / "contexts"
    for name, size in ((f".tmp-{'0' * 64}-00", 2048), (f".trash-{'1' * 64}-00", 1024)):
        (contexts / name).mkdir()
        (contexts / name / "part").write_bytes(b"x" * size)
        for path in (contexts / name / "part", contexts / name):
            os.utime(path, (0, 0))
    for words in (("ls",), ("verify",)):
        code, out, err = command.run(*words)
        assert code == 0
        assert context.id in out
        assert err == (
            "Killed jobs or deletions left 2 folders of 3.0 KiB, the oldest of 1970-01-01 00:00:00Z; "
            "`index-store gc` removes them.\n"
        )
        told = command.json_beside_notes(*words)["leftovers"]
        assert [(item["kind"], item["bytes"]) for item in told] == [("temporary", 2048), ("trash", 1024)]
        assert told[0]["path"] == str(contexts / f".tmp-{'0' * 64}-00")
        assert told[0]["changed_at"] == "1970-01-01T00:00:00+00:00"
    assert "leftovers" not in command.json_beside_notes("verify", "handbook")
    command.ok("gc")
    assert command.json("ls")["leftovers"] == []
    assert context.id in command.ok("ls")


@pytest.mark.parametrize(
    ("layers", "of", "text"),
    [
        ((), 4, "none of 4"),
        ((0,), 4, "1 of 4 (layer 0)"),
        ((0, 3), 4, "2 of 4 (layers 0, 3)"),
        ((1,), None, "1 (layer 1)"),
    ],
)
def test_layers_are_told_from_their_number(layers: tuple[int, ...], of: int | None, text: str) -> None:
    assert report.layers_text(layers, of) == text


@pytest.mark.parametrize("ref", ["handbook", "prefix", "resource"])
def test_show(command: Command, context: SyntheticContext, ref: str) -> None:
    refs = {"prefix": context.id[:8], "resource": f"contexts/{context.id}"}
    lines = command.ok("show", refs.get(ref, ref)).splitlines()
    shown = {line[:18].strip(): line[18:].strip() for line in lines}
    assert shown["id"] == context.id
    assert shown["state"] == "READY"
    assert shown["model"] == "toy (LlamaForCausalLM, aaaaaaaaaaaa)"
    assert shown["layers"] == "2 of 3 (layers 1, 2)"  # of the index, below the model's
    assert shown["tokens"] == "37"
    assert shown["kv"] == "6.9 KiB (7104 bytes, 192.0 per token), bfloat16"
    assert shown["index tables"] == "9.5 KiB (9768 bytes, 264.0 per token), recorded"
    assert shown["parameters"] == "cosine=False, ratio=0.25, split=strided, subspaces=4"
    assert shown["thresholds"] == "0.000196 to 0.00909, keep 0.5 to 0.001"
    assert shown["queries"] == "1.1 KiB, 3 positions of every layer"
    assert shown["array_float16"] == "[2, 2, 5, 37] float16"
    assert shown["total"].endswith("(16872 bytes, 456.0 per token)")
    assert shown["methods"] == "csattention"
    assert shown["dense layers"] == "1 of 3 (layer 0)"
    assert shown["selection errors"] == "0.2500, 0.0250, 0.0025"
    assert shown["prefill"] == "calibration=False, chunk=2048"
    assert shown["seconds"] == "forward 1.50, index 0.25"
    assert shown["created"] == "2026-01-02 03:04:05Z"
    assert shown["expires"] == "never"


def test_show_json(command: Command, context: SyntheticContext) -> None:
    document = command.json("show", "handbook")
    assert document["model"]["fingerprint"] == "a" * 64
    assert document["dense_layers"] == [0]
    assert document["selection_errors"] == [0.25, 0.025, 0.0025]
    assert document["prefill"] == {"chunk": 2048, "calibration": False}
    assert document["seconds"] == {"forward": 1.5, "index": 0.25}
    (index,) = document["indexes"]
    assert (index["kind"], index["layers"], index["bytes"]) == ("recorded", [1, 2], 9768)
    assert index["parameters"] == {"subspaces": 4, "split": "strided", "cosine": False, "ratio": 0.25}
    assert index["thresholds"] == list(THRESHOLDS)
    assert document["query_positions"] == [36, 37, 38]
    assert index["arrays"][0] == {
        "path": "index/tables/array_int8",
        "shape": [2, 2, 4, 37],
        "dtype": "int8",
        "bytes": 592,
    }
