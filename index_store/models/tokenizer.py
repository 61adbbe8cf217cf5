"""Text to token ids and back, and how a model wants to be asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from index_store.errors import InvalidArgumentError
from index_store.models.folder import ModelFolder, first_line, hash_file

# Files that decide which ids a text becomes. tokenizer_config.json counts without its chat template, which decides
# how questions are worded, not how words are cut.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
_PIECE = 2**16  # characters of a long text that are counted at a time
_CUT_TOKENS = 64  # that a cut through a text may add at most, as far as any tokenizer is known to go

_EARLIER_TURN = "A turn that came before."
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A model's own tokenizer.

    prefix_ids: what the tokenizer puts before a text (a begin-of-text token for many models, nothing for others);
        a context starts with it.
    eos_ids: ids that end an answer.
    """

    def __init__(self, backend: Any, name: str, eos_ids: Sequence[int]) -> None:
        self._backend = backend
        self._name = name
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        self.prefix_ids: tuple[int, ...] = self._leading_special_ids()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without begin or end tokens. Special tokens written out in the text are recognised."""
        return list(self._backend(text, add_special_tokens=False, verbose=False)["input_ids"])

    def at_least(self, text: str, enough: int, check: Callable[[], None] = lambda: None) -> int:
        """How many tokens the text has at least, found at a cost that does not grow beyond about `enough` tokens.

        More than `enough` only where `encode` would give more as well; less says nothing. A text that may be accepted
        is encoded at once after this, since where it is cut changes the tokens. check: called between pieces.
        """
        if len(text) <= enough + _PIECE:  # no more than the whole costs
            return 0
        length = len(text.encode("utf-8", "surrogatepass"))
        if length > enough * self._longest_token:
            return -(-length // self._longest_token)
        count = 0
        for start in range(0, len(text), _PIECE):
            check()
            count += max(0, len(self.encode(text[start : start + _PIECE])) - _CUT_TOKENS)
            if count > enough:
                break
        return count

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of text that one token can stand for."""
        return max(
            (len(token.encode("utf-8", "surrogatepass")) for token in self._backend.get_vocab()), default=1
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out, bytes that are no text become U+FFFD."""
        return str(
            self._backend.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def format_question(self, question: str) -> str:
        """The question as a further turn of the model's chat template, ready to follow a context.

        It is what the template adds to a conversation for one turn more. So there is no begin-of-text token in it,
        and no system message, which some templates put before a first turn: in the middle of a text it makes a model
        forget what it has read. Raises InvalidArgumentError when the model has no chat template, when its template
        fails or leaves earlier turns out.
        """
        if not self._backend.chat_template:
            raise InvalidArgumentError(
                f"model {self._name!r} has no chat template, so it is not known how to ask it; "
                "pass the prompt word for word instead"
            )
        earlier = [{"role": "user", "content": "..."}, {"role": "assistant", "content": _EARLIER_TURN}]
        closed = self._after_earlier_turn(earlier, answer_follows=False)
        return self._after_earlier_turn(
            [*earlier, {"role": "user", "content": question}], answer_follows=True
        ).removeprefix(closed)

    def _after_earlier_turn(self, messages: list[dict[str, str]], *, answer_follows: bool) -> str:
        """What the chat template writes behind the words of the earlier turn."""
        try:
            text = str(
                self._backend.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=answer_follows
                )
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"the chat template of model {self._name!r} fails: {first_line(error)}"
            ) from error
        _, found, rest = text.partition(_EARLIER_TURN)
        if not found:
            raise InvalidArgumentError(
                f"the chat template of model {self._name!r} leaves earlier turns out; "
                "pass the prompt word for word instead"
            )
        return rest

    def _leading_special_ids(self) -> tuple[int, ...]:
        plain = self.encode("a")
        whole = list(self._backend("a", add_special_tokens=True)["input_ids"])
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return tuple(whole[:start])
        return ()


def load_tokenizer(folder: ModelFolder) -> Tokenizer:
    """The tokenizer of a model folder. Raises ModelUnsupportedError when its files are missing or unreadable."""
    if not any((folder.path / name).is_file() for name in _VOCABULARY_FILES):
        raise folder.refuse(f"it has no tokenizer (none of {', '.join(_VOCABULARY_FILES)})")
    try:
        backend = AutoTokenizer.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers package raises bare Exception for a file it cannot parse
        raise folder.refuse(_why_not_loaded(folder, error)) from error
    _check_size(folder, len(backend.get_vocab()) - len(backend.get_added_vocab()))
    return Tokenizer(backend, folder.name, _eos_ids(folder, backend.eos_token_id))


def tokenizer_fingerprint(folder: ModelFolder) -> str:
    """SHA-256 over the files that decide which ids a text becomes."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (folder.path / name).is_file():
            digest.update(f"{name} {hash_file(folder.path / name)}\n".encode())
    settings = _read_json(folder, "tokenizer_config.json")
    settings.pop("chat_template", None)
    digest.update(json.dumps(settings, sort_keys=True).encode())
    return digest.hexdigest()


def _check_size(folder: ModelFolder, tokens: int) -> None:
    """Raises ModelUnsupportedError when the tokenizer has more tokens than the model; added ones may never be used."""
    settings = _read_json(folder, "config.json")
    known = settings.get("vocab_size") or (settings.get("text_config") or {}).get("vocab_size")
    if isinstance(known, int) and tokens > known:
        raise folder.refuse(
            f"its tokenizer has {tokens} tokens, its config.json says {known}: they belong to different models; "
            "copy both from where the model comes from"
        )


def _why_not_loaded(folder: ModelFolder, error: Exception) -> str:
    """Which file of the tokenizer is broken, as far as can be told, and what to do."""
    repair = "copy the tokenizer's files anew from where the model comes from"
    if (folder.path / "tokenizer.json").is_file():
        missing = [
            name for name in ("model", "added_tokens") if name not in _read_json(folder, "tokenizer.json")
        ]
        if missing:
            return f"its tokenizer.json has no field {missing[0]!r}; {repair}"
    present = [
        name for name in (*_TOKENIZER_FILES, "tokenizer_config.json") if (folder.path / name).is_file()
    ]
    return (
        f"its tokenizer cannot be loaded from {', '.join(present)} ({type(error).__name__}: {first_line(error)}); "
        f"{repair}"
    )


def _eos_ids(folder: ModelFolder, tokenizer_eos: int | None) -> list[int]:
    """Ids that end an answer: the generation settings may name several, the tokenizer names at most one."""
    named: list[int] = [] if tokenizer_eos is None else [tokenizer_eos]
    for file in ("generation_config.json", "config.json"):
        given = _read_json(folder, file).get("eos_token_id")
        named += given if isinstance(given, list) else [] if given is None else [given]
    return sorted(set(named))


def _read_json(folder: ModelFolder, name: str) -> dict[str, Any]:
    path = folder.path / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise folder.refuse(
            f"its {name} is not JSON ({first_line(error)}); copy the file anew from where the model comes from"
        ) from error
    if not isinstance(content, dict):
        raise folder.refuse(
            f"its {name} is not a JSON object; copy the file anew from where the model comes from"
        )
    return content
