"""A server over a model with states: what is kept of sessions, several answers, and beginnings that are stored."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from decode_engine.rpc.client import Client, Keep
from index_store.store.catalog import Store
from tests.decode_engine.conftest import Library
from tests.support.models import LAYER_KINDS, write_model_folder
from tests.support.serving.front import grpc_of
from tests.support.serving.service import answered, loaded

PROMPT = list(range(70, 78))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("states")
    family, settings = LAYER_KINDS["states"]
    model = write_model_folder(folder / "model", family, layers=3, **{**settings, "eos_token_id": None})
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    del tokenizer["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return Library(model, folder / "store")


@pytest.fixture(scope="module")
def root(library: Library) -> str:
    return "contexts/" + library.prefill("root", salt="")  # found by its tokens


@pytest.fixture(scope="module")
def client(library: Library, root: str, pytestconfig: pytest.Config) -> Iterator[Client]:
    with (
        loaded(library.config()) as server,
        grpc_of(server, pytestconfig) as address,
        Client(address) as connected,
    ):
        yield connected


def answer(client: Client, context: str, **options: object) -> list[int]:
    return answered(client, context, method="full", **options)[0]


def kept_of(client: Client, context: str, prompt: list[int], **options: object) -> str:
    """The context that a session becomes; of its prompt alone where no tokens are wanted."""
    keep = Keep(prompt_only=options["max_tokens"] is None)
    return answered(client, context, token_ids=prompt, method="full", keep=keep, **options)[1].kept_context


@pytest.mark.parametrize("cut", [False, True])
def test_what_is_kept_ends_where_the_answer_does(client: Client, root: str, cut: bool) -> None:
    """Also where the session had read on, since a stop string is noticed later."""
    with client.generate(root, token_ids=PROMPT, method="full", max_tokens=16) as generation:
        text = generation.read()
    stop = text[5:7] if cut else "not said"
    told = answer(client, root, token_ids=PROMPT, max_tokens=16, stop=stop)
    assert (len(told) < 16) is cut
    kept = kept_of(client, root, PROMPT, max_tokens=16, stop=stop)
    behind = [90, 91, 92]
    expected = answer(client, root, token_ids=[*PROMPT, *told, *behind], max_tokens=12)
    assert answer(client, kept, token_ids=behind, max_tokens=12) == expected
    again = kept_of(client, kept, behind[:2], max_tokens=None)
    assert answer(client, again, token_ids=behind[2:], max_tokens=12) == expected


def test_answers_of_one_request_go_on_by_themselves(client: Client, root: str) -> None:
    alone = answer(client, root, token_ids=PROMPT, max_tokens=12)
    with client.generate(
        root, token_ids=PROMPT, method="full", max_tokens=12, n=3, temperature=1e-3
    ) as generation:
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for piece in generation:
            found[piece.index] += piece.token_ids
    assert list(found.values()) == [alone] * 3


def test_a_stored_beginning_is_gone_on_from_where_a_token_follows_it(
    library: Library, client: Client, root: str
) -> None:
    stored = Store(library.store).manifest(root.removeprefix("contexts/"))
    with Store(library.store).open(stored.id) as context:
        ids = context.tokens().tolist()
    for behind, cached in (
        (PROMPT, len(ids)),
        ([], 0),
    ):  # where nothing follows, the last token is wanted again
        found, summary = answered(client, token_ids=[*ids, *behind], method="full", max_tokens=12)
        assert summary.cached_tokens == cached
        if behind:
            assert found == answer(client, root, token_ids=behind, max_tokens=12)
            first = answer(client, root, token_ids=behind[:1], max_tokens=12)
        else:
            assert [*found[1:]] == answer(client, root, token_ids=found[:1], max_tokens=11)
    assert first != found
