"""Constraints in llguidance's words over a model's vocabulary, tried in another process before this one obeys them. No
torch here.

JSON schemas come as people's libraries write them. What is obeyed means the same or less: every answer satisfies the
schema as it was sent. Annotations do not constrain; `format` is one, as draft 2020-12 has it. What cannot be said is
left as it is, for llguidance to refuse.

Everything is bounded by llguidance's own limits of states and work. What takes too long or too much all the same dies
in the process that tries it. Run as a program, this reads the vocabulary's tokenizer as a line of JSON, then one
constraint a line, and answers each with a line: an empty text where it can be obeyed, else why not.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from msgspec.structs import asdict as struct_asdict

from decode_engine.orders.order import Constraint
from index_store.errors import InvalidArgumentError

_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LITERALS = re.compile(r"\^\(?(?:\?:)?([\w|-]+)\)?\$")
_DRAFTS = re.compile(r"https?://json-schema\.org/draft[-/].*")
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")


def obeyed_schema(document: Mapping[str, Any]) -> dict[str, Any]:
    """The schema in words that are obeyed. Raises RecursionError for one that is nested too deeply."""
    found = _obeyed(document, document)
    return found if isinstance(found, dict) else dict(document)


def _obeyed(schema: Any, document: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for name in _ONE:
        if name in made:
            made[name] = _obeyed(made[name], document)
    for name in _LISTS:
        if isinstance(made.get(name), list):
            made[name] = [_obeyed(one, document) for one in made[name]]
    for name in _NAMED:
        if isinstance(made.get(name), Mapping):
            made[name] = {key: _obeyed(one, document) for key, one in made[name].items()}
    made.pop("format", None)
    if not _DRAFTS.match(str(made.get("$schema", ""))):
        made.pop("$schema", None)
    few = made.get("maxItems")
    if made.get("uniqueItems") is False or (isinstance(few, int) and few <= 1):
        made.pop("uniqueItems", None)
    _name_properties(made)
    _part_patterns(made)
    if isinstance(made.get("anyOf"), list):
        plain = [one for one in made["anyOf"] if not _looks_around(one)]
        made["anyOf"] = plain or made["anyOf"]
    if isinstance(made.get("oneOf"), list) and "anyOf" not in made:
        apart = _told_apart(made, document)
        if apart is not None:
            del made["oneOf"]
            made["anyOf"] = apart
    return made


def _looks_around(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and _LOOKS_AROUND.search(pattern) is not None


def _name_properties(schema: dict[str, Any]) -> None:
    """Says of `propertyNames` what can be said: any texts are, and a list of names are properties that may be there."""
    names = schema.get("propertyNames")
    if names is True or names in ({}, {"type": "string"}):
        del schema["propertyNames"]
    elif (
        isinstance(names, Mapping) and isinstance(names.get("enum"), list) and set(names) <= {"enum", "type"}
    ):
        listed, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if isinstance(listed, Mapping) and "patternProperties" not in schema and others is not False:
            del schema["propertyNames"]
            texts = [name for name in names["enum"] if isinstance(name, str)]
            schema["properties"] = {name: listed.get(name, others) for name in texts}
            schema["additionalProperties"] = False


def _part_patterns(schema: dict[str, Any]) -> None:
    """Has listed properties obey the patterns that they match, and takes away patterns that match no others."""
    listed, patterns = schema.get("properties"), schema.get("patternProperties")
    if not (isinstance(listed, Mapping) and isinstance(patterns, Mapping)):
        return
    properties, kept = dict(listed), dict(patterns)
    for pattern, wanted in patterns.items():
        for name in listed:
            if _matches(pattern, name) and properties[name] != wanted:
                properties[name] = {"allOf": [properties[name], wanted]}
        literal = _LITERALS.fullmatch(pattern)
        if literal and set(literal[1].split("|")) <= set(listed):
            del kept[pattern]
    schema["properties"] = properties
    schema["patternProperties"] = kept
    if not kept:
        del schema["patternProperties"]


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _told_apart(schema: Mapping[str, Any], document: Mapping[str, Any]) -> list[Any] | None:
    """The schemas of a `oneOf` where no value satisfies two of them, as their types say, or a property whose constant
    is another in each, which they have to have then; None where that is not known."""
    branches = schema["oneOf"]
    found = [_resolved(branch, document) for branch in branches]
    types = [one.get("type") for one in found if isinstance(one, Mapping)]
    texts = {"number" if one == "integer" else one for one in types if isinstance(one, str)}
    if len(texts) == len(branches):
        return list(branches)
    constants = [dict(_constants(one)) for one in found]
    told = schema.get("discriminator")
    names = (
        [told.get("propertyName")] if isinstance(told, Mapping) else list(constants[0] if constants else ())
    )
    for name in names:
        values = {json.dumps(one[name]) for one in constants if name in one}
        if len(values) == len(branches):
            having = {"type": "object", "required": [name]}
            return [{"allOf": [branch, having]} for branch in branches]
    return None


def _constants(schema: Any) -> Iterator[tuple[str, Any]]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    for name, one in properties.items() if isinstance(properties, Mapping) else ():
        if isinstance(one, Mapping) and "const" in one:
            yield name, one["const"]
        elif isinstance(one, Mapping) and isinstance(one.get("enum"), list) and len(one["enum"]) == 1:
            yield name, one["enum"][0]


def _resolved(schema: Any, document: Mapping[str, Any]) -> Any:
    """What a reference inside of the document stands for."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not (isinstance(reference, str) and reference.startswith("#/")):
        return schema
    found: Any = document
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)  # about 2 kB a state
BETWEEN = {"whitespace_pattern": r"[ \n]{0,4}"}
"""What may stand between the parts of a JSON value: some models never end it where it may go on for ever."""


