"""Incremental detokenisation and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from decode_engine.text import Detokenizer, StopStrings, TextStream
from index_store.errors import InvalidArgumentError


def decode_bytes(ids: Sequence[int]) -> str:
    """The coarsest byte-level tokenizer: one token per byte, as tokenizers decode it."""
    return bytes(ids).decode("utf-8", errors="replace")


WORDS = ["\u2581the", "\u2581cat", "s", "\u2581", "<0xC3>", "<0xA9>", "."]


def make_word_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="."))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_no_half_characters() -> None:
    text = "aé€😀b"
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


@given(st.text(), st.text())
def test_pieces_join_to_the_text(prompt: str, text: str) -> None:
    detokenizer = Detokenizer(decode_bytes, list(prompt.encode()))
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text


@given(st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_join_to_what_they_decode_to(ids: list[int]) -> None:
    """Invalid bytes are replaced as in one decoding, except that an incomplete end is left out."""
    detokenizer = Detokenizer(decode_bytes)
    joined = "".join(detokenizer.push(token) for token in ids)
    whole = decode_bytes(ids)
    assert joined in (whole, whole.removesuffix("\ufffd"))


def test_character_begun_by_the_prompt_is_completed() -> None:
    euro = "€".encode()
    detokenizer = Detokenizer(decode_bytes, list(b"costs " + euro[:1]))
    assert [detokenizer.push(byte) for byte in euro[1:] + b"5"] == ["", "€", "5"]


def test_leading_spaces_and_byte_fallback_of_sentencepiece() -> None:
    tokenizer = make_word_decoder()
    ids = [WORDS.index(word) for word in ("\u2581cat", "s", "\u2581the", "<0xC3>", "<0xA9>", "\u2581", ".")]
    prompt = [WORDS.index("\u2581the")]
    detokenizer = Detokenizer(lambda tokens: tokenizer.decode(list(tokens)), prompt)
    assert [detokenizer.push(token) for token in ids] == [" cat", "s", " the", "", "é", " ", "."]


def test_cost_per_token_stays_bounded_without_character_borders() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    detokenizer = Detokenizer(decode)
    joined = "".join(detokenizer.push(0xE4) for _ in range(2000))
    assert longest < 300
    assert set(joined) == {"\ufffd"}
    assert detokenizer.push(ord("a")).endswith("a")


def test_stop_string_across_pieces_is_not_shown() -> None:
    stops = StopStrings(["END", "\n\n"])
    assert stops.push("one E") == ("one ", False)
    assert stops.push("N") == ("", False)
    assert stops.push("T") == ("ENT", False)
    assert stops.push("two\n") == ("two", False)
    assert stops.push("\nthree") == ("", True)


def test_earliest_stop_string_wins() -> None:
    assert StopStrings(["late", "early"]).push("an early and a late one") == ("an ", True)
    assert StopStrings(["bcd", "b"]).push("abcd") == ("a", True)


def test_held_back_text_comes_with_the_flush() -> None:
    stops = StopStrings(["stop"])
    assert stops.push("almost sto") == ("almost ", False)
    assert stops.flush() == "sto"
    assert stops.flush() == ""


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_agree_with_a_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    watcher = StopStrings(stops)
    shown, text, stopped = "", "", False
    for piece in pieces:
        more, stopped = watcher.push(piece)
        shown += more
        text += piece
        positions = [text.find(stop) for stop in stops if stop in text]
        assert stopped == bool(positions)
        if stopped:
            assert shown == text[: min(positions)]
            break
    else:
        assert shown + watcher.flush() == text


@pytest.mark.parametrize("stops", [["a"] * 17, [""], ["x" * 257]])
def test_stop_strings_out_of_range_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="stop string"):
        StopStrings(stops)


def test_text_stream_combines_both() -> None:
    stream = TextStream(decode_bytes, stops=["é!"])
    pieces = [stream.push(byte) for byte in "aéb é!".encode()]
    assert "".join(piece.text for piece in pieces) == "aéb "
    assert [piece.stopped for piece in pieces] == [False] * 7 + [True]


def test_text_stream_flush_returns_held_text_but_no_half_character() -> None:
    stream = TextStream(decode_bytes, stops=["bcd"])
    assert [stream.push(byte).text for byte in b"abc"] == ["a", "", ""]
    assert stream.push(0xE2).text == ""
    assert stream.flush() == "bc"
