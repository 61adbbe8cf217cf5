"""All families of tasks, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from decode_engine.evaluation.tasks.chain import CHAIN
from decode_engine.evaluation.tasks.family import Family
from decode_engine.evaluation.tasks.keys import KEYS
from decode_engine.evaluation.tasks.sentences import SENTENCES
from decode_engine.evaluation.tasks.single import QUESTIONS, SINGLE
from decode_engine.evaluation.tasks.values import VALUES_FAMILY
from decode_engine.evaluation.tasks.words import WORDS
from index_store.errors import InvalidArgumentError

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in (SINGLE, KEYS, VALUES_FAMILY, QUESTIONS, CHAIN, WORDS, SENTENCES)}
)


def get_family(name: str) -> Family:
    """The named family. Raises InvalidArgumentError for an unknown name."""
    family = FAMILIES.get(name)
    if family is None:
        raise InvalidArgumentError(f"task is {name!r}, expected one of {', '.join(FAMILIES)}", task=name)
    return family
