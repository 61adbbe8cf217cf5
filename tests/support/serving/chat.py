"""Tokenizers of chat models, small: real merges, a template in ChatML, and special tokens as published ones have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<repo_name>",
    "<jupyter_start>",
    "<file_sep>",
)
"""Special tokens as SmolLM2 has them, some of its seventeen."""

DEFAULT_SYSTEM = "You are a helpful assistant."

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + DEFAULT_SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's template."""

THINKING = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ message.role + '\n' + content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""In the manner of Qwen: thoughts are left out of earlier answers."""

SPOKEN = ("<think>", "</think>")
"""Added tokens that are not flagged as special: models write them, and templates know them."""

WITH_TOOLS = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ message.content }}\n</tool_response><|im_end|>\n{% elif message.role != 'system' %}"
    "<|im_start|>{{ message.role }}{% if message.name %} name={{ message.name }}{% endif %}{{ '\n' }}"
    "{{ message.content | trim }}{% for call in message.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the manner of Qwen: tools as JSON, contents stripped, names of speakers."""

_WORDS = (
    "The lamp of the grey harbour was lit by a keeper who counted ships in 1948, system user assistant. " * 20
)


def write_chat_tokenizer(folder: Path, template: str = CHATML, *, blank_first: bool = False) -> Path:
    """A folder with a tokenizer of 400 subwords: of bytes, or with `blank_first` of words behind blanks, as Mistral's.

    A tokenizer of the second kind writes a blank before the first text alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(byte_fallback=blank_first, unk_token="<unk>" if blank_first else None))
    special = [*SPECIAL, *(["<unk>"] if blank_first else [])]
    if blank_first:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback()]
        )
        alphabet = ["▁", *map(chr, range(33, 127)), "\n"]
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens: list[Any] = [AddedToken(text, special=True, normalized=False) for text in special]
    trainer = trainers.BpeTrainer(
        vocab_size=800 if blank_first else 400,
        special_tokens=tokens,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS, "\n\n".join(_WORDS.split(",")), "{}<>|_?.\n" * 3], trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in SPOKEN])
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["content"] in (*SPECIAL, *SPOKEN, "<unk>")
    ]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>" if blank_first else "<|endoftext|>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder
