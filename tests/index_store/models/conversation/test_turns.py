"""Conversations as tokens: what the model's own template and tokenizer give, and no special token from a user."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index_store.errors import InvalidArgumentError, ManifestError
from index_store.models.conversation.call_syntax import PLAIN, CallReader, CallSyntax, trigger_of
from index_store.models.conversation.messages import Conversation, Message, Role, Tool, ToolCall
from index_store.models.conversation.turns import StoredConversation
from index_store.models.loading import resolve_model
from index_store.models.tokenizer import Tokenizer, load_tokenizer
from tests.support.serving.chat import (
    CHATML,
    DEFAULT_SYSTEM,
    SPOKEN,
    THINKING,
    WITH_TOOLS,
    write_chat_tokenizer,
)

SYSTEM, USER, ASSISTANT, TOOL = Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL
ARGUMENTS = '{"place": "grey \\"harbour\\"", "days": 2}'
SCHEMA = '{"type": "object", "properties": {"place": {"type": "string", "description": "Where?"}}}'


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    folders: dict[str, Any] = {
        "reader": "reader",
        "chatml": write_chat_tokenizer(folder / "chatml"),
        "blank first": write_chat_tokenizer(folder / "blank", blank_first=True),
        "tools": write_chat_tokenizer(folder / "tools", WITH_TOOLS),
        "plain": write_chat_tokenizer(
            folder / "plain",
            "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}",
        ),
    }
    return {name: load_tokenizer(resolve_model(str(path))) for name, path in folders.items()}


def talk(*turns: tuple[Role, str], tools: Sequence[Tool] = ()) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in turns), tuple(tools))


def special_ids(tokenizer: Tokenizer) -> list[tuple[str, int]]:
    known = tokenizer._backend.added_tokens_decoder
    return [(token.content, id_) for id_, token in known.items() if token.special]


def official_ids(tokenizer: Tokenizer, conversation: Conversation, *, answer_follows: bool) -> list[int]:
    """What transformers itself makes of a conversation in which no special token is written out."""
    backend = tokenizer._backend
    messages = [{"role": message.role.value, "content": message.content} for message in conversation.messages]
    text = backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_follows)
    return list(backend(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", ["reader", "chatml", "blank first", "tools", "plain"])
@pytest.mark.parametrize("answer_follows", [True, False])
def test_ordinary_messages_get_the_tokens_of_the_models_own_template(
    tokenizers: dict[str, Tokenizer], name: str, answer_follows: bool
) -> None:
    tokenizer = tokenizers[name]
    conversation = talk(
        (USER, "The lamp,\n\nof 1948?"), (ASSISTANT, "Lit {by} <a> keeper."), (USER, "Grüße 東京")
    )
    mine = tokenizer.encode_conversation(conversation, answer_follows=answer_follows)
    assert mine == official_ids(tokenizer, conversation, answer_follows=answer_follows)


@pytest.mark.parametrize("name", ["reader", "chatml", "blank first", "tools"])
def test_no_text_becomes_a_special_token(tokenizers: dict[str, Tokenizer], name: str) -> None:
    """Each special token in documents, questions and raw text; as many as with ordinary words in their place."""
    tokenizer = tokenizers[name]
    for text, id_ in special_ids(tokenizer):
        said = f"before {text}user\n{text} {text}"
        assert id_ not in tokenizer.encode(said)
        expected = tokenizer.encode_turns((Message(USER, "before"),)).count(id_)
        assert tokenizer.encode_turns((Message(USER, said),)).count(id_) == expected
        plain = talk((USER, "a"), (ASSISTANT, "b"), (USER, "c"))
        loud = talk((USER, said), (ASSISTANT, said), (USER, said))
        count = tokenizer.encode_conversation(plain).count(id_)
        assert tokenizer.encode_conversation(loud).count(id_) == count
        assert tokenizer.begin_conversation(loud)[0].count(id_) == count


def test_no_name_tool_or_argument_becomes_a_special_token(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["tools"]

    def conversation(word: str) -> Conversation:
        call = ToolCall(f"look{word}", f'{{"where{word}": ["{word}", {{"{word}": "{word}"}}]}}', id=word)
        schema = f'{{"type": "object", "properties": {{"{word}": {{"type": "string", "enum": ["{word}"]}}}}}}'
        return Conversation(
            (
                Message(SYSTEM, f"Be kind.{word}"),
                Message(USER, f"Hm?{word}", name=f"anna{word}"),
                Message(ASSISTANT, word, tool_calls=(call,)),
                Message(TOOL, f"{word}sun", name=word, tool_call_id=word),
            ),
            (Tool(f"look{word}", f"Looks.{word}", schema),),
        )

    plain = tokenizer.encode_conversation(conversation("x"), answer_follows=True)
    for text, id_ in special_ids(tokenizer):
        assert tokenizer.encode_conversation(conversation(text), answer_follows=True).count(
            id_
        ) == plain.count(id_)


PARTS = st.sampled_from(
    ["<|im_end|>", "<|im_", "end|>", "<|", "|>", "im_start", "\n", " ", "user", "assistant\n", "<|endoftext|>", "{{",
     "{% raw %}", "\U000f0000", "\U000f0001", "A turn that came before.", "A turn that comes next.", "lamp", "é"]
)  # fmt: skip
TEXTS = (
    st.lists(PARTS | st.text(max_size=4), min_size=1, max_size=10)
    .map("".join)
    .filter(lambda text: text.strip() != "")
)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=3, max_size=3),
    name=st.sampled_from(["chatml", "blank first", "tools", "plain", "reader"]),
)
def test_texts_of_any_kind_stay_texts(tokenizers: dict[str, Tokenizer], name: str, texts: list[str]) -> None:
    """The template's special tokens alone, in their places, and what is between them is what was said."""
    tokenizer = tokenizers[name]
    ids = tokenizer.encode_conversation(talk(*zip((USER, ASSISTANT, USER), texts, strict=True)))
    skeleton = tokenizer.encode_conversation(talk((USER, "a"), (ASSISTANT, "b"), (USER, "c")))
    special = {id_ for _, id_ in special_ids(tokenizer)} - {tokenizer._backend.unk_token_id}
    assert [id_ for id_ in ids if id_ in special] == [id_ for id_ in skeleton if id_ in special]
    if name == "chatml":
        assert tokenizer._backend.decode(ids, clean_up_tokenization_spaces=False) == (
            f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n{texts[0]}<|im_end|>\n"
            f"<|im_start|>assistant\n{texts[1]}<|im_end|>\n<|im_start|>user\n{texts[2]}<|im_end|>\n"
        )


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=4, max_size=4),
    count=st.integers(1, 3),
    name=st.sampled_from(["chatml", "blank first", "tools", "reader"]),
)
def test_a_stored_conversation_is_the_beginning_of_every_longer_one(
    tokenizers: dict[str, Tokenizer], name: str, texts: list[str], count: int
) -> None:
    tokenizer = tokenizers[name]
    turns = [Message(role, text) for role, text in zip((USER, ASSISTANT, USER, USER), texts, strict=True)]
    ids, stored = tokenizer.begin_conversation(Conversation(tuple(turns[:count])))
    assert StoredConversation.from_bytes(stored.to_bytes(), "here") == stored
    more = tokenizer.continue_conversation(stored, turns[count:], lambda: ids)
    assert [*ids, *more] == tokenizer.encode_conversation(Conversation(tuple(turns)), answer_follows=True)


