"""Flags are checked before anything runs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from index_store.cli.options import parse_ttl
from index_store.errors import InvalidArgumentError
from index_store.methods.default import DEFAULT_METHOD
from prefill_worker.config import PrefillConfig, parse_dense_layers


def config(**changes: Any) -> PrefillConfig:
    return PrefillConfig(**{"model": "reader", "store": Path("store"), "input": (Path("-"),), **changes})


@pytest.mark.parametrize(
    ("text", "ttl"),
    [
        (None, None),
        ("90s", timedelta(seconds=90)),
        ("30m", timedelta(minutes=30)),
        ("12h", timedelta(hours=12)),
        ("7d", timedelta(days=7)),
        ("1.5h", timedelta(minutes=90)),
        ("0.5m", timedelta(seconds=30)),
    ],
)
def test_times_to_live(text: str | None, ttl: timedelta | None) -> None:
    assert parse_ttl(text) == ttl


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "d",
        "7 d",
        "-1d",
        "1.h",
        ".5h",
        "1e3s",
        "nan",
        "infd",
        "0m",
        "7w",
        "99999999999d",
        "999999d",
        "７d",
    ],
)
def test_other_times_to_live_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--ttl is"):
        parse_ttl(text)


@pytest.mark.parametrize("text", ["0", "0m", "0.5s", "99999999999d", "36501d", "9" * 5000 + "s"])
def test_times_to_live_out_of_range_are_told_apart(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="out of range: expected 1s to 36500d"):
        parse_ttl(text)


def test_the_longest_time_to_live_in_any_unit() -> None:
    assert parse_ttl("36500d") == parse_ttl(f"{36_500 * 86_400}s") == timedelta(days=36_500)


@pytest.mark.parametrize(("text", "layers"), [("auto", None), ("none", ()), ("0", (0,)), ("3, 1,1", (1, 3))])
def test_dense_layers(text: str, layers: tuple[int, ...] | None) -> None:
    assert parse_dense_layers(text) == layers


@pytest.mark.parametrize("text", ["", "all", "-1", "1,,2", "1.5", "0;1"])
def test_other_dense_layers_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--dense-layers is"):
        parse_dense_layers(text)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"chunk": 0}, "--chunk"),
        ({"query_sample": 10}, "--query-sample"),
        ({"seed": -1}, "--seed"),
        ({"input": ()}, "no input"),
        ({"method": ("full", "full")}, "--method"),
        ({"method": ("full", "full"), "index": ("pages",)}, "--method"),
        ({"dtype": "int8"}, "--dtype"),
        ({"device": "tpu"}, "--device"),
        ({"name": "two\nlines"}, "--name"),
        ({"name": ""}, "--name"),
        ({"ttl": "soon"}, "--ttl"),
        ({"dense_layers": "some"}, "--dense-layers"),
    ],
)
def test_bad_flags_are_named(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(InvalidArgumentError, match=flag):
        config(**changes)


def test_the_default_method_is_built_unless_something_is_named() -> None:
    assert config().methods == (DEFAULT_METHOD,)
    assert config(method=("pq",)).methods == ("pq",)
    assert config(index=("pages",)).methods == ()
    assert config(method=("pq",), index=("pages",)).methods == ("pq",)
