"""Callers of a service that is killed again and again: each has contexts of its own, and remembers what it was told.

A caller repeats what may be repeated until it is acknowledged, as clients do; what is broken off otherwise, a chat or a
session that was to be kept, is given up. So it knows of every context whether it has to be there. Only of a session
whose keeping was broken off nobody knows: it may be there, whole, or not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from harness.checks import CheckFailedError

from decode_engine.errors import CancelledError
from decode_engine.rpc.client import Client, ContextInfo, Keep, OperationInfo
from index_store.errors import ContextHasChildrenError, ContextNotFoundError
from kills.ports import Gone, Web, broken_off

Result = TypeVar("Result")

PATIENCE_S = 300.0
MOST_CONTEXTS = 5
MOST_OPEN = 2
TOKENS = 8
QUESTIONS = ("\nQuestion: Who counted the ships?\nAnswer:", "\nQuestion: When was it?\nAnswer:")
SENTENCE = "In the year {} the keeper of lamp {} counted {} ships and wrote their names into the book. "


@dataclass
class Made:
    """A context that was acknowledged. title: its display name, which no other has."""

    title: str
    name: str
    parent: Made | None = None
    labels: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)


class Caller:
    """Calls one verb after the other. `act` makes one of them; between two of them `contexts` is exact.

    number: of the caller. The order of what it does is drawn from its number and the seed.
    """

    def __init__(self, number: int, seed: int, client: Client, web: Web) -> None:
        self.contexts: dict[str, Made] = {}  # by title
        self.perhaps: dict[str, Made] = {}  # sessions whose keeping was broken off; by title
        self.open: dict[str, str] = {}  # titles of what operations make, by the operation's name
        self.unwanted: set[str] = set()
        self.did: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self._number = number
        self._made = 0
        self._choices = Random(1000 * seed + number)
        self._client = client
        self._web_port = web

    def act(self) -> None:
        """One verb, and for operations that go on a look at one."""
        self._look()
        verbs: list[tuple[str, int]] = [("chat", 8)]
        if len(self.open) < MOST_OPEN and len(self.contexts) + len(self.open) < MOST_CONTEXTS:
            verbs.append(("create", 12))
        if self.open:
            verbs.append(("cancel", 1))
        if self.contexts:
            verbs += [("keep", 8), ("label", 4), ("delete", 2 if len(self.contexts) < MOST_CONTEXTS else 8)]
        verb = self._choices.choices([name for name, _ in verbs], [weight for _, weight in verbs])[0]
        if verb == "chat" and not self.contexts:
            time.sleep(0.2)
            return
        steps: dict[str, Callable[[], None]] = {
            "create": self._create,
            "cancel": self._cancel,
            "chat": self._chat,
            "keep": self._keep,
            "label": self._label,
            "delete": self._delete,
        }
        steps[verb]()
        self.did[verb] += 1

    def _create(self) -> None:
        title = self._title("c")
        years = range(1700, 1700 + self._choices.randint(8, 45))
        text = "".join(SENTENCE.format(year, title, year % 97) for year in years)
        web = self._web()
        if web is None:
            made = patiently(
                lambda: self._client.create_context(
                    text, wait=False, request_id=f"order {title}", display_name=title
                )
            )
            self.open[made.name] = title
        else:
            file = patiently(lambda: web.upload(text)) if self._choices.random() < 0.3 else None
            self.open[patiently(lambda: web.create(title, None if file else text, file))] = title

    def _look(self) -> None:
        """At an operation that has not ended: it has to be there, and if it has ended, to say the truth."""
        for name in self._choices.sample(sorted(self.open), min(1, len(self.open))):
            operation = patiently(lambda name=name: self._client.get_operation(name))  # type: ignore[misc]
            if operation.done:
                self._end(operation)

    def finish(self) -> None:
        """Waits for all operations."""
        while self.open:
            self._end(patiently(lambda: self._client.wait_operation(next(iter(self.open)))))

    def _end(self, operation: OperationInfo) -> None:
        title = self.open.pop(operation.name)
        if isinstance(operation.error, CancelledError) and operation.name in self.unwanted:
            self.did["cancelled"] += 1
            self._expect_gone(operation.context_name)
        elif operation.context is None or operation.context.state != "ready":
            raise CheckFailedError(f"{operation.name} ended with {operation.error or operation.context}")
        else:
            self.did["done"] += 1
            self.did["gone on with"] += any("went on with" in note for note in operation.notes)
            self.contexts[title] = Made(title, operation.context.name)

    def _cancel(self) -> None:
        name = self._choices.choice(sorted(self.open))
        web = self._web()
        if web is None:
            patiently(lambda: self._client.cancel_operation(name))
        else:
            patiently(lambda: web.cancel(name))
        self.unwanted.add(name)

    def _chat(self) -> None:
        """An answer that ends is the one that was given before; one that does not says so."""
        context, question = self._any(), self._choices.choice(QUESTIONS)
        web = self._web()
        try:
            text = self._ask(context, question) if web is None else web.ask(context.name, question, TOKENS)
        except Exception as error:
            self._give_up("chat", error)
            return
        expected = context.answers.setdefault(question, text)
        if text != expected:
            raise CheckFailedError(f"{context.title} answers {text!r}, and answered {expected!r} before")

    def _ask(self, context: Made, question: str) -> str:
        with self._client.generate(
            context.name, text=question, max_tokens=TOKENS, temperature=0.7, seed=7
        ) as asked:
            return asked.read()

    def _keep(self) -> None:
        context, title = self._any(), self._title("k")
        child = Made(title, "", context.parent or context)
        said = f"\nThe reader of {title} asks who counted."
        try:
            with self._client.generate(
                context.name, text=said, max_tokens=TOKENS, keep=Keep(name=title)
            ) as asked:
                asked.read()
        except Exception as error:
            self._give_up("keep", error)
            self.perhaps[title] = child
            return
        child.name = asked.summary.kept_context
        self.contexts[title] = child

    def _label(self) -> None:
        context, value = self._any(), str(self._choices.randrange(1000))
        web = self._web()
        if web is None:
            patiently(lambda: self._client.update_context(context.name, labels={"mark": value}))
        else:
            patiently(lambda: web.label(context.name, value))
        context.labels["mark"] = value

    def _delete(self) -> None:
        context = self._any()
        children = [made for made in self.contexts.values() if made.parent is context]
        maybe = [made for made in self.perhaps.values() if made.parent is context]
        force = bool(children or maybe) and self._choices.random() < 0.7
        web = None if force else self._web()
        try:
            if web is None:
                patiently(lambda: self._client.delete_context(context.name, allow_missing=True, force=force))
            else:
                patiently(lambda: web.delete(context.name))
        except ContextHasChildrenError:
            if not children and not maybe:
                raise CheckFailedError(f"{context.title} is said to have children, and has none") from None
            return
        if children and not force:
            raise CheckFailedError(f"{context.title} was deleted without its children")
        for made in (context, *children, *maybe):
            self.contexts.pop(made.title, None)
            self.perhaps.pop(made.title, None)
        self._expect_gone(context.name)

    def check(self, listed: dict[str, ContextInfo]) -> None:
        """What a list of all contexts says, by title: all that was acknowledged is there, and nothing else."""
        for title in [title for title in self.perhaps if title in listed]:
            self.contexts[title] = self.perhaps.pop(title)
            self.contexts[title].name = listed[title].name
            self.did["kept without a word"] += 1
        for title, made in self.contexts.items():
            found = listed.get(title)
            if found is None or found.name != made.name:
                raise CheckFailedError(f"{title} ({made.name}) was acknowledged, and the list has {found}")
            if found.state != "ready" or dict(found.labels) != made.labels:
                raise CheckFailedError(f"{title} is {found}, expected it ready with {made.labels}")
            if found.parent != (made.parent.name if made.parent else ""):
                raise CheckFailedError(f"{title} continues {found.parent!r}")

    def titles(self) -> set[str]:
        """Of all that may be there."""
        return {*self.contexts, *self.perhaps, *self.open.values()}

    def _expect_gone(self, name: str) -> None:
        try:
            found = patiently(lambda: self._client.get_context(name))
        except ContextNotFoundError:
            return
        raise CheckFailedError(f"{name} was deleted or cancelled, and is {found}")

    def _any(self) -> Made:
        return self.contexts[self._choices.choice(sorted(self.contexts))]

    def _title(self, letter: str) -> str:
        self._made += 1
        return f"{letter}{self._number}-{self._made}"

    def _web(self) -> Web | None:
        """One of the HTTP ports, or None for gRPC."""
        return self._choices.choice((None, self._web_port))

    def _give_up(self, verb: str, error: Exception) -> None:
        if not broken_off(error):
            raise error
        self.broken[verb] += 1


def patiently(call: Callable[[], Result]) -> Result:
    """Repeats a call until somebody takes it. Raises CheckFailedError where nobody does."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except Exception as error:
            if not broken_off(error):
                raise
            if time.monotonic() > end:
                raise CheckFailedError(f"nobody took a call for {PATIENCE_S:g} s: {error}") from error
            time.sleep(0.1)


__all__ = ["Caller", "Gone", "Made", "patiently"]