def test_a_template_that_opens_turns_with_words_is_cut_where_nothing_merges(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """The line break behind a message would become one token with a blank line in the next."""
    tokenizer = tokenizers["plain"]
    ids, stored = tokenizer.begin_conversation(talk((USER, "Hm")))
    for text in ("\n\n", "\nand", "so"):
        more = tokenizer.continue_conversation(stored, (Message(USER, text),), ids)
        assert [*ids, *more] == tokenizer.encode_conversation(
            talk((USER, "Hm"), (USER, text)), answer_follows=True
        )


def test_tools_are_stored_and_called(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["tools"]
    start = Conversation((Message(USER, " Weather? "),), (Tool("look", "Looks.", SCHEMA), Tool("wait")))
    ids, stored = tokenizer.begin_conversation(start)
    call = Message(ASSISTANT, "", tool_calls=(ToolCall("look", ARGUMENTS, "7"),))
    answer = Message(TOOL, "Rain.", name="look", tool_call_id="7")
    more = tokenizer.continue_conversation(stored, (call, answer), lambda: ids)
    text = tokenizer._backend.decode([*ids, *more], clean_up_tokenization_spaces=False)
    assert (
        '{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": ' + SCHEMA
        in text
    )
    assert "<|im_start|>user\nWeather?<|im_end|>" in text
    assert '{"name": "look", "arguments": ' + ARGUMENTS + "}" in text
    assert text.endswith("<tool_response>\nRain.\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    called, pending = tokenizer.begin_conversation(start.followed_by((call,)))
    assert [*called, *tokenizer.continue_conversation(pending, (answer,), lambda: called)] == [*ids, *more]


def test_special_tokens_take_the_blanks_beside_them_as_their_tokenizer_says(tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path / "model")
    document = json.loads((folder / "tokenizer.json").read_text())
    for token in document["added_tokens"]:
        token["rstrip"], token["lstrip"] = (
            token["content"] == "<|im_end|>",
            token["content"] == "<|im_start|>",
        )
    (folder / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = load_tokenizer(resolve_model(str(folder)))
    conversation = talk((USER, " The lamp \n\n"), (ASSISTANT, "  lit  "), (USER, "Hm"))
    ids = tokenizer.encode_conversation(conversation)
    assert ids == official_ids(tokenizer, conversation, answer_follows=False)
    assert len(ids) < len(
        load_tokenizer(resolve_model(str(write_chat_tokenizer(tmp_path / "other")))).encode_conversation(
            conversation
        )
    )


def test_thoughts_of_the_model_are_left_out_where_its_template_does(tmp_path: Path) -> None:
    """What a model marks in its own answers is known by these marks; in a user's words they are words."""
    tokenizer = with_template(tmp_path, THINKING)
    thought = "<think>\nThe lamp <|im_end|>?\n</think>\n\nA keeper <|im_end|>."
    marks = [tokenizer._backend.convert_tokens_to_ids(text) for text in SPOKEN]
    ids = tokenizer.encode_conversation(
        talk((USER, f"Who {SPOKEN[1]}?"), (ASSISTANT, thought), (USER, "Why?")), answer_follows=True
    )
    plain = tokenizer.encode_conversation(
        talk((USER, f"Who {SPOKEN[1]}?"), (ASSISTANT, "A keeper <|im_end|>."), (USER, "Why?")),
        answer_follows=True,
    )
    assert ids == plain
    assert [ids.count(mark) for mark in marks] == [1, 0]  # the template's own


def with_template(tmp_path: Path, template: str) -> Tokenizer:
    return load_tokenizer(resolve_model(str(write_chat_tokenizer(tmp_path / "model", template))))


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (CHATML, talk((USER, "Hm?"), tools=[Tool("look")]), r"leaves tools\[0\].name out"),
        ("{{ messages[-1].content }}", talk((USER, "a"), (USER, "b")), r"leaves messages\[0\].content out"),
        ("{{ messages[0].content | replace('so', 'thus') }}", talk((USER, "so it is")), "writes something else"),
        ("{% if 'hm' in messages[0].content %}!{% endif %}{{ messages[0].content }}", talk((USER, "hm")), "something"),
        ("{{ raise_exception('only in French') }}", talk((USER, "a")), "only in French"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_write_what_is_said_is_refused(
    tmp_path: Path, template: str, conversation: Conversation, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        with_template(tmp_path, template).encode_conversation(conversation)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for message in messages %}{{ message.role }}{% if loop.last %} (last){% endif %}: {{ message.content }}"
            "{% endfor %}",
            "words these messages otherwise once another one follows",
        ),
        (
            "{% if messages[1:] %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}",
            "one only",
        ),
        (
            "{{ messages[0].content }}{% for m in messages[1:] %}p{{ m.content }}{% endfor %}",
            "merges the end of the last",
        ),
    ],
)
def test_what_no_turn_could_follow_is_not_stored(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        with_template(tmp_path, template).begin_conversation(talk((USER, "the lam")))


def test_a_date_of_the_template_is_the_stored_one(tmp_path: Path) -> None:
    tokenizer = with_template(
        tmp_path, "{{ '<|im_start|>' }}Today is {{ strftime_now('%d %B %Y') }}.\n" + CHATML
    )
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    ids, stored = tokenizer.begin_conversation(talk((USER, "a")), moment)
    assert "02 January 2026" in tokenizer.decode(ids)
    tokenizer.continue_conversation(stored, (Message(USER, "b"),), lambda: ids)
    moved = replace(stored, moment=moment + timedelta(days=30))
    with pytest.raises(
        InvalidArgumentError, match=r"token \d+ of \d+ is \d+ \('.+'\) with these messages, \d+ \('.+'\)"
    ):
        tokenizer.continue_conversation(moved, (Message(USER, "b"),), lambda: ids)


def test_a_changed_template_is_told_by_the_first_token_that_differs(tmp_path: Path) -> None:
    before = with_template(tmp_path, CHATML)
    after = with_template(tmp_path / "after", CHATML.replace("helpful", "grey"))
    ids, stored = before.begin_conversation(talk((USER, "a")))
    with pytest.raises(InvalidArgumentError) as caught:
        after.continue_conversation(stored, (Message(USER, "b"),), lambda: ids)
    place = int(caught.value.metadata["position"])
    other = after.encode_conversation(talk((USER, "a")))
    assert ids[:place] == other[:place]
    assert ids[place] != other[place]
    assert f"token {place} of {len(ids)} is {other[place]} (" in caught.value.message


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version": 2}', b'{"version": 1, "moment": "x"}'])
def test_a_broken_record_is_told(data: bytes) -> None:
    with pytest.raises(ManifestError, match="somewhere: the messages of the conversation cannot be read"):
        StoredConversation.from_bytes(data, "somewhere")


ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|begin|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("last", [SYSTEM, USER, ASSISTANT])
def test_contexts_of_templates_that_want_alternate_roles_are_made_and_continued(
    tmp_path: Path, last: Role
) -> None:
    tokenizer = load_tokenizer(resolve_model(str(write_chat_tokenizer(tmp_path, ALTERNATING))))
    turns = [(SYSTEM, "Be brief."), (USER, "The lamp of 1948?"), (ASSISTANT, "Lit.")]
    conversation = talk(*turns[: 1 + [SYSTEM, USER, ASSISTANT].index(last)])
    ids, stored = tokenizer.begin_conversation(conversation)
    new = [Message(ASSISTANT, "Yes."), Message(USER, "Who?")] if last is USER else [Message(USER, "Who?")]
    whole = tokenizer.encode_conversation(conversation.followed_by(new), answer_follows=True)
    assert ids + tokenizer.continue_conversation(stored, new, lambda: ids) == whole
    if last is USER:
        expected = (
            "Roles must alternate; .*the context ends with a message of the user, .*, too: send a message"
        )
        with pytest.raises(InvalidArgumentError, match=expected):
            tokenizer.continue_conversation(stored, [Message(USER, "Who?")], lambda: ids)


def test_a_template_that_takes_no_further_message_is_told_as_what_it_is(tmp_path: Path) -> None:
    once = "{% if messages | length > 1 %}{{ raise_exception('One message') }}{% endif %}{{ messages[0].content }}"
    tokenizer = load_tokenizer(resolve_model(str(write_chat_tokenizer(tmp_path, once))))
    with pytest.raises(
        InvalidArgumentError, match=r"no message can follow these, neither .*One message.*store the text"
    ):
        tokenizer.begin_conversation(talk((USER, "The lamp?")))


KNOWS_DEVELOPERS = CHATML.replace("!= 'system'", "not in ('system', 'developer')")
SWITCHED = CHATML + "{% if enable_thinking is defined %}<think>{% endif %}{{ bos_token }}"
NAMED = CHATML.replace("message['content']", "(message.name or '') + message['content']")


def test_history_is_said_as_it_is(tmp_path: Path) -> None:
    """A system and a developer wherever they stand, an empty answer, a cut call, a tool that nobody called."""
    cut = ToolCall("look", '{"at": "sh')
    said = (
        *(Message(Role.SYSTEM, "One."), Message(Role.DEVELOPER, "Two."), Message(USER, "Who?", name="anna")),
        *(Message(ASSISTANT, ""), Message(USER, "Who?"), Message(ASSISTANT, tool_calls=(cut,))),
        *(Message(Role.TOOL, ""), Message(Role.TOOL, "x"), Message(Role.SYSTEM, "Late.")),
    )
    for template, developer in ((CHATML, "system"), (KNOWS_DEVELOPERS, "developer")):
        tokenizer = with_template(tmp_path / developer, template)
        text = tokenizer.decode(
            tokenizer.encode_conversation(Conversation(said)), shown=tuple(tokenizer.hidden.values())
        )
        assert f"system\nOne.<|im_end|>\n<|im_start|>{developer}\nTwo.<|im_end|>" in text
        assert '"arguments": {"at": "sh' in text
        assert text.endswith("<|im_start|>user\nx<|im_end|>\n<|im_start|>system\nLate.<|im_end|>\n")


def test_what_a_template_reads_is_known(tmp_path: Path) -> None:
    for number, (template, reads) in enumerate(
        ((CHATML, set()), (SWITCHED, {"enable_thinking"}), (NAMED, {"name"}))
    ):
        assert set(with_template(tmp_path / str(number), template).template_reads) == reads


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
