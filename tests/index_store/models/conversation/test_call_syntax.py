"""How models word calls of tools, by their templates, and calls told from text piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from index_store.models.conversation.call_syntax import PLAIN, CallReader, CallSyntax, trigger_of
from index_store.models.conversation.messages import Conversation, Message, Role, Tool, ToolCall
from index_store.models.loading import resolve_model
from index_store.models.tokenizer import Tokenizer, load_tokenizer
from tests.support.serving.chat import CHATML, WITH_TOOLS, write_chat_tokenizer

MARKED = (
    "{% for m in messages %}{% if m.tool_calls %}<repo_name>[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% else %} {{ m.content }}{% endif %}<|im_end|>{% endfor %}"
)
"""In the manner of Mistral: a special token before a list, and ids in earlier calls alone."""

SINGLE = (
    "{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one at a time') }}{% elif m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the manner of Llama: one call, nothing before its JSON."""

ELEMENTS = (
    "{% for m in messages %}{% for c in m.tool_calls %}<function={{ c.function.name }}>{% for name, value in "
    "c.function.arguments.items() %}<{{ name }}>{{ value }}</{{ name }}>{% endfor %}</function>{% endfor %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)
"""Arguments that are no JSON."""

HERMES = CallSyntax(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    '}\n</tool_call><tool_call>\n{"name": "',
    True,
)


def tokenizer(folder: Path, template: str) -> Tokenizer:
    return load_tokenizer(resolve_model(str(write_chat_tokenizer(folder, template))))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, PLAIN),
        (WITH_TOOLS, HERMES),
        (MARKED, CallSyntax('<repo_name>[{"name": "', '", "arguments": ', "}]", '}, {"name": "', False)),
        (SINGLE, CallSyntax('{"name": "', '", "parameters": ', "}", None, True)),
        (ELEMENTS, None),
    ],
)
def test_the_syntax_is_found_in_the_template(
    tmp_path: Path, template: str, expected: CallSyntax | None
) -> None:
    assert tokenizer(tmp_path, template).call_syntax == expected


def test_calls_without_words_for_them_are_plain_text(tmp_path: Path) -> None:
    """What the model said, and a user's message, which the template can say."""
    model = tokenizer(tmp_path, CHATML)
    asked, call = Message(Role.USER, "Who?"), ToolCall("look", '{"at": "it"}', "a")
    said = (
        asked,
        Message(Role.ASSISTANT, "So.", tool_calls=(call,)),
        Message(Role.TOOL, "He.", tool_call_id="a"),
    )
    plain = (
        asked,
        Message(Role.ASSISTANT, 'So.\n{"name": "look", "arguments": {"at": "it"}}'),
        Message(Role.USER, "He."),
    )
    assert model.encode_conversation(Conversation(said)) == model.encode_conversation(Conversation(plain))


@pytest.mark.parametrize(
    ("text", "forced", "said", "calls"),
    [
        ("No call at all. <tool", False, "No call at all. <tool", []),
        ('Well. \n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', False, "Well.", [("a", "{}")]),
        ("a < b\n<tool_ca <tool_call> no", False, "a < b\n<tool_ca", []),
        (
            '<tool_call>\n{"name": "a", "arguments": {"x": "}]\\"{", "y": [{}]}}\n</tool_call>'
            '<tool_call>\n{"name": "bb", "arguments": {"z": 1}}\n</tool_call>',
            True,
            "",
            [("a", '{"x": "}]\\"{", "y": [{}]}'), ("bb", '{"z": 1}')],
        ),
        ('<tool_call>\n{"name": "a", "arguments": {"x": "cut o', True, "", [("a", '{"x": "cut o')]),
        ('<tool_call>\n{"name": "cut', True, "", []),
    ],
)
def test_calls_are_told_from_text_however_it_comes(
    text: str, forced: bool, said: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 3, 7, len(text)):
        reader = CallReader(HERMES, forced=forced)
        told, found = "", []
        for start in range(0, len(text), size):
            words, parts = reader.push(text[start : start + size])
            told += words
            for part in parts:
                if part.name:
                    found.append([part.name, ""])
                    assert (part.index, len(part.id)) == (len(found) - 1, 9)
                found[part.index][1] += part.arguments
        assert (told + reader.flush(), [tuple(call) for call in found]) == (said, calls)
        assert reader.finished == sum(arguments.endswith("}") for _, arguments in calls)


def test_text_that_cannot_begin_a_call_is_not_held_back() -> None:
    reader = CallReader(HERMES, forced=False)
    assert [reader.push(piece)[0] for piece in ("Well", " then", ", <to", "ad", "> ", "x")] == [
        "Well",
        " then",
        ",",
        " <toad",
        ">",
        " x",
    ]


def test_what_begins_a_call() -> None:
    assert trigger_of(HERMES) == "<tool_call>"
    assert trigger_of(PLAIN) == PLAIN.open


def test_strictness_is_not_told_to_the_model(tmp_path: Path) -> None:
    model = tokenizer(tmp_path, WITH_TOOLS)
    schema = json.dumps({"type": "object", "properties": {"at": {"type": "string"}}})
    loose, strict = (Tool("look", "Looks.", schema, given) for given in (False, True))
    asked = (Message(Role.USER, "Who?"),)
    assert model.encode_conversation(Conversation(asked, (loose,))) == model.encode_conversation(
        Conversation(asked, (strict,))
    )
