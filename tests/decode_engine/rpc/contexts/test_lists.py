"""Which contexts a list is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest

from decode_engine.rpc.contexts.listing import fits
from index_store.errors import ContextCorruptError, FormatVersionError, StoreUnavailableError
from index_store.store.listing import BrokenContext, Entry, state_of
from sparsekv.v1 import context_pb2
from tests.support.store import CREATED, synthetic_context


def made(name: str, **changes: object) -> Entry:
    return replace(synthetic_context(name=name).draft, **changes)  # type: ignore[arg-type]


PAST = CREATED + timedelta(days=3)
ENTRIES: Mapping[str, Entry] = {
    "law": made("Tax law", labels={"team": "law", "year": "2026"}),
    "novel": made("Tales", labels={"team": "arts"}),
    "old": made("old", labels={"team": "law"}, expires_at=PAST),
    "corrupt": BrokenContext("b" * 64, ContextCorruptError("damaged")),
    "unsupported": BrokenContext("c" * 64, FormatVersionError("new")),
    "unavailable": BrokenContext("d" * 64, StoreUnavailableError("away")),
}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, " ".join(ENTRIES)),
        ({"name_prefix": "Ta"}, "law novel"),
        ({"name_prefix": "ta"}, ""),
        ({"labels": {"team": "law"}}, "law old"),
        ({"labels": {"team": "law", "year": "2026"}}, "law"),
        ({"labels": {"year": ""}}, ""),
        ({"state": "READY"}, "law novel"),
        ({"state": "EXPIRED", "labels": {"team": "law"}}, "old"),
        ({"state": "CORRUPT"}, "corrupt"),
        ({"state": "UNSUPPORTED"}, "unsupported"),
        ({"state": "UNAVAILABLE"}, "unavailable"),
    ],
)
def test_lists_hold_what_fits(wanted: Mapping[str, object], found: str) -> None:
    request = context_pb2.ListContextsRequest(**wanted)  # type: ignore[arg-type]
    states = {name: state_of(entry, expired=name == "old") for name, entry in ENTRIES.items()}
    assert " ".join(name for name, entry in ENTRIES.items() if fits(entry, request, states[name])) == found
