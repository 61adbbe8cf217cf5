"""Tables of what HTTP's endpoints take, as docs/api.md has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from decode_engine.gateway.wire.parameters import FAMILIES, Endpoint, Fate, Members, Parameter, Variants


def describe(inside: Endpoint | Members) -> str:
    """A table of parameters, as docs/api.md has it."""
    rows = ["| name | | takes | what it does |", "|---|---|---|---|"]
    for parameter in inside.parameters:
        kind = parameter.kind.shown if parameter.fate is Fate.HONOURED else ""
        if parameter.neutral:
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in parameter.neutral)
            kind += f"{', nothing by' if kind else 'but'} {neutral}"
        if parameter.required:
            kind += ", required"
        rows.append(f"| `{parameter.name}` | {parameter.fate.value} | {kind} | {parameter.says} |")
    if isinstance(inside, Members) and inside.others_taken:
        rows.append("| any other | taken | | It is said by nobody. |")
    return "\n".join(rows) + "\n"


def tables_in(parameters: Sequence[Parameter]) -> Iterator[tuple[str, Members | str]]:
    """Tables of what stands inside of these, by their titles, and why objects of other kinds have none."""
    for parameter in parameters:
        if parameter.inside is not None:
            yield from _tables_of(parameter.name, "", parameter.inside)


def _tables_of(name: str, kind: str, inside: Members | Variants | str) -> Iterator[tuple[str, Members | str]]:
    if isinstance(inside, Variants):
        for variant, one in inside.kinds.items():
            yield from _tables_of(name, variant, one)
    elif isinstance(inside, Members):
        yield inside.title, inside
        yield from tables_in(inside.parameters)
    else:
        yield f"`{kind}` in `{name}`", inside


def describe_inside(endpoints: Sequence[Endpoint]) -> str:
    """All tables of members, each once, and the names that are taken wherever they stand."""
    found = dict(pair for endpoint in endpoints for pair in tables_in(endpoint.parameters))
    parts = [
        f"#### {title[:1].upper()}{title[1:]}\n\n{describe(one)}"
        for title, one in found.items()
        if isinstance(one, Members)
    ]
    others = [f"| {title} | {why} |" for title, why in found.items() if isinstance(why, str)]
    parts.append("\n".join(["| objects of other kinds | |", "|---|---|", *others]) + "\n")
    told = [(about, pattern.replace("|", r"\|")) for about, pattern in FAMILIES.items()]
    rows = [f"| {about} | `{pattern}` |" for about, pattern in told]
    parts.append("\n".join(["| names that are taken anywhere | |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)
