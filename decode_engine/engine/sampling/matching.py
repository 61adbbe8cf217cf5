"""What a constraint says, in llguidance's words: no torch here, so that another process can try it quickly.

Everything is bounded by llguidance's own limits of states and work; what those do not catch is caught by trying
(`trial`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from decode_engine.engine.sampling.schemas import obeyed_schema
from decode_engine.orders.order import Constraint

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
    """A regular expression for exactly this text."""
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