class UnfitConstraintError(Exception):
    """A constraint that cannot be obeyed; the message is a clause that says why."""


class DeadEndError(UnfitConstraintError):
    """One that lets nothing follow."""


def make_matcher(vocabulary: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """A matcher at the beginning of an answer. Raises UnfitConstraintError; runs without the interpreter's lock."""
    if constraint.kind == "json_schema":
        try:
            schema = json.loads(constraint.text)
            obeyed = json.dumps(obeyed_schema(schema) if isinstance(schema, dict) else schema)
            grammar = LLMatcher.grammar_from_json_schema(obeyed, overrides=BETWEEN)  # type: ignore[arg-type]
        except (ValueError, RecursionError) as error:
            raise UnfitConstraintError(f"it is not a JSON object ({error})") from error
    elif constraint.kind == "calls":
        grammar = LLMatcher.grammar_from_lark(constraint.text)
    else:
        regex = constraint.text
        if constraint.kind == "choices":
            regex = "|".join(map(_escaped, json.loads(constraint.text)))
        grammar = LLMatcher.grammar_from_regex(regex)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise UnfitConstraintError(_reason(matcher.get_error()))
    warnings = matcher.get_grammar_warnings()
    if warnings:
        raise UnfitConstraintError(_reason(warnings[0]))
    return matcher


def allowed_bits(matcher: LLMatcher) -> bytes:
    """A bit for each token of the vocabulary, the lowest of a byte first, set where it may come next.

    Whole words of 32, perhaps one more than the vocabulary takes. Raises UnfitConstraintError; runs without the
    interpreter's lock.
    """
    allowed: bytes = matcher.compute_bitmask()
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        if reason.startswith("NoExtension"):
            raise DeadEndError(
                "an answer may begin in a way that nothing can follow; parts of it exclude each other"
            )
        raise UnfitConstraintError(f"it is too complex ({reason})")
    return allowed


def consume(matcher: LLMatcher, token: int) -> None:
    """The answer goes on with this token. Raises UnfitConstraintError where it may not, or where that is too much."""
    if not matcher.consume_token(token):
        raise UnfitConstraintError(_reason(matcher.get_error()))


def allowed_tokens(matcher: LLMatcher) -> Sequence[int]:
    """The same as ids, in their order."""
    return [
        8 * byte + bit
        for byte, bits in enumerate(allowed_bits(matcher))
        if bits
        for bit in range(8)
        if bits >> bit & 1
    ]


_SENTENCES = {
    "Unimplemented keys: ": "these keywords are not supported: ",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": "oneOf is "
    "supported where its schemas exclude each other, as by a property that has another const in each; use anyOf",
    "look-around": "a pattern looks ahead or behind, which is not supported: look-around",
}
"""How messages of llguidance begin, and what is said instead."""


def _escaped(text: str) -> str:
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):X}}}" for letter in text)


def _reason(message: str) -> str:
    """One clause out of llguidance's lines."""
    lines: Sequence[str] = [line.strip() for line in message.splitlines() if line.strip()]
    told = next((line.removeprefix("error:").strip() for line in lines if line.startswith("error:")), None)
    clause = told or (lines[0] if lines else "it cannot be compiled")
    for begun, said in _SENTENCES.items():
        if clause.startswith(begun):
            clause = said + clause.removeprefix(begun)
            break
    return clause if len(clause) <= 200 else f"{clause[:197]}..."


_KEPT = 64  # constraints that were found to be fit


