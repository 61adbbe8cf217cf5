"""Incremental detokenisation and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from decode_engine.rpc.answers.text import Detokenizer, StopStrings, TextStream


def decode_bytes(ids: Sequence[int]) -> str:
    """The coarsest byte-level tokenizer: one token per byte, as tokenizers decode it."""
    return bytes(ids).decode("utf-8", errors="replace")


WORDS = ["\u2581the", "\u2581cat", "s", "\u2581", "."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def make_fallback_tokenizer() -> Tokenizer:
    """Llama 2's kind of tokenizer: pieces for few characters, one token per byte of all others."""
    vocabulary = {word: n for n, word in enumerate([*BYTES, *WORDS, *"thecas", "\u2581t"])}
    merges = [("\u2581", "t")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=None, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


FALLBACK = make_fallback_tokenizer()


def decode_fallback(ids: Sequence[int]) -> str:
    return str(FALLBACK.decode(list(ids)))


def encode_fallback(text: str) -> list[int]:
    return list(FALLBACK.encode(text).ids)


def replace_each_byte(ids: Sequence[int]) -> str:
    """UTF-8 with one U+FFFD per byte that is in no character."""
    text, rest = "", bytes(ids)
    while rest:
        for length in range(1, 5):
            try:
                text += rest[:length].decode()
            except UnicodeDecodeError:
                continue
            rest = rest[length:]
            break
        else:
            text, rest = text + "\ufffd", rest[1:]
    return text


# The sign that stands for a space among the pieces reads as a space.
TEXTS = st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]))


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
    assert_all_but_an_incomplete_end(joined, decode_bytes(ids))


def assert_all_but_an_incomplete_end(joined: str, whole: str) -> None:
    assert whole.startswith(joined)
    assert whole[len(joined) :] in ("", "\ufffd", "\ufffd" * 2, "\ufffd" * 3)


def test_no_half_characters_of_byte_fallback() -> None:
    detokenizer = Detokenizer(decode_fallback, encode_fallback(" the"))
    pieces = [detokenizer.push(token) for token in encode_fallback("😀é日本 cas")]
    assert pieces == [*["", "", "", "😀"], *["", "é"], *["", "", "日"], *["", "", "本"], " ", "c", "a", "s"]


@given(TEXTS, TEXTS)
def test_pieces_of_byte_fallback_join_to_the_text(prompt: str, text: str) -> None:
    prompt_ids, ids = encode_fallback(prompt), encode_fallback(text)
    detokenizer = Detokenizer(decode_fallback, prompt_ids)
    whole = decode_fallback([*prompt_ids, *ids])
    assert "".join(detokenizer.push(token) for token in ids) == whole[len(decode_fallback(prompt_ids)) :]


@given(st.lists(st.integers(0, 255) | st.sampled_from([0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80]), max_size=60))
def test_any_bytes_of_byte_fallback_spoil_only_themselves(ids: list[int]) -> None:
    """Invalid bytes come out, as one U+FFFD each, and the characters around them stay what they are."""
    detokenizer = Detokenizer(decode_fallback, encode_fallback(" the"))
    joined = "".join(detokenizer.push(token) for token in ids)
    expected = replace_each_byte(ids)
    assert expected.startswith(joined)
    assert len(expected) - len(joined) <= 3
    rest = "".join(detokenizer.push(token) for token in encode_fallback(" the"))
    assert joined + rest == expected + " the"


@pytest.mark.parametrize("invalid", [1, 2, 3, 4, 7])
def test_invalid_bytes_come_out_before_clean_text(invalid: int) -> None:
    for decode, text in ((decode_bytes, list(b"abc")), (decode_fallback, encode_fallback("cas"))):
        detokenizer = Detokenizer(decode, encode_fallback("😀") if decode is decode_fallback else ())
        joined = "".join(detokenizer.push(token) for token in [*[0xFF] * invalid, *text])
        assert joined == "\ufffd" * invalid + decode(text)


def test_a_prompt_that_is_cut_inside_a_character_spoils_nothing() -> None:
    for prompt in ("日" * 9, "😀" * 9, "é" * 9, "日é😀" * 5):
        detokenizer = Detokenizer(decode_fallback, encode_fallback(prompt))
        assert "".join(detokenizer.push(token) for token in encode_fallback("本c")) == "本c"


def test_character_begun_by_the_prompt_is_completed() -> None:
    euro = "€".encode()
    detokenizer = Detokenizer(decode_bytes, list(b"costs " + euro[:1]))
    assert [detokenizer.push(byte) for byte in euro[1:] + b"5"] == ["", "€", "5"]


def test_leading_spaces_and_byte_fallback_of_sentencepiece() -> None:
    words = ("\u2581cat", "s", "\u2581the", "<0xC3>", "<0xA9>", "\u2581", ".")
    ids = [FALLBACK.token_to_id(word) for word in words]
    detokenizer = Detokenizer(decode_fallback, [FALLBACK.token_to_id("\u2581the")])
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


def test_characters_that_straddle_all_tokens_come_out_at_bounded_cost() -> None:
    """Tokens of a byte-level vocabulary may each end one character and begin the next: there is no border."""
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return b"".join([b"\xe4", b"\xbd\xa0\xe4"][token] for token in ids).decode(errors="replace")

    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(token) for token in [0, *[1] * 1000]]
    assert pieces == ["", *["\u4f60"] * 1000]
    assert longest < 300


def test_stop_string_across_pieces_is_not_shown() -> None:
    stops = StopStrings(["END", "\n\n"])
    assert stops.push("one E") == ("one ", False)
    assert stops.push("N") == ("", False)
    assert stops.push("T") == ("ENT", False)
    assert stops.push("two\n") == ("two", False)
    assert stops.push("\nthree") == ("", True)


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
