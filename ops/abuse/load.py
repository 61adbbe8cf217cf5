"""Clients of both doors that ask and change things, and what they hold a server to.

Every answer is drawn with a seed, so it is the same whatever runs beside it: the calm run says which. What a server
acknowledged has to be there from then on. Every failure has a reason that a caller can do something about, and comes
within the caller's deadline.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from decode_engine.errors import DeadlineExceededError
from decode_engine.rpc.client import Client
from index_store.errors import SparseKVError

DEADLINE_S = 60.0
SLACK_S = 20.0
"""A caller may find out so much later where many processes share the cores."""
TOKENS = 8
QUESTIONS = ("The keeper of the", "In the year of", "What is the name of", "Nobody had seen")
TRUE_REASONS = frozenset(
    {
        *("ENGINE_CRASHED", "SHUTTING_DOWN", "NOT_READY", "UNREACHABLE", "CONNECTION", "DEADLINE_EXCEEDED"),
        *("STORE_FULL", "STORE_UNUSABLE", "STORE_UNAVAILABLE", "OBJECTS_UNAVAILABLE", "CONTEXT_FETCHING"),
        *("MEMORY_BUDGET_EXCEEDED", "CONTEXT_BUSY", "TOO_MANY_REQUESTS", "QUEUE_FULL"),
    }
)
"""How a call may fail under faults. Others are findings, unless a fault explains them (`explained`)."""


MADE_REASONS = frozenset({"WORKERS_LOST", "CANCELLED"})
"""How an operation may end, too: workers that are killed again and again give a job up."""


@dataclass(frozen=True)
class Place:
    """Both doors of one server: HOST:PORT of each."""

    name: str
    grpc: str
    http: str


@dataclass
class Notes:
    """What clients saw. wrong: sentences, each of them a failure of the whole run."""

    answers: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    explained: Callable[[str], bool] = lambda reason: False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note_end(self, what: str, place: str, begun: float, reason: str) -> None:
        """An empty reason: it was answered, and rightly."""
        seconds = time.monotonic() - begun
        with self.lock:
            self.longest_s = max(self.longest_s, seconds)
            if reason:
                self.reasons[reason.partition(":")[0]] += 1
            else:
                self.answers[place] += 1
            if seconds > DEADLINE_S + SLACK_S:
                self.wrong.append(f"{what} took {seconds:.0f} s, its deadline is {DEADLINE_S:g} s")
            if (
                reason
                and reason.partition(":")[0] not in TRUE_REASONS
                and not self.explained(reason.partition(":")[0])
            ):
                self.wrong.append(f"{what} failed with {reason}")

    def note_wrong(self, sentence: str) -> None:
        """Something that may never be."""
        with self.lock:
            self.wrong.append(sentence)


@dataclass(frozen=True)
class Ask:
    """A question about a context. context: its resource name."""

    context: str
    question: str
    method: str


def document(number: int, words: int) -> str:
    """A text of its own, the same in every run."""
    draws = random.Random(f"document {number}")
    names = (
        "keeper",
        "harbour",
        "lamp",
        "winter",
        "letter",
        "captain",
        "garden",
        "silver",
        "window",
        "river",
    )
    ends = (" of the", ",", " and", ".", "")
    return " ".join(draws.choice(names) + draws.choice(ends) for _ in range(words))


def ask_grpc(place: Place, ask: Ask) -> str:
    """The answer. Raises SparseKVError."""
    with (
        Client(place.grpc, timeout_s=DEADLINE_S) as client,
        client.generate(
            ask.context,
            text=ask.question,
            max_tokens=TOKENS,
            method=ask.method,
            seed=5,
            temperature=1.0,
        ) as generation,
    ):
        return generation.read()


class RefusedError(Exception):
    """HTTP's answer was an error of this reason."""


def ask_http(place: Place, ask: Ask, model: str) -> str:
    """The answer as a stream has it. Raises RefusedError, OSError, HTTPException."""
    connection = http.client.HTTPConnection(place.http, timeout=DEADLINE_S)
    body = {
        "model": model,
        "prompt": ask.question,
        "max_tokens": TOKENS,
        "stream": True,
        "seed": 5,
        "temperature": 1.0,
        "context": ask.context.removeprefix("contexts/"),
        "method": ask.method,
    }
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status != 200:
        error = json.loads(data)["error"]
        raise RefusedError(f"{str(error['code']).upper()}: {error['message']}")
    events = [line[6:].strip() for line in data.splitlines() if line.startswith(b"data: ")]
    told = [json.loads(event) for event in events if event != b"[DONE]"]
    for error in (each["error"] for each in told if "error" in each):
        raise RefusedError(f"{str(error['code']).upper()}: {error['message']}")
    if not events or events[-1] != b"[DONE]":
        raise http.client.IncompleteRead(data)
    return "".join(each["choices"][0]["text"] for each in told if each["choices"])


def reason_of(error: Exception) -> str:
    """With the message behind it."""
    if isinstance(error, SparseKVError):
        return f"{error.reason}: {error.message}"
    return str(error) if isinstance(error, RefusedError) else f"CONNECTION: {error!r}"


