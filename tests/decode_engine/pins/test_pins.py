"""What both doors said when they were recorded, they say today.

`recorded/SERVICE/*.jsonl` has requests and the replies to them, in an order in which they can be played (a context is
made before it is asked about). A reply may change on purpose alone. Then

    python -m pytest tests/decode_engine/pins --record

writes the replies that are others now, and the change of the files shows what clients will see; `-k NAME` takes those
files alone. A new case is a line `{"case": ...}` in a file, with `call` and `request` or with `http` and `body`, behind
which that command writes the reply.

Left out, since they depend on time: durations, ids (which have names), how tokens share messages, and seeds that nobody
gave. Floats may differ a little. Tokens of the toy model are the same on every machine as long as its likeliest tokens
are well apart, which that command checks where it can; where another machine has others nevertheless, its recordings
tell apart what a change did once they are made there before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.decode_engine.pins.conftest import Service, Services
from tests.decode_engine.pins.grpc_door import play_call
from tests.decode_engine.pins.http_door import play_request
from tests.decode_engine.pins.recording import Case, Line, Names, differences, read_cases, write_cases

FOLDER = Path(__file__).parent / "recorded"
FILES = sorted(FOLDER.glob("*/*.jsonl"))
ON_PURPOSE = "where this is meant: python -m pytest tests/decode_engine/pins --record"
MARGIN = 0.03
"""Between the log probabilities of the likeliest two tokens."""
_UNMEASURED = {"keep", "tool_choice", "prompt_logprobs", "temperature", "logit_bias", "constraint"} | {
    f"{name}_penalty" for name in ("presence", "frequency", "repetition")
}
"""Fields of requests whose tokens are not the likeliest ones, or that cannot be asked again."""


@pytest.mark.nightly
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_doors_say_what_they_said(file: Path, services: Services, request: pytest.FixtureRequest) -> None:
    service, cases = services(file.parent.name, False), read_cases(file)
    names, changed = Names(service.names), []
    record = request.config.getoption("--record")
    for case in cases:
        played = play(service, names, case)
        found = differences(case, played)
        if record:
            case.reply = played if found else case.reply
            changed += close_tokens(service, names, case)
        elif found:
            changed.append(f"{case.name}:\n{found}")
    if record:
        write_cases(file, cases)
    assert not changed, "\n\n".join([*changed, ON_PURPOSE])


APART = [pytest.param(each, marks=[] if each.parent.name == "reader" else pytest.mark.slow) for each in FILES]


@pytest.mark.parametrize("file", APART, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_door_in_a_process_of_its_own_says_the_same(file: Path, services: Services) -> None:
    """What is asked goes through every layer; the door imports nothing that computes, as `door_beside` sees to."""
    service = services(file.parent.name, True)
    names = Names(service.names)
    cases = [(case, differences(case, play(service, names, case))) for case in read_cases(file)]
    changed = [f"{case.name}:\n{found}" for case, found in cases if found]
    assert not changed, "\n\n".join([*changed, ON_PURPOSE])


def play(service: Service, names: Names, case: Case) -> list[Line]:
    """The reply to a case now."""
    asked = names.resolve(case.request)
    if "work" in asked:
        service.work()
        return []
    if "http" in asked:
        return names.hide(case.request, play_request(service.web, asked))
    return names.hide(case.request, play_call(service.channel, asked["call"], asked["request"]))


def close_tokens(service: Service, names: Names, case: Case) -> list[str]:
    """Where another machine may choose other tokens, as far as log probabilities tell."""
    asked: Any = names.resolve(case.request.get("request"))
    if case.request.get("call") != "Generate" or case.reply[-1] != {"end": "OK"} or _UNMEASURED & set(asked):
        return []
    told = [
        (each.get("token_id", 0), *(one["logprob"] for one in each["alternatives"]))
        for line in play_call(service.channel, "Generate", {**asked, "top_logprobs": 2})
        for each in line.get("message", {}).get("logprobs", [])
    ]
    return [
        f"{case.name}: the likeliest tokens, {token} and another, are only {first - second:.4f} apart; ask another way"
        for token, first, second in told
        if first - second < MARGIN
    ]
