"""Children over the network: sessions that are kept, contexts that continue others, and who needs whom."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from decode_engine.errors import PromptTooLongError
from decode_engine.gateway.serving import Gateway
from decode_engine.rpc.client import Client, GenerateOptions, Keep, Summary
from decode_engine.rpc.server import DecodeServer
from index_store.errors import (
    ContextCorruptError,
    StoreFullError,
)
from tests.decode_engine.conftest import TEXT, Library, make_library
from tests.support.models import END_TOKEN
from tests.support.serving.front import grpc_of
from tests.support.serving.service import answered, leases, loaded, wait_until
from tests.support.store import raising

MORE = "Every winter the harbour froze, and the keeper walked over the ice to the ships. "
METHODS = ("csattention", "quest", "multipole")


class Shelf:
    """A store of its own, and one context of all methods."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.root = "contexts/" + library.prefill("root", method=METHODS)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(make_library(tmp_path_factory.mktemp("children")))


@pytest.fixture(scope="module")
def running(shelf: Shelf) -> Iterator[DecodeServer]:
    with loaded(shelf.library.config()) as server:
        yield server


@pytest.fixture
def client(running: DecodeServer, pytestconfig: pytest.Config) -> Iterator[Client]:
    with grpc_of(running, pytestconfig) as address, Client(address) as connected:
        yield connected


def ask(client: Client, context: str, text: str = MORE, **options: object) -> tuple[list[int], Summary]:
    """The tokens of an answer and its summary."""
    return answered(client, context, text=text, **{"max_tokens": 8, **options})


def extend(client: Client, context: str, text: str = MORE, name: str = "") -> str:
    """A child of the context and the text, attended exactly."""
    _, summary = ask(
        client, context, text, max_tokens=None, method="full", keep=Keep(name=name, prompt_only=True)
    )
    assert summary.completion_tokens == 0
    return summary.kept_context


def test_a_child_answers_as_the_context_prefilled_in_one_go(shelf: Shelf, client: Client) -> None:
    whole = "contexts/" + shelf.library.prefill("whole", text=TEXT + MORE * 3, method=METHODS)
    first = extend(client, shelf.root, MORE)
    child = extend(client, first, MORE * 2)
    info = client.get_context(child)
    assert info.token_count == client.get_context(whole).token_count
    assert info.parent == shelf.root  # not the child in the middle, whose rows it has
    assert info.parent_token_count == client.get_context(shelf.root).token_count
    for text in ("The lamp", " and so"):
        expected, _ = ask(client, whole, text, method="full", max_tokens=24)
        found, summary = ask(client, child, text, method="full", max_tokens=24)
        assert found == expected
        assert summary.cached_tokens == summary.context_tokens == info.token_count


