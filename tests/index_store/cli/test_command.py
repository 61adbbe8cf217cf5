"""The `index-store` command: text, JSON, exit codes, and errors as one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from index_store.__main__ import main
from index_store.errors import format_bytes
from index_store.store.catalog import Store
from index_store.store.zarr_io import chunk_path
from tests.index_store.cli.conftest import Command
from tests.support.store import SyntheticContext


def damage(store: Store, context: SyntheticContext) -> list[Path]:
    """Spoils two files; returns them."""
    folder = store.path / "contexts" / context.id
    flipped = chunk_path(folder, context.manifest.kv, (1, 1))
    data = bytearray(flipped.read_bytes())
    data[7] ^= 64
    flipped.write_bytes(data)
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


def test_verify_names_chunks_that_were_exchanged(command: Command, context: SyntheticContext) -> None:
    folder = command.store.path / "contexts" / context.id
    first, second = (chunk_path(folder, context.manifest.kv, (layer, 0)) for layer in (0, 2))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    code, out, err = command.run("verify")
    assert (code, err) == (1, "")
    assert f"{context.id}: 2 bad" in out
    for path in (first, second):
        assert f"  CHECKSUM_MISMATCH: {path}: this chunk of array 'kv' is intact but not the one" in out
    code, out, _ = command.run("verify", "handbook", "--format", "json")
    (result,) = json.loads(out)["contexts"]
    assert (code, result["ok"]) == (1, False)
    assert [(error["reason"], error["array"], error["path"]) for error in result["errors"]] == [
        ("CHECKSUM_MISMATCH", "kv", str(first)),
        ("CHECKSUM_MISMATCH", "kv", str(second)),
    ]
    assert result["errors"][0]["found"] == result["errors"][1]["expected"] == other[-4:][::-1].hex()


def test_the_help_of_verify_says_what_is_told(command: Command) -> None:
    told = " ".join(command.run("verify", "--help")[1].split())
    assert "A file in the folder of a context that is not part of it is one, too." in told


def test_verify_of_a_broken_manifest(command: Command, context: SyntheticContext) -> None:
    (command.store.path / "contexts" / context.id / "manifest.json").unlink()
    code, out, _ = command.run("verify")
    assert code == 1
    assert "MANIFEST_INVALID" in out


def test_rm(command: Command, context: SyntheticContext, expired: SyntheticContext) -> None:
    assert "no context 'nothing'" in command.fails("rm", "handbook", "nothing")
    assert len(command.store.list()) == 2
    assert command.ok("rm", "handbook", context.id, "old") == f"removed {context.id}\nremoved {expired.id}\n"
    assert command.store.list() == []
    assert list((command.store.path / "contexts").iterdir()) == []


def test_rm_json(command: Command, context: SyntheticContext) -> None:
    assert command.json("rm", context.id[:6]) == {"removed": [context.id]}


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


def test_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ls", "--store", str(tmp_path / "missing")])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'missing'}: no store here")


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["rm", "--store", "x"], ["ls", "--store", "x", "--format", "xml"], ["frobnicate"], []],
)
def test_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARSEKV_STORE", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "Traceback" not in "".join(capsys.readouterr())


def test_as_a_process(stored: Store, context: SyntheticContext) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "index_store", "verify", "--format", "json"],
        env=os.environ | {"SPARSEKV_STORE": str(stored.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout)["contexts"][0]["id"] == context.id
    assert run.stderr == ""


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
    assert command.ok("pin", "old") == f"pinned {id_}\n"
    assert command.ok("label", "old", "team=law", "year=2026") == f"{id_}: team=law, year=2026\n"
    code, _, err = command.run("label", "old", "A b=c")
    assert (code, "'A b'" in err) == (2, True)
    assert command.json("label", "old", "year-") == {"id": id_, "labels": {"team": "law"}}
    shown = command.json("show", id_)
    assert (shown["pinned"], shown["labels"], shown["state"]) == (True, {"team": "law"}, "READY")
    assert command.json("gc")["removed"] == []
    assert command.json("unpin", id_) == {"unpinned": [id_]}
    assert command.json("show", id_)["state"] == "EXPIRED"
