"""Quotas of tenants: the file, the accounts, and what callers over their limits are told by both doors."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_engine.__main__ import main
from decode_engine.core.tenants import OTHERS, Tenants
from decode_engine.engine.job import Places
from decode_engine.errors import TooManyRequestsError
from decode_engine.gateway.serving import Gateway
from decode_engine.rpc.client import Client, Credentials, GenerateOptions
from decode_engine.rpc.door.access import TokenFile
from decode_engine.rpc.server import DecodeServer
from index_store.cli.quotas import LIMITS, Quota, QuotaFile, parse_quotas
from index_store.errors import InvalidArgumentError, QuotaExceededError
from tests.decode_engine.conftest import Library
from tests.support.serving.service import loaded


class Clock:
    """Stands, unless it is let run."""

    def __init__(self) -> None:
        self.now = 0.0
        self._began: float | None = None

    def run(self) -> None:
        self._began = time.monotonic()

    def __call__(self) -> float:
        return self.now + (0.0 if self._began is None else time.monotonic() - self._began)


def accounts(tmp_path: Path, text: str, clock: Clock) -> Tenants:
    file = tmp_path / "quotas.toml"
    file.write_text(text)
    return Tenants(QuotaFile(file), clock)


def refused(act: Callable[[], object]) -> QuotaExceededError:
    with pytest.raises(QuotaExceededError) as caught:
        act()
    return caught.value


def test_tables_have_what_the_default_has_but_for_what_they_say() -> None:
    quotas = parse_quotas(
        """
        [default]
        sessions = 8
        requests_per_minute = 60
        [tenants.ant]
        weight = 2.5
        sessions = "none"
        generated_tokens_per_minute = 1_000
        """,
        "here",
    )
    assert quotas.of("bee") == Quota(1.0, {"sessions": 8, "requests_per_minute": 60})
    assert quotas.of("ant") == Quota(2.5, {"requests_per_minute": 60, "generated_tokens_per_minute": 1000})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tenants.ant]\nsesions = 1", "`sesions` of [tenants.ant] in here"),
        ("[default]\nsessions = 0", "`$.sessions` of [default] in here"),
        ("[default]\nsessions = 1.5", "`$.sessions` of [default] in here"),
        ("[default]\nsessions = true", "`$.sessions` of [default] in here"),
        ("[default]\nsessions = '8GiB'", "sessions '8GiB' of [default] in here"),
        ("[tenants.ant]\nweight = 0", "`$.weight` of [tenants.ant] in here"),
        ("[tenants.'a b']", "a table of 'a b' in here"),
        ("[other]", "`other` in here"),
        ("[default", "in here"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, named: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_quotas(text, "here")
    assert named in caught.value.message


def test_an_edit_counts_at_once_and_a_broken_one_leaves_what_was(tmp_path: Path) -> None:
    path = tmp_path / "quotas.toml"

    def write(text: str) -> None:
        other = tmp_path / "other"
        other.write_text(text)
        os.replace(other, path)

    write("[default]\nsessions = 1")
    file = QuotaFile(path)
    write("[default]\nsessions = 2")
    assert file.now.default.limits == {"sessions": 2}
    write("[default]\nsessions = 'two'")
    assert file.now.default.limits == {"sessions": 2}
    assert "sessions 'two'" in file.problem
    path.unlink()
    assert file.now.default.limits == {"sessions": 2}
    assert str(path) in file.problem
    write("[tenants.ant]")
    assert (file.now.default.limits, [*file.now.tenants], file.problem) == ({}, ["ant"], "")


def test_rates_come_back_and_say_when(tmp_path: Path) -> None:
    clock = Clock()
    tenants = accounts(tmp_path, "[default]\nrequests_per_minute = 6", clock)
    for _ in range(6):
        tenants.admit("ant", 1, 1)
    tenants.admit("bee", 1, 1)
    error = refused(lambda: tenants.admit("ant", 1, 1))
    assert error.metadata == {"limit": "requests_per_minute", "found": "6", "wanted": "1", "allowed": "6"}
    assert error.retry_after_s == pytest.approx(10)
    clock.now += 9.9
    assert refused(lambda: tenants.admit("ant", 1, 1)).retry_after_s == pytest.approx(0.1)
    clock.now += 0.2
    tenants.admit("ant", 1, 1)
    clock.now += 3600
    for _ in range(6):
        tenants.admit("ant", 1, 1)
    refused(lambda: tenants.admit("ant", 1, 1))


def test_what_is_generated_is_owed_and_nothing_is_broken_off(tmp_path: Path) -> None:
    clock = Clock()
    tenants = accounts(tmp_path, "[default]\ngenerated_tokens_per_minute = 60", clock)
    use = tenants.admit("ant", 1, 1)
    for _ in range(180):
        use.generated(1)
    use.close()
    error = refused(lambda: tenants.admit("ant", 1, 1))
    assert (error.metadata["found"], error.retry_after_s) == ("180", pytest.approx(121))
    clock.now += 121.5
    tenants.admit("ant", 1, 1)


def test_of_a_prompt_what_was_not_read_is_given_back(tmp_path: Path) -> None:
    clock = Clock()
    tenants = accounts(tmp_path, "[default]\nprompt_tokens_per_minute = 100", clock)
    use = tenants.admit("ant", 1, 80)
    assert refused(lambda: tenants.admit("ant", 1, 30)).retry_after_s == pytest.approx(6)
    use.read(10)
    use.close()
    use.close()
    tenants.admit("ant", 1, 90)
    (found,) = tenants.use({})
    assert (found.prompt_tokens, found.refused, found.requests) == (10, 1, 2)
    error = refused(lambda: tenants.admit("ant", 1, 1000))
    assert error.retry_after_s == pytest.approx(60), (
        "a prompt of more than a minute's is let in when all is there"
    )
    clock.now += 60.1
    tenants.admit("ant", 1, 1000)
    assert refused(lambda: tenants.admit("ant", 1, 1)).retry_after_s == pytest.approx(541, abs=1)


def test_sessions_are_counted_until_requests_end(tmp_path: Path) -> None:
    tenants = accounts(tmp_path, "[default]\nsessions = 3\n[tenants.bee]\nsessions = 'none'", Clock())
    use = tenants.admit("ant", 2, 1)
    assert refused(lambda: tenants.admit("ant", 2, 1)).retry_after_s == 1
    assert refused(lambda: tenants.admit("ant", 4, 1)).retry_after_s is None, "it never fits"
    tenants.admit("ant", 1, 1)
    tenants.admit("bee", 99, 1)
    use.close()
    tenants.admit("ant", 2, 1)


def test_contexts_that_are_to_be_made_count(tmp_path: Path) -> None:
    tenants = accounts(tmp_path, "[default]\nprompt_tokens_per_minute = 100", Clock())
    tenants.allow("ant", 100)
    assert refused(lambda: tenants.allow("ant", 10)).retry_after_s == pytest.approx(6)
    refused(lambda: tenants.admit("ant", 1, 10))


@given(st.lists(st.tuples(st.sampled_from(["read", "say", "end", "ask", "wait"]), st.integers(1, 50))))
def test_whatever_happens_accounts_end_empty_and_rates_are_held(acts: list[tuple[str, int]]) -> None:
    clock, made = Clock(), Tenants()
    made._clock_s = clock
    object.__setattr__(made.quotas, "_quotas", parse_quotas("[default]\nprompt_tokens_per_minute = 100", ""))
    uses, read = [], 0
    for act, count in acts:
        if act == "ask":
            with suppress(QuotaExceededError):
                uses.append((made.admit("ant", 1, count), count))
                continue
            clock.now += (refused(lambda: made.admit("ant", 1, count)).retry_after_s or 0.0) + 0.001  # noqa: B023
            uses.append((made.admit("ant", 1, count), count))
        elif act == "wait":
            clock.now += count
        elif uses:
            use, prompt = uses.pop()
            if act == "read":
                use.read(prompt)
                read += prompt
            elif act == "say":
                use.generated(count)
            use.close()
    for use, _ in uses:
        use.close()
    assert read <= 100 + 100 * clock.now / 60 + 1
    assert all(each.limits[0].used == 0 for each in made.use({}))


def test_metrics_name_tenants_of_the_file_alone(tmp_path: Path) -> None:
    tenants = accounts(tmp_path, "[tenants.ant]", Clock())
    for number in range(9000):
        tenants.admit(f"t{number}", 1, 1).close()
    use = tenants.admit("ant", 1, 1)
    use.read(1)
    totals = tenants.totals()
    assert {name: counts["requests"] for name, counts in totals.items()} == {"ant": 1, OTHERS: 9000}
    assert totals["ant"]["prompt_tokens"] == 1
    assert len(tenants._accounts) < 5000, "those that hold and owe nothing are forgotten"


def test_no_tenant_takes_the_last_places() -> None:
    places = Places(80, 16)
    taken: dict[str, int] = {}
    for name in [f"{number}" for number in range(20)] * 80:
        try:
            places.take("", "one proxy", name)
            taken[name] = taken.get(name, 0) + 1
        except TooManyRequestsError:
            continue
    assert max(taken.values()) - min(taken.values()) <= 1
    places.take("", "", "new")
    alone = Places(80, 0)
    for _ in range(60):
        alone.take("", "", "ant")
    with pytest.raises(TooManyRequestsError):
        alone.take("", "", "ant")
    for _ in range(20):
        alone.take("", "")


def test_a_batch_waits_for_its_quota_unless_that_does_not_help(
    library: Library, lamp: str, tmp_path: Path
) -> None:
    with (
        serving(library, tmp_path, "[default]\nsessions = 1") as (server, secrets),
        Client(server.address, credentials=Credentials(token=secrets["ant"])) as ant,
    ):
        once = GenerateOptions(text="Who?", max_tokens=2)
        never = GenerateOptions(text="Who?", max_tokens=2, n=2, temperature=1.0)
        items = {item.index: item for item in ant.batch_generate("", [once, never, once])}
        assert [len(items[index].token_ids[0]) for index in (0, 2)] == [2, 2]
        assert isinstance(items[1].error, QuotaExceededError)


def tell(*line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 0


QUOTAS = """
[default]
sessions = 9
[tenants.ant]
generated_tokens_per_minute = 600
[tenants.bee]
stored_bytes = 1_000
[tenants.cat]
prompt_tokens_per_minute = 100
"""


@contextmanager
def serving(
    library: Library, folder: Path, quotas: str, **changes: object
) -> Iterator[tuple[DecodeServer, dict[str, str]]]:
    """A server with quotas and tokens: of ant, bee, and an admin."""
    tokens, file = folder / "tokens.json", folder / "quotas.toml"
    file.write_text(quotas)
    secrets = {name: TokenFile(tokens).create(name, name) for name in ("ant", "bee", "cat")}
    secrets["admin"] = TokenFile(tokens).create("admin")
    with loaded(library.config(tokens=tokens, quotas=file, **changes)) as server:
        yield server, secrets


def see_from_the_command_line(
    server: DecodeServer, secret: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an admin sees, and that an edit that cannot be used is told."""
    token_file = folder / "admin.token"
    token_file.write_text(secret)
    line = ["tenants", "--server", server.address, "--token-file", str(token_file)]
    tell(*line)
    table = capsys.readouterr().out
    assert "GENERATED TOKENS/MIN" in table
    assert "/600" in table
    tell(*line, "--format", "json")
    assert json.loads(capsys.readouterr().out)["quotas_problem"] == ""
    (folder / "quotas.toml").write_text("[default]\nsesions = 1")
    tell(*line)
    assert "sesions" in capsys.readouterr().err


