"""Streams of many tenants over TLS, with tokens and quotas: who gets what share, and what that protection costs.

usage: python ops/bench/served/tenants.py [--streams 500] [--tenants 20] [--minutes 5] [--sessions 64] [--turns 20]

Makes a context for each tenant and starts two servers over them: `plain`, and `kept`, with a certificate that is made
for the occasion, a token for each tenant, and a file of quotas that limits all there is to limit, by more than is
asked.

The line `shares`: all streams ask `kept` again whenever they were answered, more of them than there are sessions, so
that every tenant always wants more. Tenants differ in what they ask: the answers of each second one are four times as
long. `share_least` and `share_most` are the tokens of prompts and answers that the server counted for the tenant that
got least and most, over the mean of all, from a third of the time on; `starved` the tenants that got nothing.
`first_*_ms` is from a question to its first token, turns of others included, `gap_*_ms` between two messages of a
stream.

The line `cost`: as many streams as there are sessions ask at once, each server in its turn, in an order that changes.
`ratio` is the mean over all turns of the tokens a second of `kept` by those of `plain` in the same turn, `se` its
standard error. A turn that is not counted comes before. Servers and clients share the machine. With --bars it fails
where a share is off by more than a tenth, a tenant is starved, or protection costs more than 3 %.

Run it from the root of the repository, on a machine that has nothing else to do.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.doors import Ask, Asked, Heard, ask_until
from harness.report import CheckFailedError, reporting
from harness.served import Shelf, serving
from harness.steps.general_steps import percentile
from seeing import ratio, tokens_per_s

from decode_engine.evaluation.tasks.documents import parse_length
from decode_engine.rpc.client import Client, Credentials
from decode_engine.rpc.door.access import TokenFile

LONG, SHORT = 32, 8
"""Tokens of answers."""
QUOTAS = """
[default]
sessions = {sessions}
stored_bytes = "1TiB"
resident_bytes = "1TiB"
requests_per_minute = 1_000_000_000
prompt_tokens_per_minute = 1_000_000_000
generated_tokens_per_minute = 1_000_000_000
"""


def main(
    streams: Annotated[int, typer.Option(help="Of all tenants together.")] = 500,
    tenants: Annotated[int, typer.Option(help="With a context and a token each.")] = 20,
    minutes: Annotated[float, typer.Option(help="That all streams ask.")] = 5.0,
    sessions: Annotated[int, typer.Option(help="Of the server.")] = 64,
    turns: Annotated[int, typer.Option(help="In which protection is timed.")] = 20,
    tokens: Annotated[str, typer.Option(help="Of a context, such as 2048 or 32k.")] = "2048",
    method: Annotated[str, typer.Option(help="Of all streams.")] = "refined",
    processes: Annotated[int, typer.Option(help="Of the clients.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    model: Annotated[str, typer.Option(help="Packaged model or a Hugging Face folder.")] = "reader",
    bars: Annotated[bool, typer.Option("--bars", help="Fail where a bar is missed.")] = False,
) -> None:
    """Shares of tenants, and the cost of TLS, tokens and quotas; one JSON line for each."""
    names = [f"tenant-{number}" for number in range(tenants)]
    with ExitStack() as stack, reporting("tenants", gpu=False) as report:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shelf = Shelf(folder / "store", (method,), model=model, device=device)
        length = parse_length(tokens)
        contexts = [
            shelf.add_slice(name, length, number, tenants, name).id for number, name in enumerate(names)
        ]
        certificate, key = make_certificate(folder)
        file = TokenFile(folder / "tokens")
        shown = {name: Credentials(file.create(name, name), certificate) for name in names}
        admin = Credentials(file.create("admin"), certificate)
        (folder / "quotas.toml").write_text(QUOTAS.format(sessions=streams))
        most = str(2 * max(streams, sessions))
        limits = ("--max-sessions", str(sessions), "--max-waiting", most, "--max-client-requests", most)
        protection = ["--tls-cert", str(certificate), "--tls-key", str(key)]
        protection += ["--tokens", str(folder / "tokens"), "--quotas", str(folder / "quotas.toml")]
        places = {
            case: stack.enter_context(
                serving(folder / "store", *limits, *options, model=model, device=device)
            )
            for case, options in {"plain": [], "kept": protection}.items()
        }
        pool = stack.enter_context(ProcessPoolExecutor(processes, get_context("spawn")))

        def asks(case: str, count: int, lengths: Sequence[int]) -> list[Ask]:
            """Questions of tenants in turn."""
            return [
                Ask(
                    "grpc",
                    places[case].address,
                    f"contexts/{contexts[number % tenants]}",
                    {
                        "text": "In that year the keeper",
                        "max_tokens": (answer := lengths[number % tenants % len(lengths)]),
                        "min_tokens": answer,
                        "method": method,
                        "patience_s": 600.0,
                    },
                    shown[names[number % tenants]] if case == "kept" else Credentials(),
                )
                for number in range(count)
            ]

        base = {
            "device": device,
            "tenants": tenants,
            "sessions": sessions,
            "tokens": length,
            "method": method,
        }
        kept = asks("kept", streams, (SHORT, LONG))
        Asked.at_once(pool, processes, asks("kept", sessions, (SHORT,))).heard()  # loads, compiles
        with Client(places["kept"].address, credentials=admin) as client:
            shares = share_out(client, pool, processes, kept, names, 60 * minutes)
        report.add(base | {"case": "shares", "streams": streams, "minutes": minutes, **shares})
        if bars and (shares["starved"] or shares["share_least"] < 0.9 or shares["share_most"] > 1.1):
            raise CheckFailedError("tenants' shares are off by more than a tenth")
        rates: dict[str, list[list[float]]] = {"plain": [], "kept": []}
        for turn in range(-1, turns):
            for case in ("plain", "kept") if turn % 2 else ("kept", "plain"):
                asked = Asked.at_once(pool, processes, asks(case, sessions, (LONG,)))
                rate = tokens_per_s(asked.begin, asked.heard())
                if turn >= 0:
                    rates[case].append([rate])
        mean, error = ratio(rates["kept"], rates["plain"])
        report.add(base | {"case": "cost", "streams": sessions, "turns": turns, "ratio": mean, "se": error})
        if bars and mean < 0.97:
            raise CheckFailedError(f"protection costs {1 - mean:.1%}, expected at most 3 %")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of this machine, and its key."""
    certificate, key = folder / "server.pem", folder / "server.key"
    line = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    line += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*line, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


