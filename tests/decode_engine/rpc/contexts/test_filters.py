"""Filters and orders of lists."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_engine.rpc.contexts.listing import (
    MAX_FILTER_CHARACTERS,
    ORDERED,
    Pager,
    Row,
    parse_filter,
    parse_order,
    row_of,
)
from index_store.errors import (
    ContextCorruptError,
    FormatVersionError,
    InvalidArgumentError,
    StoreUnavailableError,
)
from index_store.store.catalog import Store
from index_store.store.description.callers import Caller
from index_store.store.listing import BrokenContext, place_of
from sparsekv.v1 import context_pb2
from tests.support.store import CREATED, synthetic_context


def made(name: str, tokens: int, days: int = 0, *, expired: bool = False, **changes: object) -> Row:
    context = synthetic_context(tokens=tokens, name=name, created=CREATED + timedelta(days=days))
    return row_of(replace(context.draft, **changes), expired=expired)  # type: ignore[arg-type]


EXPIRY = datetime(2026, 6, 1, tzinfo=UTC)
ROWS = [
    made("Tax law", 300, 0, labels={"team": "law", "year": "2026"}, pinned=True),
    made('the "novel"', 40, 1, labels={"team": "arts"}, expires_at=EXPIRY),
    made("old", 40, 2, expired=True, expires_at=CREATED + timedelta(days=3)),
    row_of(BrokenContext("b" * 64, ContextCorruptError("damaged")), expired=False),
    row_of(BrokenContext("c" * 64, FormatVersionError("new")), expired=False),
    row_of(BrokenContext("d" * 64, StoreUnavailableError("away")), expired=False),
]
NAMES = ["law", "novel", "old", "corrupt", "unsupported", "unavailable"]


def test_a_reader_does_not_learn_who_made_a_context(tmp_path: Path) -> None:
    store, made = Store(tmp_path / "store", create=True), synthetic_context()
    draft = replace(made.draft, tenant="acme", owner="alice", readers=("beta",))
    replace(made, draft=draft).write(store)
    request = context_pb2.ListContextsRequest(filter="owner = alice")
    for tenant, count in (("acme", 1), ("beta", 0)):
        page, _ = Pager(b"key").page(store.seen_by(Caller(tenant, frozenset({"read"}))), request)
        assert len(page) == count, tenant


def fitting(text: str) -> str:
    test = parse_filter(text)
    return " ".join(name for name, row in zip(NAMES, ROWS, strict=True) if test(row))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", " ".join(NAMES)),
        ("state = READY", "law novel"),
        ("state != READY", "old corrupt unsupported unavailable"),
        ("state=EXPIRED OR state = UNSUPPORTED", "old unsupported"),
        ("token_count > 40", "law"),
        ("token_count>=40 AND token_count <300", "novel old"),
        ("NOT token_count <= 40", "law corrupt unsupported unavailable"),
        ("-token_count = 40 AND model = toy", "law"),
        ("- (token_count = 40) AND state = READY", "law"),
        ("pinned = true", "law"),
        ("pinned = FALSE", "novel old"),
        ("is_conversation = true", ""),
        ('display_name = "Tax law"', "law"),
        ("display_name : LAW", "law"),
        ('display_name = "the \\"novel\\""', "novel"),
        ("labels.team = law", "law"),
        ("labels.team != law AND state = READY", "novel"),
        ("labels:year", "law"),
        ("labels.year:*", "law"),
        ('labels.year:"02"', "law"),
        ("NOT labels:team", "old corrupt unsupported unavailable"),
        ("create_time > 2026-01-03", "novel old"),
        ("create_time > 2026-01-03T23:00:00+01:00 AND pinned = false", "old"),
        ('create_time < "2026-01-03T00:00:00Z"', "law"),
        ("expire_time > 2026-01-01T00:00:00Z", "novel old"),
        ("expire_time != 2026-06-01T00:00:00Z AND state = READY", "law"),
        ("state = READY AND pinned = true OR labels.team = arts", "law novel"),
        ("(pinned = true AND token_count = 1) OR state = EXPIRED", "old"),
        (f"name = contexts/{'b' * 64}", "corrupt"),
    ],
)
def test_filters_choose(text: str, found: str) -> None:
    assert fitting(text) == found


def test_or_binds_more_tightly_than_and() -> None:
    """As AIP-160 has it: false AND (false OR true) is nothing, where (false AND false) OR true would be all."""
    assert fitting("token_count = 1 AND token_count = 1 OR state = READY") == ""


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("colour = red", 1, "found 'colour', expected one of name, display_name"),
        ("state", 6, "found the end, expected one of =, !="),
        ("state > READY", 7, "found '>', expected one of =, !="),
        ("state = GOOD", 9, "found 'GOOD', expected one of READY, EXPIRED"),
        ("token_count = many", 15, "found 'many', expected a whole number"),
        ("token_count = 1 pinned = true", 17, "found 'pinned', expected AND, OR or the end"),
        ("create_time = today", 15, "found 'today', expected a time such as"),
        ("create_time = 2026-13-01", 15, "found '2026-13-01', expected a time such as"),
        ("pinned = maybe", 10, "found 'maybe', expected true or false"),
        ("(state = READY", 15, "found the end, expected AND, OR or )"),
        ("state = READY)", 14, "found ')', expected AND, OR or the end"),
        ("state = READY AND", 18, "found the end, expected a field"),
        ("AND", 1, "found 'AND', expected a field"),
        ("labels. = a", 1, "found 'labels.', expected one of"),
        ("labels = a", 8, "found '=', expected : and a label's key"),
        ('display_name = "a', 16, "expected a field, a sign, a word, or a text that ends"),
        ("(" * 40 + "state = READY" + ")" * 40, 34, "expected at most 32 terms inside each other"),
    ],
)
def test_filters_that_cannot_be_read_are_told_with_their_place(text: str, place: int, expected: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_filter(text)
    assert caught.value.message.startswith(f"filter: at character {place} found ")
    assert expected in caught.value.message


def test_long_filters_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="2004 characters, expected at most 2000"):
        parse_filter("state = READY" + " " * (MAX_FILTER_CHARACTERS - 9))


@given(st.text(alphabet='()<>=!:-"\\ ANDORT1state.labels*', max_size=40) | st.text(max_size=20))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    with suppress(InvalidArgumentError):  # and nothing else
        test = parse_filter(text)
        assert all(isinstance(test(row), bool) for row in ROWS)


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("", "old novel law corrupt unsupported unavailable"),
        ("create_time desc", "old novel law corrupt unsupported unavailable"),
        ("create_time", "law novel old corrupt unsupported unavailable"),
        ("create_time asc", "law novel old corrupt unsupported unavailable"),
        ("token_count", "old novel law corrupt unsupported unavailable"),
        ("token_count desc", "law old novel corrupt unsupported unavailable"),
        ("token_count, display_name desc", "novel old law corrupt unsupported unavailable"),
        ("expire_time", "old novel law corrupt unsupported unavailable"),
        ("expire_time desc", "novel old law corrupt unsupported unavailable"),
        ("display_name", "law old novel corrupt unsupported unavailable"),
    ],
)
def test_orders(text: str, order: str) -> None:
    """What is equal stands newest first; who lacks the field comes last."""
    wanted = parse_order(text)
    newest_first = sorted(ROWS, key=lambda row: place_of(row.entry))
    found = wanted.after(newest_first, None)
    names = {id(row): name for row, name in zip(ROWS, NAMES, strict=True)}
    listed = [names[id(row)] for row in found]
    assert listed == order.split()
    for position, row in enumerate(found):
        assert wanted.after(newest_first, wanted.key(row)) == found[position + 1 :]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "colour",
            "found 'colour', expected one of name, display_name, model, create_time, expire_time, token_count",
        ),
        ("token_count down", "found 'token_count down'"),
        ("name,", "found ''"),
        ("name, name desc", "names name twice"),
        ("pinned", "found 'pinned'"),
    ],
)
def test_orders_that_cannot_be_read_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_order(text)


def test_fields_that_lists_are_ordered_by_are_documented() -> None:
    proto = Path(__file__).parents[4] / "protos" / "sparsekv" / "v1" / "context.proto"
    told = proto.read_text().partition("// Fields in whose order")[2].partition("For example")[0]
    assert set(ORDERED) <= set(re.findall(r"\w+", told))
