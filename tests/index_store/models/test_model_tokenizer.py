"""Tokenizers: what texts become, and what is too long for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index_store.errors import InvalidArgumentError, ModelUnsupportedError
from index_store.models import tokenizer as tokenizer_module
from index_store.models.loading import resolve_model
from index_store.models.model_folder import ModelFolder
from index_store.models.tokenizer import Tokenizer, load_tokenizer
from tests.support.models import BEGIN_TOKEN, write_model_folder
from tests.support.store import raising


def test_tokenizer_round_trip_and_special_ids(llama: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(llama)))
    assert tokenizer.decode(tokenizer.encode("Grüße, 東京!\n ok")) == "Grüße, 東京!\n ok"
    assert tokenizer.encode("") == []
    assert tokenizer.prefix_ids == ()
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.decode([0, *tokenizer.encode("end"), 0]) == "end"

    several = tmp_path / "several"
    shutil.copytree(llama, several)
    (several / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert load_tokenizer(resolve_model(str(several))).eos_ids == (0, 5)


def test_an_id_that_would_take_all_memory_is_refused(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "large")
    file = tmp_path / "large" / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["model"]["vocab"]["A"] = 2**31
    file.write_text(json.dumps(settings))
    with pytest.raises(ModelUnsupportedError, match="the id 2147483648, expected at most 16777215"):
        load_tokenizer(ModelFolder(tmp_path / "large", "large"))


def test_begin_token_is_for_the_context_not_for_questions(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}Q: {{ message['content'] }} A:{% endfor %}"
    folder = write_model_folder(tmp_path / "model", add_begin=True, chat_template=template)
    tokenizer = load_tokenizer(resolve_model(str(folder)))
    assert tokenizer.prefix_ids == (2,)
    assert 2 not in tokenizer.encode("text")
    assert tokenizer.format_question("Why?") == "Q: Why? A:"
    assert BEGIN_TOKEN not in tokenizer.format_question("Why?")


TURNS = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|begin|>system\nBe kind.<|end|>\n"
    "{% endif %}<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def test_a_question_is_one_more_turn(tmp_path: Path) -> None:
    """Also where the token that opens a turn is called the begin-of-text token, and a system message comes unasked."""
    folder = write_model_folder(tmp_path / "model", chat_template=TURNS)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": BEGIN_TOKEN}))
    tokenizer = load_tokenizer(resolve_model(str(folder)))
    assert tokenizer.format_question("Why?") == "<|begin|>user\nWhy?<|end|>\n<|begin|>assistant\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [("Q: {{ messages[-1]['content'] }} A:", "leaves earlier turns out"), (None, "no chat template")],
)
def test_a_template_that_cannot_word_questions_is_refused(
    tmp_path: Path, template: str | None, message: str
) -> None:
    folder = write_model_folder(tmp_path / "model", chat_template=template)
    with pytest.raises(InvalidArgumentError, match=message):
        load_tokenizer(resolve_model(str(folder))).format_question("Why?")


def with_blank_before(folder: Path, way: str) -> Path:
    """The tokenizer of a folder with words that begin with a blank, which it puts before a first text."""
    document = json.loads((folder / "tokenizer.json").read_text())
    metaspace = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": way,
        "split": way == "always",
    }
    document["model"]["vocab"] |= {"\u2581": 259, "\u2581a": 260, "aa": 261}
    document["model"]["merges"] = [["\u2581", "a"], ["a", "a"]]
    if way == "normalizer":
        parts = [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ]
        document["normalizer"], document["pre_tokenizer"] = {"type": "Sequence", "normalizers": parts}, None
    elif way == "bytes":
        document["pre_tokenizer"] = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
    else:
        document["pre_tokenizer"] = metaspace
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("way", ["first", "always", "normalizer", "bytes", "nothing"])
def test_a_text_behind_another_has_nothing_put_before_it(llama: Path, tmp_path: Path, way: str) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    tokenizer = load_tokenizer(
        resolve_model(str(folder if way == "nothing" else with_blank_before(folder, way)))
    )
    first = tokenizer.encode("ab")
    assert (len(first) == 2) == (way in ("nothing", "first", "always", "normalizer"))
    for text in ("ab", "aab", " ab", "\nab", ".ab", "0", "<|endoftext|>ab"):
        whole = tokenizer.encode(f"b{text}")  # no merge begins with a b
        assert [*tokenizer.encode("b"), *tokenizer.encode_behind(text)] == whole
    assert tokenizer.encode_behind("") == []
    assert (tokenizer.encode_behind("ab") == first) == (way == "nothing")


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


@settings(max_examples=60, deadline=None)
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
    with pytest.raises(InvalidArgumentError, match="enough"):
        tokenizers[0].at_least("a b " * 100_000, 100_000, raising(InvalidArgumentError("enough")))
