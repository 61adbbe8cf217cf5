"""Writes the parts of docs/api.md that are made from the code.

`python ops/pages/api_page.py`, or with `--check` to compare only. Parts stand between
`<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from parameter_tables import describe, describe_inside
from proto_pages import messages_page

from decode_engine.gateway.exchange import status_of_reason
from decode_engine.gateway.resources import CREATE, TOKENIZE, UPDATE
from decode_engine.gateway.wire.bodies import CHAT, COMPLETIONS, RESPONSES
from decode_engine.rpc.transport.status import CODES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, TOKENIZE, CREATE, UPDATE)
PROTOS = ("context", "generation")

_PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_RPC = re.compile(
    r"(?P<comment>(?:  //[^\n]*\n)+)  rpc (?P<name>\w+)\((?P<request>[\w. ]+)\) returns \((?P<response>[\w. ]+)\)"
)
_ERRORS = re.compile(r"\bErrors(?: of the call)?: (?P<reasons>.*)$")


def errors_table() -> str:
    """Reasons with their codes on both ports."""
    rows = ["| reason | gRPC | HTTP |", "|---|---|---|"]
    rows += [
        f"| {reason} | {code.name} | {status_of_reason(reason)} |" for reason, code in sorted(CODES.items())
    ]
    return "\n".join([*rows, f"| any other | INTERNAL | {status_of_reason('INTERNAL')} |"]) + "\n"


def rpcs_table() -> str:
    """All calls of the protos, with the first sentence of what is said of each."""
    rows = ["| call | takes | gives | what it does | errors |", "|---|---|---|---|---|"]
    for proto in PROTOS:
        text = (ROOT / "protos" / "sparsekv" / "v1" / f"{proto}.proto").read_text()
        for match in _RPC.finditer(text):
            comment = " ".join(
                line.strip().removeprefix("//").strip() for line in match["comment"].splitlines()
            )
            errors = _ERRORS.search(comment)
            told = errors["reasons"].rstrip(".") if errors else ""
            comment = _ERRORS.sub("", comment).strip()
            sentence = re.split(r"(?<=[^A-Z])\. ", comment)[0].rstrip(".")
            rows.append(
                f"| {match['name']} | {match['request']} | {match['response']} | {sentence} | {told} |"
            )
    return "\n".join(rows) + "\n"


def render(page: str) -> str:
    """The page with its generated parts made anew. Raises KeyError for a part of another name, or without a place."""
    parts = {
        "errors": errors_table(),
        "calls": rpcs_table(),
        "messages": messages_page(),
        "chat": describe(CHAT),
        "completions": describe(COMPLETIONS),
        "responses": describe(RESPONSES),
        "tokenize": describe(TOKENIZE),
        "inside": describe_inside(ENDPOINTS),
        "create": describe(CREATE),
        "update": describe(UPDATE),
    }
    if missing := parts.keys() - {match["name"] for match in _PART.finditer(page)}:
        raise KeyError(f"docs/api.md has no place for {sorted(missing)}")
    return _PART.sub(lambda match: match[1] + parts[match["name"]] + match[3], page)


def main() -> None:
    """Writes, or compares."""
    page = PAGE.read_text()
    made = render(page)
    if "--check" in sys.argv[1:]:
        sys.exit(
            0 if made == page else f"{PAGE} is not what the code says: run `python ops/pages/api_page.py`"
        )
    PAGE.write_text(made)


if __name__ == "__main__":
    main()
