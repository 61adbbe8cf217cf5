"""JSON schemas as people's libraries write them, in the words that llguidance obeys.

What is obeyed means the same or less: every answer satisfies the schema as it was sent. Annotations do not constrain;
`format` is one, as draft 2020-12 has it. What cannot be said is left as it is, for llguidance to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

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
