"""Contexts that continue others, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from decode_engine.rpc.server import DecodeServer
from tests.decode_engine.cli.conftest import Run


def test_a_context_is_continued_shown_and_removed(
    run: Run, server: DecodeServer, lamp: str, tmp_path: Path
) -> None:
    place = ("--server", server.address)
    text = tmp_path / "more.txt"
    text.write_text("Every winter the harbour froze. ")
    made = run("contexts", "extend", lamp, str(text), "--name", "winter", "--ttl", "1h", *place)
    assert made.returncode == 0, made.stderr
    assert "32 of them new" in made.stdout
    shown = json.loads(run("contexts", "show", "winter", "--format", "json", *place).stdout)
    assert (shown["parent"], shown["children"]) == (lamp, 0)
    assert shown["expire_time"] is not None
    lines = [line.split() for line in run("contexts", "show", "winter", *place).stdout.splitlines()]
    assert ["continues", f"{lamp.removeprefix('contexts/')},"] in [line[:2] for line in lines]
    other = tmp_path / "spring.txt"
    other.write_text("Every spring it thawed. ")
    assert run("contexts", "extend", lamp, str(other), *place).returncode == 0
    assert run("contexts", "show", "lamp", *place).returncode == 0
    assert run("contexts", "rm", "spring", *place).returncode == 0
    refused = run("contexts", "rm", lamp, *place)
    assert (refused.returncode, "--recursive" in refused.stderr) == (1, True)
    assert run("contexts", "rm", "winter", *place).returncode == 0


def test_a_text_that_cannot_be_read_is_told(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "more.txt"
    text.write_bytes(b"\xff\xfe")
    result = run("contexts", "extend", "lamp", str(text))
    assert (result.returncode, "is not UTF-8 text" in result.stderr) == (2, True)