class Load:
    """Threads that ask, and that change what they have."""

    def __init__(
        self, places: tuple[Place, ...], expected: dict[Ask, str], notes: Notes, model: str, seed: int
    ) -> None:
        """expected: the answers of the calm run."""
        self._places, self._expected, self._notes, self._model = places, expected, notes, model
        self._stopped = threading.Event()
        self._seed = seed
        self.labels: dict[str, tuple[int, int]] = {}
        """By context: the number that was acknowledged last, and the last that was sent."""
        self._threads: list[threading.Thread] = []
        self._steady: list[Ask] = []

    def start(self, askers: int, comings: dict[int, str]) -> None:
        """askers: threads that ask. comings: documents that are made and deleted again and again, with the names of
        their contexts."""
        self._steady = [ask for ask in self._expected if ask.context not in comings.values()]
        self._begin(self._label, self._steady[0].context)
        for number in range(askers):
            self._begin(self._ask_on, number)
        for number, name in comings.items():
            self._begin(self._come_and_go, number, name)

    def stop(self) -> None:
        """Waits for all clients; one that hangs is noted."""
        self._stopped.set()
        end = time.monotonic() + 2 * (DEADLINE_S + SLACK_S)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._notes.note_wrong("a client hangs: its call did not end by its deadline")

    def check(self, place: Place, ask: Ask, door: str) -> bool:
        """Asks once; whether the answer came, which is the right one or noted."""
        begun, what = time.monotonic(), f"{ask.method} over {door} at {place.name}"
        try:
            found = ask_grpc(place, ask) if door == "grpc" else ask_http(place, ask, self._model)
        except (SparseKVError, OSError, http.client.HTTPException, RefusedError) as error:
            self._notes.note_end(what, place.name, begun, reason_of(error))
            return False
        if found != self._expected[ask]:
            self._notes.note_wrong(
                f"{what} about {ask.context[:21]} said {found!r}, expected {self._expected[ask]!r}"
            )
        self._notes.note_end(what, place.name, begun, "")
        return True

    def _begin(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ask_on(self, number: int) -> None:
        draws = random.Random(f"{self._seed} asker {number}")
        place, door = self._places[number % len(self._places)], ("grpc", "http")[number // 2 % 2]
        while not self._stopped.is_set():
            if not self.check(place, draws.choice(self._steady), door):
                self._stopped.wait(draws.uniform(0.1, 0.4))

    def _label(self, context: str) -> None:
        """Sets a label to one number after the other, and sees that none is lost."""
        number, place = 0, self._places[0]
        while not self._stopped.is_set():
            number += 1
            acked = self.labels.get(context, (0, 0))[0]
            self.labels[context] = acked, number
            begun = time.monotonic()
            try:
                with Client(place.grpc, timeout_s=DEADLINE_S) as client:
                    client.update_context(context, labels={"n": str(number)})
                    self.labels[context] = number, number
                    told = client.get_context(context)
            except SparseKVError as error:
                self._notes.note_end("a label", place.name, begun, reason_of(error))
                self._stopped.wait(0.2)
                continue
            # Of one whose manifest cannot be read now the state says so, and nothing else is told.
            if told.state in ("READY", "EXPIRED") and told.labels.get("n") != str(number):
                self._notes.note_wrong(
                    f"label {number} was acknowledged, and {told.labels.get('n')} is there"
                )
            self._stopped.wait(0.05)

    def _come_and_go(self, number: int, name: str) -> None:
        """Has a context made, asks about it, deletes it, and sees that it is gone."""
        place = self._places[0]
        asks = [ask for ask in self._expected if ask.context == name]
        draws = random.Random(f"{self._seed} document {number}")
        while not self._stopped.is_set():
            operation = self._until(lambda client: order(client, number), "ordering a context", place)
            if operation is None:
                return
            made = self._until(lambda client: finished(client, str(operation)), "making a context", place)  # noqa: B023
            if made is None:
                return
            if made != name:  # it failed for a reason that was noted: ordered again
                continue
            for ask in asks:
                self.check(draws.choice(self._places[:1]), ask, draws.choice(("grpc", "http")))
            if (
                self._until(
                    lambda client: client.delete_context(name, allow_missing=True) or True, "deleting", place
                )
                is None
            ):
                return
            begun = time.monotonic()
            try:
                with Client(place.grpc, timeout_s=DEADLINE_S) as client:
                    client.get_context(name)
                self._notes.note_wrong(f"{name} was deleted, which was acknowledged, and is there")
            except SparseKVError as error:
                if error.reason != "CONTEXT_NOT_FOUND":
                    self._notes.note_end("looking for it", place.name, begun, reason_of(error))

    def _until(self, do: Callable[[Client], object], what: str, place: Place) -> object:
        """What was done, however often it has to be asked for; None where the load is stopped before."""
        while not self._stopped.is_set():
            begun = time.monotonic()
            try:
                with Client(place.grpc, timeout_s=DEADLINE_S) as client:
                    return do(client)
            except SparseKVError as error:
                self._notes.note_end(what, place.name, begun, reason_of(error))
                self._stopped.wait(0.3)
        return None


def order(client: Client, number: int, words: int = 60) -> str:
    """Has the context of a document made; the operation that was acknowledged."""
    text = document(number, words)
    return client.create_context(
        text, display_name=f"document-{number}", wait=False, methods=["refined"]
    ).name


def finished(client: Client, operation: str) -> str:
    """The name of the context that an operation has made, or why it failed. Raises SparseKVError."""
    done = client.wait_operation(operation, DEADLINE_S / 2)
    if not done.done:
        raise DeadlineExceededError("it is still being made")
    if done.error is not None and done.error.reason not in TRUE_REASONS | MADE_REASONS:
        raise done.error
    return done.error.reason if done.context is None and done.error else done.result().name
