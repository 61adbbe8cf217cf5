"""Long texts are refused before they are cut, and no text that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index_store.errors import InvalidArgumentError
from index_store.models import tokenizer as tokenizer_module
from index_store.models.loading import resolve_model
from index_store.models.tokenizer import Tokenizer, load_tokenizer
from tests.support.models import write_model_folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """One of subwords, one of bytes."""
    folder: Path = tmp_path_factory.mktemp("tokenizers") / "model"
    return [load_tokenizer(resolve_model(str(name))) for name in ("reader", write_model_folder(folder))]


_WORDS = st.sampled_from(
    ["the ", "lamp", " ", "\n", "\n\n\n", "  \t", "12345", "é", "ع", "日本", "😀", "<|endoftext|>"]
)
_TEXTS = st.builds(
    lambda parts, times: "".join(parts) * times, st.lists(_WORDS | st.text(), max_size=8), st.integers(1, 80)
)


@settings(max_examples=150, deadline=None)
@given(text=_TEXTS, enough=st.integers(0, 200), piece=st.integers(64, 700))
def test_a_text_that_fits_is_never_refused(
    tokenizers: list[Tokenizer], text: str, enough: int, piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_PIECE", piece)
        for tokenizer in tokenizers:
            if tokenizer.at_least(text, enough) > enough:
                assert len(tokenizer.encode(text)) > enough


def test_a_long_text_is_cut_no_further_than_needed(tokenizers: list[Tokenizer]) -> None:
    reader, _ = tokenizers
    pieces = 0

    def count() -> None:
        nonlocal pieces
        pieces += 1

    text = "The keeper counted ships. " * 40_000  # a million characters in 16 pieces, 160,000 tokens or more
    assert reader.at_least(text, 80_000, count) > 80_000
    assert 4 <= pieces <= 10
    assert reader.at_least(text, 10, count) > 10
    assert pieces <= 10  # its bytes alone are too many
    assert reader.at_least(text, 10**6, count) == 0


def test_who_gave_up_ends_the_counting(tokenizers: list[Tokenizer]) -> None:
    def check() -> None:
        raise InvalidArgumentError("enough")

    with pytest.raises(InvalidArgumentError, match="enough"):
        tokenizers[0].at_least("a b " * 100_000, 100_000, check)
