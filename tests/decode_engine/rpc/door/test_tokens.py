"""The file of tokens: made, listed, revoked, damaged, open to others; and the commands."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from decode_engine.__main__ import main
from decode_engine.rpc.door.access import TokenFile, TokenFileError, digest_of
from index_store.errors import InvalidArgumentError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_a_token_is_kept_as_a_hash_in_a_private_file(path: Path) -> None:
    secret = TokenFile(path).create("alice")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    (token,) = TokenFile(path).read()
    assert (token.name, token.digest) == ("alice", digest_of(secret))
    assert list(path.parent.iterdir()) == [path]


def test_tokens_differ_and_are_revoked_by_name(path: Path) -> None:
    file = TokenFile(path)
    secrets = {file.create(name) for name in ("a", "b", "c")}
    assert len(secrets) == 3
    file.revoke("b")
    assert [token.name for token in file.read()] == ["a", "c"]
    with pytest.raises(InvalidArgumentError, match="no token named 'b'"):
        file.revoke("b")
    with pytest.raises(InvalidArgumentError, match="named 'a' already"):
        file.create("a")


def test_writers_at_once_lose_no_token(path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(TokenFile(path).create, [f"user-{number}" for number in range(12)]))
    assert {token.name for token in TokenFile(path).read()} == {f"user-{number}" for number in range(12)}


@pytest.mark.parametrize("name", ["", "-a", "a b", "ä", "a" * 65, "a\n"])
def test_names(path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the name is"):
        TokenFile(path).create(name)
    assert not path.exists()


def test_a_file_that_cannot_be_used_is_refused_by_name(path: Path) -> None:
    file = TokenFile(path)
    with pytest.raises(
        TokenFileError, match=r"there is no file of tokens; make one with `decode-engine token"
    ):
        file.read()
    file.create("alice")
    intact = path.read_bytes()
    path.write_bytes(intact.replace(b"alice", b"mallo"))
    with pytest.raises(TokenFileError, match="its contents have crc32c"):
        file.read()
    with pytest.raises(
        TokenFileError, match=r"its contents have crc32c.*delete the file and make new tokens"
    ):
        file.create("bob")  # which would throw away what may be mended
    path.write_bytes(intact)
    path.chmod(0o620)
    with pytest.raises(TokenFileError, match="can be written by others"):
        file.read()


def test_the_commands(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["token", *arguments, "--tokens", str(path)])
        captured = capsys.readouterr()
        assert (ended.value.code, captured.err) == (0, "")
        return captured.out

    secret = run("create", "alice").strip()
    assert digest_of(secret) == TokenFile(path).read()[0].digest
    assert json.loads(run("create", "bob", "--format", "json"))["name"] == "bob"
    assert [token["name"] for token in json.loads(run("list", "--format", "json"))["tokens"]] == [
        "alice",
        "bob",
    ]
    assert "alice" in run("list")
    assert run("revoke", "alice") == "revoked alice\n"
    run("revoke", "bob")
    assert "nobody is let in" in run("list")