class Vocabulary:
    """Made when it is first needed, which takes up to a second. Thread-safe. Its process ends with `close`."""

    def __init__(self, source: Callable[[], VocabularySource]) -> None:
        """source: tells what it is made of, when that is needed; what it raises, all methods do."""
        self._source = source
        self._lock = threading.Lock()
        self._trial = Trial(source)
        self._fit: OrderedDict[Constraint, None] = OrderedDict()

    @cached_property
    def _made(self) -> LLTokenizer:
        return self._source().make()

    @property
    def made(self) -> LLTokenizer:
        with self._lock:
            return self._made

    def close(self) -> None:
        self._trial.close()

    @cached_property
    def token_bytes(self) -> Sequence[bytes]:
        """What each token stands for, which may be a part of a character; a special token's name."""
        made = self.made
        return [bytes(made.decode_bytes([token])) for token in range(made.vocab_size)]

    def check(self, constraint: Constraint) -> None:
        """Tries a constraint in another process; the last 64 that were fit are not tried again.

        Raises InvalidArgumentError, with the reason, for one that cannot be obeyed. Takes seconds at most.
        """
        with self._lock:
            if constraint in self._fit:
                self._fit.move_to_end(constraint)
                return
        try:
            self._trial.check(constraint)
        except UnfitConstraintError as error:
            raise unfit(constraint, error) from error
        with self._lock:
            self._fit[constraint] = None
            while len(self._fit) > _KEPT:
                self._fit.popitem(last=False)


def unfit(constraint: Constraint, error: UnfitConstraintError) -> InvalidArgumentError:
    calls = constraint.kind == "calls"
    return InvalidArgumentError(
        f"{constraint.kind} cannot be obeyed: {error}; expected {'schemas' if calls else 'one'} that this "
        "server supports",
        field="tools" if calls else "constraint",
    )


_TRIAL_S = 2.0
_START_S = 60.0
_LONGEST_S = 10  # of computing for one constraint, whether somebody waits or not
_SLOWEST_MASK_S = 0.1
_WALK = 64  # tokens of a random answer that is begun
_MEMORY_BYTES = 2 * 2**30  # on top of what the vocabulary takes


@dataclass(frozen=True, slots=True)
class VocabularySource:
    """What llguidance makes a vocabulary of: the tokenizer's definition as JSON, its size, and tokens that end."""

    definition: str
    size: int
    end_ids: Sequence[int]

    def make(self) -> LLTokenizer:
        """The vocabulary; takes up to a second."""
        return LLTokenizer(self.definition, n_vocab=self.size, eos_token=list(self.end_ids) or None)


class Trial:
    """Tries constraints one after another, in a process that is begun when the first one comes. Thread-safe."""

    def __init__(self, source: Callable[[], VocabularySource]) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        with self._lock:
            self._end()

    def check(self, constraint: Constraint) -> None:
        """Raises UnfitConstraintError for one that cannot be obeyed. Waits for those before it, 2 s for each."""
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._begin()
                reason = self._ask(struct_asdict(constraint), _TRIAL_S)
                if reason is None:
                    raise UnfitConstraintError(
                        f"it is too complex (more than {_TRIAL_S:g} s to compile, or too large)"
                    )
            except BaseException:
                self._end()  # the answer that it may still give must not be read as one to the next question
                raise
        if reason:
            raise UnfitConstraintError(reason)

    def _begin(self) -> None:
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if self._ask(asdict(self._source()), _START_S) is None:
            raise UnfitConstraintError("the process that tries constraints does not start")

    def _ask(self, question: dict[str, object], timeout_s: float) -> str | None:
        """The process's answer; None where it has died, or gives none in time."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return None
        with DefaultSelector() as selector:  # `select` itself knows no descriptors from 1,024 on
            selector.register(process.stdout, EVENT_READ)
            ready = selector.select(timeout_s)
        line = process.stdout.readline() if ready else b""
        return str(json.loads(line)) if line.endswith(b"\n") else None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:
                pass


def _try(vocabulary: LLTokenizer, constraint: Constraint) -> str:
    """Why it cannot be obeyed; empty where it can."""
    draw, begun = random.Random(0), False
    try:
        matcher = make_matcher(vocabulary, constraint)
        for _ in range(_WALK):
            before = time.process_time()  # not the clock's: others may have the cores meanwhile
            tokens = allowed_tokens(matcher)
            if time.process_time() - before > _SLOWEST_MASK_S:
                return "it is too complex (tokens take too long to be checked)"
            if not tokens:
                raise DeadEndError("an answer may begin in a way that no token of this model can follow")
            consume(matcher, draw.choice(tokens))
            begun = True
            if matcher.is_stopped():
                break
    except DeadEndError as error:
        return str(error) if begun else "nothing satisfies it"
    except UnfitConstraintError as error:
        return str(error)
    return ""


def main() -> None:
    source = json.loads(sys.stdin.readline())
    vocabulary = VocabularySource(**source).make()
    used = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    _answer("")
    for line in sys.stdin:
        spent = int(time.process_time())
        # Should the server end meanwhile, so does this.
        resource.setrlimit(resource.RLIMIT_CPU, (spent + _LONGEST_S, resource.RLIM_INFINITY))
        _answer(_try(vocabulary, Constraint(**json.loads(line))))


def _answer(text: str) -> None:
    sys.stdout.write(json.dumps(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
