"""The page in Chromium: contexts made and deleted, chat, the map of where it looked.

Needs `chromium`, `node`, and `NODE_PATH` with playwright-core and axe-core (`npm install playwright-core axe-core`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode_engine.rpc.door.access import TokenFile
from tests.support.serving.service import wait_until

CHROMIUM, NODE, MODULES = shutil.which("chromium"), shutil.which("node"), os.environ.get("NODE_PATH", "")
QUESTION, CODE = "What is the access code of the overhead dairy?", "1398192"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and NODE and Path(MODULES, "playwright-core").is_dir()),
        reason="needs chromium, node, and NODE_PATH with playwright-core and axe-core",
    ),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What somebody sees who walks through the page of a server with the packaged reader."""
    folder = tmp_path_factory.mktemp("page")
    text, tokens = folder / "notes.txt", folder / "tokens"
    command = [sys.executable, "-m", "decode_engine"]
    asked = ["--tokens", "8192", "--facts", "12", "--seed", "4", "--questions", str(folder / "questions")]
    subprocess.run([*command, "make-document", *asked, "--out", str(text)], check=True, timeout=120)
    secret = TokenFile(tokens).create("somebody")
    served = ["--store", str(folder / "store"), "--model", "reader", "--prefill", "--tokens", str(tokens)]
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(
            [*command, "serve", *served, "--listen", "127.0.0.1:0", "--http-port", "0"],
            stdout=log,
            stderr=log,
        ) as server,
    ):
        try:
            wait_until(lambda: "Serving" in (folder / "log").read_text(), 300)
            url = next(
                word for word in (folder / "log").read_text().split() if word.startswith("http://127.0.0.1:")
            )
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 200, 300)
            given = {
                "url": f"{url}/",
                "token": secret,
                "chromium": CHROMIUM,
                "modules": MODULES,
                "file": str(text),
                "question": QUESTION,
                "tokens": 24,
                "axe": Path(MODULES, "axe-core").is_dir(),
            }
            (folder / "given.json").write_text(json.dumps(given))
            script = Path(__file__).with_name("walk.mjs")
            walk = [str(NODE), str(script), str(folder / "given.json")]
            ran = subprocess.run(walk, capture_output=True, text=True, timeout=900, check=False)
            assert not ran.returncode, ran.stderr
            yield json.loads(ran.stdout)
        finally:
            server.terminate()


def test_nothing_is_asked_elsewhere_and_the_console_is_empty(seen: dict[str, Any]) -> None:
    assert seen["outside"] == seen["console"] == []


def test_a_wrong_token_and_a_server_that_is_gone_are_told(seen: dict[str, Any]) -> None:
    assert "a valid token is needed" in seen["wrong_token"]
    assert "does not answer" in seen["gone"]


def test_a_context_is_made_with_progress_and_deleted_when_that_is_meant(seen: dict[str, Any]) -> None:
    assert seen["progress"]
    assert seen["kept"] == 1
    assert seen["asked"].startswith("Delete uploaded?")


def test_the_answer_is_right_and_a_planted_fact_lights_up(seen: dict[str, Any]) -> None:
    assert CODE in seen["answer"]
    assert "of the keys by refined" in seen["why"]
    assert "access code of the ove" in seen["places"][0]  # 32 tokens of 8,192
    digits = [places for word, places in seen["words"] if word.strip('"').isdigit()]
    assert len(digits) >= len(CODE)
    assert all("access code of the ove" in places[0] for places in digits)
    assert seen["stopped"].startswith("Stopped after")


def test_it_is_for_everybody_and_for_every_width(seen: dict[str, Any]) -> None:
    assert seen["page-dark"]
    assert seen["page-phone"]
    assert seen["page-wide"]
    assert [each for each in seen["axe"] if each[0] in ("serious", "critical")] == []
