"""Text and conversations to token ids and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import msgspec

from index_store.errors import InvalidArgumentError
from index_store.models.conversation.call_syntax import CallSyntax
from index_store.models.conversation.chat_template import ChatTemplate, OrdinaryText
from index_store.models.conversation.messages import Conversation
from index_store.models.conversation.turns import ConversationTokens
from index_store.models.digests import hash_file
from index_store.models.model_folder import ModelFolder, first_line

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
_MOST_IDS = 2**24
_PIECE = 2**16  # characters of a long text that are counted at a time
_CUT_TOKENS = 64  # that a cut through a text may add at most, as far as any tokenizer is known to go

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer(ConversationTokens):
    """A model's own tokenizer, and its chat template.

    prefix_ids: what the tokenizer puts before a text (a begin-of-text token for many models, nothing for others);
        a context of plain text starts with it.
    eos_ids: ids that end an answer.
    """

    def __init__(self, backend: Any, name: str, eos_ids: Sequence[int]) -> None:
        self._backend = backend
        self._name = name
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        ordinary = OrdinaryText(backend, self.eos_ids)
        ends = [token.text for token in ordinary.special if token.id in self.eos_ids]
        super().__init__(ChatTemplate(backend, name, ordinary.letterless, ordinary.spoken, ends), ordinary)
        self.prefix_ids: tuple[int, ...] = self._leading_special_ids()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without begin or end tokens. Special tokens written out in it are ordinary text.

        Raises InvalidArgumentError for a text that the tokenizer can only write by a special token.
        """
        return self._ordinary.encode(text)

    def encode_behind(self, text: str) -> list[int]:
        """Token ids of a text that goes on where a context ends: the blank or the like that some tokenizers put before
        a first text is left out. Raises as `encode` does.
        """
        return self._ordinary.encode_behind(text)

    def encode_conversation(
        self, conversation: Conversation, *, answer_follows: bool = False, moment: datetime | None = None
    ) -> list[int]:
        """Token ids of what the chat template writes for a conversation, in which users' texts are ordinary text.

        answer_follows: up to where the model's answer begins. moment: what a template takes for the present.
        Raises InvalidArgumentError when the model has no chat template, or its template fails, leaves a text out, or
        rewrites one.
        """
        moment = moment or datetime.now(UTC)
        rendering = self._template.render(conversation, moment, answer_follows=answer_follows)
        return self._ordinary.encode_rendering(rendering)

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

    @property
    def call_syntax(self) -> CallSyntax | None:
        """How the model words calls of tools; None in a way that is not understood.

        Raises InvalidArgumentError when the model has no chat template.
        """
        return self._template.calls

    @property
    def template_reads(self) -> Collection[str]:
        """What the chat template reads beside roles, contents, calls and tools (`ChatTemplate.reads`)."""
        return self._template.reads

    @cached_property
    def hidden(self) -> Mapping[str, int]:
        """Special tokens that `decode` leaves out, by their texts."""
        known = self._backend.added_tokens_decoder
        return {token.text: token.id for token in self._ordinary.special if known[token.id].special}

    def decode(self, ids: Sequence[int], shown: Collection[int] = ()) -> str:
        """Text of token ids; special tokens are left out but for those shown, bytes that are no text become U+FFFD."""
        if shown:
            left_out = set(self.hidden.values()).difference(shown)
            ids = [id_ for id_ in ids if id_ not in left_out]
        return str(
            self._backend.decode(list(ids), skip_special_tokens=not shown, clean_up_tokenization_spaces=False)
        )

    def definition(self) -> str:
        """The tokenizer as JSON, in the form of tokenizer.json, with all of its added tokens.

        Raises InvalidArgumentError for one of another kind.
        """
        fast = getattr(self._backend, "backend_tokenizer", None)
        if fast is None:
            raise InvalidArgumentError(
                f"the tokenizer of model {self._name!r} is of a kind whose tokens have no known bytes; "
                "log probabilities and constraints need one with a tokenizer.json"
            )
        return str(fast.to_str())

    def _leading_special_ids(self) -> tuple[int, ...]:
        plain = self.encode("a")
        whole = list(self._backend("a", add_special_tokens=True)["input_ids"])
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return tuple(whole[:start])
        return ()


def load_tokenizer(folder: ModelFolder, fingerprint: str | None = None) -> Tokenizer:
    """The tokenizer of a model folder.

    fingerprint: that it has to have, as it was found before. Raises ModelUnsupportedError when its files are missing,
    unreadable or others than those.
    """
    if not any((folder.path / name).is_file() for name in _VOCABULARY_FILES):
        raise folder.refuse(f"it has no tokenizer (none of {', '.join(_VOCABULARY_FILES)})")
    _check_ids(folder)
    from transformers import AutoTokenizer  # takes seconds, which those who only name a tokenizer do without

    try:
        backend = AutoTokenizer.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers package raises bare Exception for a file it cannot parse
        raise folder.refuse(_why_not_loaded(folder, error)) from error
    if fingerprint is not None and tokenizer_fingerprint(folder) != fingerprint:
        raise folder.refuse("its tokenizer changed while it was read; try again when nobody writes to it")
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


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]


class _File(msgspec.Struct):
    model: _Vocabulary


def _check_ids(folder: ModelFolder) -> None:
    """Raises ModelUnsupportedError for a vocabulary whose largest id would take all memory: the tokenizers package goes
    through all ids below it. What else may be wrong is found by who loads it."""
    try:
        found = msgspec.json.decode((folder.path / "tokenizer.json").read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return
    largest = max(found.model.vocab.values(), default=0)
    if largest >= _MOST_IDS:
        raise folder.refuse(
            f"its tokenizer.json has the id {largest}, expected at most {_MOST_IDS - 1}; copy it anew from where the "
            "model comes from"
        )


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