def share_out(
    client: Client, pool: Executor, processes: int, asks: Sequence[Ask], names: Sequence[str], seconds: float
) -> dict[str, Any]:
    """What tenants got, and when streams heard what, from a third of the time on. Raises CheckFailedError."""
    begin = time.monotonic() + 1.0
    parts = [
        pool.submit(ask_until, begin, begin + seconds, asks[part::processes]) for part in range(processes)
    ]
    counted = begin + seconds / 3
    time.sleep(max(0.0, counted - time.monotonic()))
    before = tokens_of(client)
    time.sleep(max(0.0, begin + seconds - time.monotonic()))
    after = tokens_of(client)
    heard: list[Heard] = [each for part in parts for stream in part.result() for each in stream]
    failed = next((each.error for each in heard if each.error), "")
    if failed:
        raise CheckFailedError(failed)
    got = [after.get(name, 0) - before.get(name, 0) for name in names]
    mean = sum(got) / len(got)
    late = [each for each in heard if counted <= each.asked and each.arrivals[0] <= begin + seconds]
    return {
        "share_least": min(got) / mean if mean else 0.0,
        "share_most": max(got) / mean if mean else 0.0,
        "starved": sum(not each for each in got),
        "tokens_per_s": sum(got) / (seconds * 2 / 3),
        "answers": len(heard),
        **times("first", [each.first_s for each in late]),
        **times("gap", list(chain.from_iterable(each.gaps_s for each in late))),
    }


def tokens_of(client: Client) -> dict[str, int]:
    """Tokens of prompts and answers by tenant, as the server counted them."""
    return {each.name: each.prompt_tokens + each.generated_tokens for each in client.tenants().tenants}


def times(of: str, seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    shares = {"p50": 0.5, "p99": 0.99}
    return {f"{of}_{name}_ms": 1e3 * percentile(seconds, share) for name, share in shares.items() if seconds}


if __name__ == "__main__":
    typer.run(main)
