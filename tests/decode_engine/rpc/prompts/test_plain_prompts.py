"""Prompts without a context: served like any other, over what is stored of their beginning."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from decode_engine.rpc.client import Client, Summary
from decode_engine.rpc.server import DecodeServer
from index_store.errors import ContextNotFoundError
from index_store.family import prefixes
from index_store.models.conversation.messages import Message, Role
from tests.decode_engine.conftest import MAX_POSITIONS, TEXT, Library
from tests.support.models import generated
from tests.support.serving.service import answered, wait_until

MESSAGES = (
    Message(Role.USER, "Who lit the lamp?"),
    Message(Role.ASSISTANT, "He."),
    Message(Role.USER, "Why?"),
)


def ask(client: Client, context: str = "", **options: Any) -> tuple[list[int], Summary]:
    return answered(client, context, **{"max_tokens": 12, **options})


@pytest.mark.parametrize(
    "prompt",
    [
        {"question": "Who lit the lamp?"},
        {"messages": MESSAGES},
        {"text": "The keeper"},
        {"text": "As nobody else begins. " + TEXT * 4},
        {"token_ids": [70]},
    ],
    ids=lambda prompt: next(iter(prompt)),
)
def test_any_prompt_is_answered_as_by_generate(
    library: Library, client: Client, prompt: dict[str, Any]
) -> None:
    found, summary = ask(client, **prompt)
    ids = prompt.get("token_ids")
    if ids is None:
        said = prompt.get("text") or prompt.get("messages") or (Message(Role.USER, prompt["question"]),)
        ids = list(client.tokenize(said).ids)
    assert found == generated(library.model, ids, 12)
    assert (summary.method, summary.context, summary.method_reason) == ("full", "", "")
    assert (summary.context_tokens, summary.cached_tokens, summary.prompt_tokens) == (0, 0, len(ids))
    assert summary.selection.fraction_all == 1.0


def test_a_prompt_may_have_all_positions_of_the_model_but_one(client: Client) -> None:
    _, summary = ask(client, token_ids=[70] * (MAX_POSITIONS - 1), max_tokens=None)
    assert (summary.prompt_tokens, summary.completion_tokens) == (MAX_POSITIONS - 1, 1)


def test_penalties_count_what_need_not_be_read(library: Library, client: Client) -> None:
    """So what is stored of a prompt does not change its answer."""
    text = "A bell rang in the fog, and the keeper counted to nine. " * 2
    options = {"text": text, "repetition_penalty": 1.5}
    alone, before = ask(client, **options)
    library.prefill("bell", text=text[:100], salt="", method=("csattention",))
    found, summary = ask(client, **options, method="full")
    assert (before.cached_tokens, summary.cached_tokens) == (0, 100)
    assert found == alone != ask(client, text=text, method="full")[0]


def test_what_is_stored_too_short_or_too_large_is_passed_over(
    library: Library, client: Client, server: DecodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The nets were dry before the wind turned to the north again. "
    library.prefill("tiny", text=text[: prefixes.LEAST_TOKENS - 1], salt="", method=("full",))
    assert ask(client, text=text)[1].context == ""
    stored = library.prefill("nets", text=text[: prefixes.LEAST_TOKENS], salt="", method=("full",))
    assert ask(client, text=text)[1].context == f"contexts/{stored}"
    monkeypatch.setattr(server.backend.arena, "may_hold", lambda manifest: False)
    assert ask(client, text=text)[1].context == ""


def test_a_beginning_that_goes_before_it_is_in_use_is_read(
    library: Library, client: Client, server: DecodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The last boat of the evening brought letters and a crate of limes. "
    stored = library.prefill("limes", text=text, salt="", method=("full",))
    acquire, left = server.backend.arena.acquire, [stored]

    def late(store: Any, id_: str, **options: Any) -> Any:
        if id_ in left:
            store.delete(left.pop())
        return acquire(store, id_, **options)

    monkeypatch.setattr(server.backend.arena, "acquire", late)
    _, summary = ask(client, text=text + "Then")
    assert (summary.context, summary.cached_tokens) == ("", 0)
    with pytest.raises(ContextNotFoundError):
        ask(client, f"contexts/{stored}", text="Then")


def test_an_answer_can_tell_which_beginning_was_used_and_why_no_longer_one(
    library: Library, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    text = "A crate of limes came with the last boat, and the letters with it. " * 5
    short = library.prefill("crate", text=text[:100], salt="", method=("csattention",))
    longer = library.prefill("boat", text=text[:300] + "Nobody", salt="", method=("full",))
    with caplog.at_level("INFO"):
        _, summary = ask(client, text=text, explain=True)
        again = ask(client, text=text, explain=True, method="full")[1].explanation
        wait_until(lambda: sum(getattr(one, "rpc", "") == "Generate" for one in caplog.records) == 2)
    why = summary.explanation
    assert (why.lookup, why.context, why.cached_tokens, why.tier) == ("found", short, 100, "disk")
    assert (why.missed, why.missed_context, why.missed_tokens) == ("partial", longer, 256)
    assert (again.tier, again.method_reason) == ("host", "the request names it")
    assert why.method_reason == summary.method_reason or not summary.method_reason
    times = why.door_ms + why.load_ms + why.queue_ms + why.prompt_ms + why.decode_ms
    assert times == pytest.approx(summary.timings.total_ns / 1e6)
    (told, _) = (vars(one) for one in caplog.records if getattr(one, "rpc", "") == "Generate")
    assert {name: told[name] for name in asdict(why)} == asdict(why)
    named = ask(client, f"contexts/{short}", text="Then", explain=True)[1].explanation
    assert (named.lookup, named.missed, named.context) == ("named", "", short)
    alone = ask(client, text="Who?", explain=True)[1].explanation
    assert (alone.lookup, alone.missed, alone.tier, alone.context) == ("none", "not_stored", "", "")
    assert ask(client, text="Who?")[1].explanation is None