def test_who_is_over_is_told_when_to_come_back_by_both_doors(
    library: Library, lamp: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        serving(library, tmp_path, QUOTAS, metrics=metrics) as (server, secrets),
        Client(server.address, credentials=Credentials(token=secrets["ant"])) as ant,
        Client(server.address, credentials=Credentials(token=secrets["bee"])) as bee,
        Client(server.address, credentials=Credentials(token=secrets["admin"])) as admin,
        Gateway("127.0.0.1:0", server.grpc) as web,
    ):
        clock = server.backend.tenants._clock_s = Clock()
        ant.generate(text="Who?", max_tokens=620).read()  # to its end, though it is more than is allowed
        with pytest.raises(QuotaExceededError) as caught:
            ant.generate(text="Who?", max_tokens=1).read()
        error = caught.value
        assert error.metadata == {
            "limit": "generated_tokens_per_minute",
            "found": "620",
            "wanted": "1",
            "allowed": "600",
        }
        assert error.retry_after_s == 2.1
        ask = {"model": "model", "prompt": "Who?", "max_tokens": 1}
        shown = {"authorization": f"Bearer {secrets['ant']}"}
        reply = httpx.post(f"{web.url}/v1/completions", json=ask, headers=shown, timeout=300)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")
        assert reply.json()["error"]["code"] == "quota_exceeded"
        bee.generate(text="Who?", max_tokens=1).read()
        for name, limit, tokens in (("bee", "stored_bytes", 40), ("cat", "prompt_tokens_per_minute", 80)):
            with Client(server.address, credentials=Credentials(token=secrets[name])) as maker:
                if name == "cat":
                    maker.create_context(token_ids=[1] * 80, wait=False)
                with pytest.raises(QuotaExceededError) as caught:
                    maker.create_context(token_ids=[2] * tokens, wait=False)
                assert caught.value.metadata["limit"] == limit
                assert (caught.value.retry_after_s is None) == (name == "bee")
        clock.run()
        ant.generate(text="Who?", max_tokens=1, patience_s=60).read()  # comes back when it was told to
        known = {each.name: each for each in admin.tenants().tenants}
        assert [*known] == ["", "ant", "bee", "cat"]
        assert known[""].limits[0].used > 0, "the store's contexts belong to nobody"
        (own,) = bee.tenants().tenants
        assert (own.name, own.requests, own.generated_tokens, own.refused) == ("bee", 1, 1, 0)
        (mine,) = ant.tenants().tenants
        assert (mine.requests, mine.generated_tokens) == (2, 621)
        assert mine.refused >= 3
        assert [limit.name for limit in mine.limits] == list(LIMITS)

        see_from_the_command_line(server, secrets["admin"], tmp_path, capsys)
        assert bee.tenants().quotas_problem == "", "what a file says is the operator's"

        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as answer:
            told = answer.read().decode()
        assert 'sparsekv:tenant_generation_tokens_total{model_name="model",tenant="ant"} 621.0' in told
        assert 'tenant="other"' in told
        assert 'tenant=""' not in told
