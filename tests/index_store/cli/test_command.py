"""The `index-store` command: text, JSON, lists, exit codes, and errors as one sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from index_store.cli import report
from index_store.errors import format_bytes
from index_store.store.catalog import Store
from index_store.store.zarr_io import chunk_path
from tests.index_store.cli.conftest import Command
from tests.support.forking import ran
from tests.support.store import SyntheticContext, flip, synthetic_context


def damage(store: Store, context: SyntheticContext) -> list[Path]:
    """Spoils two files; returns them."""
    folder = store.path / "contexts" / context.id
    flipped = chunk_path(folder, context.manifest.kv, (1, 1))
    flip(flipped, 7, 6)
    missing = chunk_path(folder, context.manifest.indexes[0].arrays[0], (0, 1))
    missing.unlink()
    return [flipped, missing]


def test_verify(command: Command, context: SyntheticContext, expired: SyntheticContext) -> None:
    assert sorted(command.ok("verify").splitlines()) == sorted([f"{context.id}: ok", f"{expired.id}: ok"])
    assert command.ok("verify", "handbook") == f"{context.id}: ok\n"
    assert command.json("verify")["leftovers"] == []
    assert command.json("verify", "handbook") == {
        "ok": True,
        "contexts": [{"id": context.id, "ok": True, "errors": []}],
    }


def test_verify_names_every_bad_file(
    command: Command, context: SyntheticContext, expired: SyntheticContext
) -> None:
    flipped, missing = damage(command.store, context)
    code, out, err = command.run("verify")
    assert (code, err) == (1, "")
    assert f"{context.id}: 2 bad" in out
    assert f"{expired.id}: ok" in out
    assert f"  CHECKSUM_MISMATCH: {flipped}: array 'kv'" in out
    assert f"  CHUNK_MISSING: {missing}: a chunk of array 'index/tables/array_int8'" in out
    code, out, _ = command.run("verify", "handbook", "--format", "json")
    document = json.loads(out)
    assert (code, document["ok"]) == (1, False)
    (result,) = document["contexts"]
    assert [(error["reason"], error["array"], error["path"]) for error in result["errors"]] == [
        ("CHECKSUM_MISMATCH", "kv", str(flipped)),
        ("CHUNK_MISSING", "index/tables/array_int8", str(missing)),
    ]


def test_rm(command: Command, context: SyntheticContext, expired: SyntheticContext) -> None:
    assert "no context 'nothing'" in command.fails("rm", "handbook", "nothing")
    assert len(command.store.list()) == 2
    assert command.ok("rm", "handbook", context.id, "old") == f"removed {context.id}\nremoved {expired.id}\n"
    assert command.store.list() == []
    assert list((command.store.path / "contexts").iterdir()) == []


def test_gc(command: Command, context: SyntheticContext, expired: SyntheticContext) -> None:
    left = command.store.path / "contexts" / f".tmp-{'0' * 64}-00"
    left.mkdir()
    (left / "part").write_text("12345")
    (command.store.path / "locks" / left.name).touch()  # goes with the folder
    out = command.ok("gc", "--dry-run")
    assert f"would remove temporary {left} (5 B)" in out
    assert "would remove 2 items" in out
    assert left.exists()
    document = command.json("gc", "--dry-run")
    assert (document["dry_run"], [item["kind"] for item in document["removed"]]) == (
        True,
        ["temporary", "expired"],
    )
    document = command.json("gc")
    assert [item["kind"] for item in document["removed"]] == ["temporary", "expired"]
    assert document["removed"][0] == {"kind": "temporary", "path": str(left), "bytes": 5}
    assert document["bytes"] == sum(item["bytes"] for item in document["removed"])
    assert command.store.list() == [context.manifest]
    assert command.ok("gc") == "removed 0 items, 0 B\n"


@pytest.mark.parametrize("arguments", [["show", "nothing"], ["rm", "0" * 64], ["verify", "../x"]])
def test_unknown_context(command: Command, arguments: list[str]) -> None:
    assert "no context" in command.fails(*arguments)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_contexts_are_pinned_and_labelled(command: Command, expired: SyntheticContext) -> None:
    """A pinned context does not expire."""
    id_ = expired.id
    said = command.ok("update", "old", "--pin", "--label", "team=law", "--label", "year=2026")
    assert "team=law, year=2026" in said
    code, _, err = command.run("update", "old", "--label", "A b=c")
    assert (code, "'A b'" in err) == (2, True)
    assert command.run("update", "old")[0] == 2
    assert command.json("update", "old", "--label", "year-")["labels"] == {"team": "law"}
    shown = command.json("show", id_)
    assert (shown["pinned"], shown["labels"], shown["state"]) == (True, {"team": "law"}, "READY")
    assert command.json("gc")["removed"] == []
    assert command.json("update", id_, "--unpin", "--name", "older")["display_name"] == "older"
    assert command.json("show", id_)["state"] == "EXPIRED"


def test_ls_in_a_pipe(command: Command, context: SyntheticContext, expired: SyntheticContext) -> None:
    header, *lines = command.ok("ls").splitlines()
    assert header.split() == [
        *("ID", "NAME", "STATE", "METHODS", "TOKENS", "KV", "INDEX", "MODEL", "CREATED", "EXPIRES"),
    ]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows[context.id][:5] == ["handbook", "READY", "csattention", "37", "6.9"]
    assert rows[context.id][-3:] == ["2026-01-02", "03:04:05Z", "never"]
    assert rows[expired.id][:2] == ["old", "EXPIRED"]
    assert "6.9 KiB" in lines[0]


def test_ls_json(command: Command, context: SyntheticContext, expired: SyntheticContext) -> None:
    document = command.json("ls")
    assert document["store"] == str(command.store.path)
    by_id = {entry["name"].removeprefix("contexts/"): entry for entry in document["contexts"]}
    shown = {name: value for name, value in by_id[context.id].items() if value and name != "indexes"}
    assert shown == {
        "name": f"contexts/{context.id}",
        "display_name": "handbook",
        "state": "READY",
        "model": "toy",
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "rows": "dtype",
        "methods": ["csattention"],
        "token_count": 37,
        "dense_layers": [0],
        "kv_bytes": 7104,
        "index_bytes": 9768,
        "create_time": "2026-01-02T03:04:05.678901+00:00",
    }
    assert by_id[expired.id]["state"] == "EXPIRED"
    assert by_id[expired.id]["expire_time"] == "2026-01-02T04:04:05.678901+00:00"


def test_ls_of_a_broken_context(command: Command, context: SyntheticContext) -> None:
    path = command.store.path / "contexts" / context.id / "manifest.json"
    path.write_text("{")
    code, out, err = command.run("ls")
    assert code == 0
    assert f"{context.id}  -     CORRUPT" in out
    assert "the manifest is damaged: it is not JSON" in err
    code, out, _ = command.run("ls", "--format", "json")
    (entry,) = json.loads(out)["contexts"]
    assert (entry["name"], entry["state"]) == (f"contexts/{context.id}", "CORRUPT")
    assert str(path) in entry["state_message"]


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


def test_show(command: Command, context: SyntheticContext) -> None:
    assert command.ok("show", "handbook") == command.ok("show", f"contexts/{context.id}")
    lines = command.ok("show", context.id[:8]).splitlines()
    shown = {line[:18].strip(): line[18:].strip() for line in lines}
    assert shown["id"] == context.id
    assert shown["state"] == "READY"
    assert shown["model"] == "toy (LlamaForCausalLM)"
    assert shown["fingerprint"] == "a" * 64
    assert shown["tokens"] == "37"
    assert shown["kv"] == "6.9 KiB, bfloat16"
    assert shown["index tables"] == (
        "recorded, 264.0 bytes per token, 2 (layers 1, 2), cosine=False, ratio=0.25, split=strided, subspaces=4"
    )
    assert shown["queries"] == "of 3 positions of every layer"
    assert shown["bytes per token"] == "456.0"
    assert shown["methods"] == "csattention"
    assert shown["dense layers"] == "1 (layer 0)"
    assert shown["selection errors"] == "0.2500, 0.0250, 0.0025"
    assert shown["prefill"] == "calibration=False, chunk=2048"
    assert shown["seconds"] == "forward 1.50, index 0.25"
    assert shown["created"] == "2026-01-02 03:04:05Z"
    assert shown["expires"] == "never"


def test_show_json(command: Command, context: SyntheticContext) -> None:
    document = command.json("show", "handbook")
    assert document["dense_layers"] == [0]
    (index,) = document["indexes"]
    assert (index["kind"], index["layers"], index["bytes_per_token"]) == ("recorded", [1, 2], 264)
    stored = (command.store.path / "contexts" / context.id / "manifest.json").read_bytes()
    assert document["manifest"] == json.loads(stored)


COMMAND = """
import os, sys, time
from index_store.cli.entry import end_in_order

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(0)  # the handler runs here, and Python drops what it raises

end_in_order()
Finalized()
print("dropped", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_that_finds_a_finalizer_ends_the_command(number: signal.Signals, code: int) -> None:
    ended = ran([sys.executable, "-c", COMMAND, str(int(number))], timeout=300)
    assert (ended.stdout, ended.returncode) == ("dropped\n", code)
