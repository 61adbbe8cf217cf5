"""The tokenizer of a GGUF file: made by transformers, and mended or refused where it would cut texts otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import decoders, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from index_store.models.gguf.gguf_settings import UnusedSettingError

_PREFIX = "tokenizer.ggml."
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_UNUSED_IDS = ("seperator", "cls", "mask", "prefix", "suffix", "middle")
_FIM = ("pre", "suf", "mid", "pad", "rep", "sep")
_USED = frozenset(
    (
        *("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_space_prefix"),
        *(f"{name}_token_id" for name in _IDS),
    )
)
_LABELS = frozenset(
    (*(f"{name}_token_id" for name in _UNUSED_IDS), *(f"fim_{part}_token_id" for part in _FIM))
)
"""Tokens with a meaning that nothing here asks for."""
_NEUTRAL: Mapping[str, object] = {
    "add_eos_token": False,
    "add_sep_token": False,
    "remove_extra_whitespaces": False,
    "token_type_count": 1,
}
_GPT2 = frozenset(("gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "gigachat", "mpt", "olmo", "jais"))
_SINGLE_DIGITS = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
)
_LLAMA_3 = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
)
_WHOLE_WORDS = _LLAMA_3 | {"tekken"}  # a word that is a token is one, whatever the merges say
_BEGINS = _LLAMA_3  # unless the file says otherwise
_BLANK = "\u2581"


def gguf_tokenizer(file: Path, metadata: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """The tokenizer, and the tokens that end an answer. Raises UnusedSettingError for a setting that would be lost."""
    own = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    for name, value in own.items():
        if name in _NEUTRAL and value == _NEUTRAL[name]:
            continue
        if name not in _USED | _LABELS:
            raise UnusedSettingError(f"{_PREFIX}{name} is {value!r}, which is not understood")
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    backend, kind, pre = tokenizer.backend_tokenizer, own.get("model"), own.get("pre")
    if kind == "gpt2":
        _mend_cutting(backend, pre)
        begins = bool(own.get("add_bos_token", pre in _BEGINS))
    elif kind == "llama":
        begins = bool(own.get("add_bos_token", True))
        _mend_blank(backend, bool(own.get("add_space_prefix", True)))
    else:
        raise UnusedSettingError(f"{_PREFIX}model is {kind!r}; understood are gpt2 and llama")
    _mend_beginning(tokenizer, own.get("bos_token_id") if begins else None)
    named = (own.get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    return tokenizer, sorted({int(id_) for id_ in named if id_ is not None})


def _mend_cutting(backend: Any, pre: str | None) -> None:
    if pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre is not None and pre not in _GPT2 and pre not in GGUF_PRE_TOKENIZER_SPLITS:
        raise UnusedSettingError(f"{_PREFIX}pre is {pre!r}, a way of cutting texts that is not known here")
    backend.model.ignore_merges = pre in _WHOLE_WORDS


def _mend_blank(backend: Any, wanted: bool) -> None:
    """Has a text begin with a blank, or not."""
    if (backend.encode("a", add_special_tokens=False).tokens[0][:1] == _BLANK) == wanted:
        return
    if wanted:
        raise UnusedSettingError(f"{_PREFIX}add_space_prefix is true, which its tokenizer would not do")
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_BLANK, prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _mend_beginning(tokenizer: Any, token: int | None) -> None:
    """Has a text begin with a token, or with none."""
    backend = tokenizer.backend_tokenizer
    if token is None:
        backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    else:
        text = backend.id_to_token(int(token))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{text} $A" if " " not in text else [text, "$A"], special_tokens=[(text, int(token))]
        )