def test_an_answer_goes_on_behind_ends_that_are_ignored_and_is_kept_with_them(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The child answers as the root does behind the same tokens, ends among them."""
    library = make_library(tmp_path, eos_token=END_TOKEN)
    root = "contexts/" + library.prefill("root", method=METHODS)
    bias = {"logit_bias": {0: 4.0}, "frequency_penalty": 0.5}
    with (
        loaded(library.config()) as server,
        grpc_of(server, pytestconfig) as address,
        Client(address) as client,
    ):
        asked: dict[str, Any] = {"text": MORE, "max_tokens": 24, "method": "full", **bias}
        before, ended = answered(client, root, **asked)
        asked["ignore_eos"] = True
        tokens, summary = answered(client, root, keep=Keep(), **asked)
        assert (ended.finish_reason, before[-1]) == ("end_of_sequence", 0)
        assert (summary.finish_reason, summary.completion_tokens) == ("length", 24)
        assert tokens[: len(before)] == before
        assert 0 in tokens[len(before) : -1]
        with client.batch_generate(root, [cast("GenerateOptions", asked)] * 2) as batch:
            found = {(item.token_ids[0], item.texts[0].rstrip("\ufffd")) for item in batch}
        assert found == {(tuple(tokens), client.detokenize(tokens).rstrip("\ufffd"))}
        ids = client.tokenize(MORE).ids
        expected, _ = answered(client, root, token_ids=[*ids, *tokens, *ids], method="full", max_tokens=8)
        assert ask(client, summary.kept_context, method="full")[0] == expected


def test_sessions_on_children_of_one_parent_share_a_batch(shelf: Shelf, client: Client) -> None:
    children = [extend(client, shelf.root, f"{number} ships. ") for number in range(4)]
    assert client.warm_context(children[0]).context.name == children[0]
    alone = [ask(client, child, "The lamp", method="full")[0] for child in children]
    with ThreadPoolExecutor(8) as pool:
        together = pool.map(lambda child: ask(client, child, "The lamp", method="full")[0], children * 2)
    assert list(together) == alone * 2


@pytest.mark.parametrize("method", METHODS)
def test_methods_search_what_a_child_added(shelf: Shelf, client: Client, method: str) -> None:
    """The same tokens are in the tail, and were appended to the indexes, as if they had been the prompt's."""
    child = extend(client, shelf.root, MORE * 4)
    answer, summary = ask(
        client, child, "The lamp", method=f"{method}@append_block=32@recent=32", keep_ratio=1.0
    )
    expected, _ = ask(client, child, "The lamp", method="full")
    assert answer == expected
    assert summary.selection.keys_available > 0


def test_the_parent_stays_while_a_childs_session_runs(
    shelf: Shelf, client: Client, running: DecodeServer
) -> None:
    child = extend(client, shelf.root)
    generation = client.generate(child, text="The lamp", max_tokens=3000)
    pieces = iter(generation)
    next(pieces)
    wait_until(lambda: leases(running) == 1)  # once the session that was kept is no more
    assert running.backend.arena.drop(shelf.root.removeprefix("contexts/")) is False
    next(pieces)
    generation.cancel()
    wait_until(lambda: leases(running) == 0)


def test_a_child_without_its_parent_says_so(shelf: Shelf, tmp_path: Path) -> None:
    library = Library(shelf.library.model, tmp_path / "store")
    shutil.copytree(shelf.library.store, library.store)
    with loaded(library.config()) as server, Client(server.address) as client:
        child = extend(client, shelf.root)
        shutil.rmtree(library.store / shelf.root)
        with pytest.raises(ContextCorruptError, match="is not in the store") as caught:
            ask(client, child)
        assert caught.value.metadata["cause"] == "PARENT_MISSING"
        info = client.get_context(child)
        assert (info.state, shelf.root.removeprefix("contexts/") in info.state_message) == ("CORRUPT", True)


def test_a_child_that_has_outgrown_its_parent_says_what_to_do(
    shelf: Shelf, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = extend(client, shelf.root, MORE * 6)
    assert client.get_context(child).state_message == ""  # too few tokens to be worth a copy
    monkeypatch.setattr("index_store.family.parents.GROWN_TOKENS", 100)
    info = client.get_context(child)
    assert info.state == "READY"
    assert f"adds {6 * len(MORE)} tokens to the {info.parent_token_count} of its parent" in info.state_message
    assert f"prefill-worker detach {child.removeprefix('contexts/')[:12]}" in info.state_message
    short = extend(client, shelf.root, MORE + "\n" * 20)  # a fifth of its parent
    for name in (short, shelf.root):
        assert client.get_context(name).state_message == ""


def test_a_damaged_child_is_refused_and_its_parent_is_not(
    shelf: Shelf, client: Client, running: DecodeServer
) -> None:
    child = extend(client, shelf.root, MORE * 5)
    shelf.library.damage(child.removeprefix("contexts/"))
    with pytest.raises(ContextCorruptError, match="crc32c"):
        ask(client, child)
    with Gateway("127.0.0.1:0", running.grpc) as gateway:
        asked = {"model": "model", "prompt": "The lamp", "max_tokens": 2}
        for stream in (False, True):
            body = {**asked, "context": child, "stream": stream}
            reply = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
            assert (reply.status_code, reply.json()["error"]["code"]) == (500, "context_corrupt")
            assert str(shelf.library.store) not in reply.text
            assert "make it again: prefill its document, or continue its parent anew" in reply.text
        whole = httpx.post(f"{gateway.url}/v1/completions", json={**asked, "context": shelf.root}, timeout=60)
        assert whole.status_code == 200
    assert ask(client, shelf.root)[0]
    assert extend(client, shelf.root, MORE * 5) == child  # made anew
    assert ask(client, child)[0]
    client.delete_context(child)


def test_a_full_disk_is_told_and_nothing_stays(
    shelf: Shelf, client: Client, running: DecodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(list(client.list_contexts()))
    with monkeypatch.context() as patched:
        patched.setattr("index_store.store.writer.sync_tree", raising(OSError(28, "No space left on device")))
        with pytest.raises(StoreFullError, match="no space is left"):
            ask(client, shelf.root, "Twice ", keep=Keep())
        with Gateway("127.0.0.1:0", running.grpc) as gateway:
            body = {"model": "model", "prompt": "Twice ", "max_tokens": 2, "context": shelf.root, "keep": {}}
            reply = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
    error = reply.json()["error"]
    assert (reply.status_code, reply.headers["x-should-retry"]) == (507, "false")
    assert (error["type"], error["code"], error["param"]) == ("server_error", "store_full", None)
    assert "no space is left" in error["message"]
    assert len(list(client.list_contexts())) == before
    wait_until(lambda: leases(running) == 0)
    wait_until(lambda: running.backend.engine.places == 0)


def test_a_text_continues_the_longest_context_that_it_begins_with(shelf: Shelf, client: Client) -> None:
    library = shelf.library
    text = "A ship came in with the tide, and nobody had seen her before. " * 6
    short = "contexts/" + library.prefill("short", text=text, method=METHODS, salt="")
    child = extend(client, short, MORE)
    for whole, context in ((text + " She", short), (text + MORE + " She", child)):
        expected, _ = ask(client, context, " She", method="full")
        found, summary = ask(client, "", whole, method="full")
        assert found == expected
        assert summary.cached_tokens == client.get_context(context).token_count
        assert summary.prompt_tokens == 4
        assert summary.context == context
    for whole in (text[:300], "Another " + text, TEXT + MORE):  # the last is stored with a salt
        _, summary = ask(client, "", whole)
        assert (summary.cached_tokens, summary.context) == (0, "")
    with pytest.raises(PromptTooLongError, match="positions"):
        ask(client, "", text * 100)


@pytest.mark.parametrize("method", ["full", "csattention"])
def test_a_text_that_is_stored_with_nothing_behind_it_is_answered(
    shelf: Shelf, client: Client, method: str
) -> None:
    """Its last token is read again, of a child as of others."""
    text = "The moon rose over the grey harbour, and the keeper went to bed. " * 2
    stored = "contexts/" + shelf.library.prefill("moon", text=text, method=METHODS, salt="")
    first, one = extend(client, stored, MORE), extend(client, stored, "!")
    for whole, context in ((text, stored), (text + MORE, first), (text + "!", one)):
        shorter = stored if context != stored else ""
        rest = whole[len(text) :] if shorter else whole
        expected, _ = ask(client, shorter, rest, method="full", prompt_logprobs=not shorter)
        budget = {} if method == "full" else {"keep_ratio": 1.0}
        found, summary = ask(client, "", whole, method=method, **budget)
        assert found == expected
        count = client.get_context(context).token_count
        assert (summary.context, summary.cached_tokens, summary.prompt_tokens) == (context, count - 1, 1)
        assert len(client.tokenize(whole).ids) == count
