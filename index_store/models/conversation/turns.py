"""Where a stored conversation ends and the next turns begin.

A conversation is stored as far as every further turn leaves it as it is: a template may write, behind its last message,
what depends on the next one, and a tokenizer may merge the end of one with the beginning of the other. From there on,
the next turns are tokenised by themselves. So a context's tokens are always the beginning of the longer conversation's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from index_store.errors import InvalidArgumentError, ManifestError
from index_store.models.conversation.call_syntax import common_start
from index_store.models.conversation.chat_template import ChatTemplate, OrdinaryText, Rendering
from index_store.models.conversation.messages import (
    Conversation,
    Message,
    Role,
    conversation_object,
    read_conversation,
)

RECORD_VERSION = 1
_EARLIER_TURN = "A turn that came before."
_NEXT_TURN = "A turn that comes next."
_MOST_BORDERS = 64
"""Places for the end of a stored conversation that are tried."""


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """What a context of messages keeps of them.

    moment: what the template took for the present (UTC). characters: of the template's text that the stored tokens
    stand for. digest: SHA-256 of these characters, in hex digits.
    """

    conversation: Conversation
    moment: datetime
    characters: int
    digest: str

    def to_bytes(self) -> bytes:
        """As JSON: always the same bytes for the same conversation."""
        record = {
            "version": RECORD_VERSION,
            "moment": self.moment.isoformat(),
            "characters": self.characters,
            "digest": self.digest,
            **conversation_object(self.conversation),
        }
        return json.dumps(record, sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> StoredConversation:
        """Reads what `to_bytes` wrote; `where` names it in errors. Raises ManifestError."""
        try:
            record = json.loads(data)
            if record.pop("version") != RECORD_VERSION:
                raise ValueError(f"its version is not {RECORD_VERSION}")
            moment, characters = datetime.fromisoformat(record.pop("moment")), record.pop("characters")
            digest = record.pop("digest")
            if moment.utcoffset() is None or not isinstance(characters, int) or not isinstance(digest, str):
                raise ValueError("it does not say what it covers")
            return cls(read_conversation(record), moment, characters, digest)
        except (ValueError, TypeError, KeyError, AttributeError, InvalidArgumentError) as error:
            raise ManifestError(
                f"{where}: the messages of the conversation cannot be read ({error}); delete the context "
                "(`index-store rm`) and make it again",
                path=where,
            ) from None


class ConversationTokens:
    """Token ids of conversations, by the words of a chat template and a tokenizer."""

    def __init__(self, template: ChatTemplate, ordinary: OrdinaryText) -> None:
        self._template, self._ordinary = template, ordinary

    def begin_conversation(
        self, conversation: Conversation, moment: datetime | None = None
    ) -> tuple[list[int], StoredConversation]:
        """Token ids of a context of messages that others shall follow, and what is to be kept of it.

        moment: what a template takes for the present. Raises InvalidArgumentError where there is no template or it
        fails, words a message otherwise once another follows it, or takes no turn after the last one.
        """
        return self._stored(conversation, moment or datetime.now(UTC), 0)

    def extend_conversation(
        self, stored: StoredConversation, new: Sequence[Message], stored_ids: Callable[[], Sequence[int]]
    ) -> tuple[list[int], StoredConversation]:
        """Token ids of further messages after a stored conversation, that others shall follow, and what is kept of all.

        Raises InvalidArgumentError as `begin_conversation` and `continue_conversation` do.
        """
        self._check_begins(stored, new, stored_ids, answer_follows=False)
        conversation = stored.conversation.followed_by(new)
        return self._stored(conversation, stored.moment, stored.characters)

    def continue_conversation(
        self, stored: StoredConversation, new: Sequence[Message], stored_ids: Callable[[], Sequence[int]]
    ) -> list[int]:
        """Token ids of further turns after a stored conversation, up to where the model's answer begins.

        stored_ids: tells the context's tokens, which are asked for only where they are not the beginning. Raises
        InvalidArgumentError where the whole conversation does not begin with them, and tells the first that differs.
        """
        whole = self._check_begins(stored, new, stored_ids, answer_follows=True)
        return self._ordinary.encode_rendering(whole.after(stored.characters), first=False)

    def encode_turns(self, new: Sequence[Message]) -> list[int]:
        """Token ids of turns after a context of plain text, up to where the model's answer begins.

        Raises InvalidArgumentError as `begin_conversation` does, and where the template leaves earlier turns out.
        """
        return self._ordinary.encode_rendering(self._after_text(new), first=False, behind_text=True)

    def format_question(self, question: str) -> str:
        """What the chat template writes for a question after a context of plain text; `encode_turns` has its tokens."""
        return self._after_text((Message(Role.USER, question),)).text

    def _stored(
        self, conversation: Conversation, moment: datetime, start: int
    ) -> tuple[list[int], StoredConversation]:
        """Token ids of a conversation from a character of its wording on, as far as a further turn leaves them."""
        whole = self._template.render(conversation, moment, answer_follows=False)
        longer = self._longer(conversation, moment)
        end, needed = common_start(whole.text, longer.text), max(whole.last_mark(), start)
        if end < needed:
            raise InvalidArgumentError(
                f"the chat template of model {self._template.name!r} words these messages otherwise once another one "
                f"follows, near {whole.text[max(end - 30, 0) : end + 30]!r}; add the message that it words them with, "
                "or store the text without messages"
            )
        longer_ids = self._ordinary.encode_rendering(longer.after(start), first=not start)
        for border in range(end, max(end - _MOST_BORDERS, needed - 1), -1):
            ids = self._ordinary.encode_rendering(whole.before(border).after(start), first=not start)
            if ids and ids == longer_ids[: len(ids)]:
                return ids, StoredConversation(conversation, moment, border, _digest(whole.text[:border]))
        raise InvalidArgumentError(
            f"the tokenizer of model {self._template.name!r} merges the end of the last message with what follows it; "
            "end the message otherwise, or store the text without messages"
        )

    def _longer(self, conversation: Conversation, moment: datetime) -> Rendering:
        """The conversation with a turn that may follow it: of whom, is found out by trying."""
        refused: list[InvalidArgumentError] = []
        for turns in _next_turns(conversation):
            try:
                return self._template.render(
                    conversation.followed_by(turns), moment, answer_follows=turns[-1].role != Role.ASSISTANT
                )
            except InvalidArgumentError as error:
                refused.append(error)
        raise InvalidArgumentError(
            f"no message can follow these, neither the user's nor the model's ({refused[0].message}); "
            "store the text without messages"
        ) from refused[0]

    def _check_begins(
        self,
        stored: StoredConversation,
        new: Sequence[Message],
        stored_ids: Callable[[], Sequence[int]],
        *,
        answer_follows: bool,
    ) -> Rendering:
        """The wording of both, in which the new messages are marked. Raises as `continue_conversation`."""
        conversation, known = stored.conversation.followed_by(new), len(stored.conversation.messages)
        try:
            whole = self._template.render(
                conversation, stored.moment, answer_follows=answer_follows, new=known
            )
        except InvalidArgumentError as error:
            raise self._why_not(stored, new, error) from error
        if _digest(whole.text[: stored.characters]) != stored.digest:
            raise self._first_difference(stored, new, stored_ids())
        return whole

    def _why_not(
        self, stored: StoredConversation, new: Sequence[Message], error: InvalidArgumentError
    ) -> InvalidArgumentError:
        """The error of a template that takes no further messages; with what to do where it wants roles to alternate."""
        last = stored.conversation.messages[-1].role
        if not new or new[0].role is not last or last is Role.ASSISTANT:
            return error
        between = stored.conversation.followed_by((Message(Role.ASSISTANT, _NEXT_TURN), *new))
        try:
            self._template.render(between, stored.moment, answer_follows=new[-1].role is not Role.ASSISTANT)
        except InvalidArgumentError:
            return error
        return InvalidArgumentError(
            f"{error.message}; the context ends with a message of the {last.value}, and this one is of the "
            f"{last.value}, too: send a message of the assistant first, or make the context anew with one at its end",
            field="messages",
        )

    def _after_text(self, new: Sequence[Message]) -> Rendering:
        """Turns after a text that is no conversation, up to where the model's answer begins.

        They are what the template adds to a conversation for these turns. So there is no begin-of-text token in them,
        and no system message, which some templates put before a first turn: in the middle of a text it makes a model
        forget what it has read. Raises InvalidArgumentError where the template leaves earlier turns out.
        """
        moment = datetime.now(UTC)
        earlier = Conversation((Message(Role.USER, "..."), Message(Role.ASSISTANT, _EARLIER_TURN)))
        closed = self._after_earlier_turn(self._template.render(earlier, moment, answer_follows=False, new=2))
        whole = self._template.render(earlier.followed_by(new), moment, answer_follows=True, new=2)
        turns = self._after_earlier_turn(whole)
        return turns.after(len(closed.text) if turns.text.startswith(closed.text) else 0)

    def _after_earlier_turn(self, rendering: Rendering) -> Rendering:
        """What the chat template writes behind the words of the earlier turn."""
        start = rendering.text.find(_EARLIER_TURN)
        if start < 0:
            raise InvalidArgumentError(
                f"the chat template of model {self._template.name!r} leaves earlier turns out; "
                "pass the prompt word for word instead"
            )
        return rendering.after(start + len(_EARLIER_TURN))

    def _first_difference(
        self, stored: StoredConversation, new: Sequence[Message], stored_ids: Sequence[int]
    ) -> InvalidArgumentError:
        """The error of a conversation that does not begin with what is stored."""
        whole = self._template.render(
            stored.conversation.followed_by(new), stored.moment, answer_follows=True
        )
        ids = self._ordinary.encode_rendering(whole)
        place = next(
            (place for place, (one, other) in enumerate(zip(ids, stored_ids, strict=False)) if one != other),
            min(len(ids), len(stored_ids)),
        )
        return InvalidArgumentError(
            f"the conversation does not begin with the context's tokens: token {place} of {len(stored_ids)} is "
            f"{self._ordinary.shown(ids[place:])} with these messages, "
            f"{self._ordinary.shown(stored_ids[place:])} in the context; the chat template of the model has changed "
            "since the context was made, or words earlier messages otherwise: prefill the messages again",
            field="messages",
            position=place,
        )


def _next_turns(conversation: Conversation) -> Iterator[tuple[Message, ...]]:
    """Turns that may follow a conversation. Some templates want the roles to alternate."""
    calls = conversation.messages[-1].tool_calls
    if calls:
        yield tuple(Message(Role.TOOL, _NEXT_TURN, name=call.name, tool_call_id=call.id) for call in calls)
        return
    yield (Message(Role.USER, _NEXT_TURN),)
    yield (Message(Role.ASSISTANT, _NEXT_TURN),)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
