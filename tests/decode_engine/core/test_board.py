"""Prometheus scrapes a server under load, and every expression of the board and of the alerts finds something.

Needs `prometheus` and `promtool`.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from index_store.errors import SparseKVError
from tests.decode_engine.conftest import Library
from tests.support.serving.service import wait_until

MONITORING = Path(__file__).parents[3] / "ops/monitoring"
WINDOW = "30s"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs prometheus and promtool"
    ),
]

SCRAPES = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: sparsekv
    static_configs: [{{targets: ["{server}"]}}]
"""


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def ask_on(address: str, context: str, stopping: threading.Event) -> None:
    """Requests of all kinds, one after the other."""
    with Client(address) as client:
        while not stopping.is_set():
            for options in (
                {"context": context, "text": "Who?", "method": "csattention"},
                {"context": context, "text": "Who?", "method": "full"},
                {"text": "A prompt on its own"},
            ):
                client.generate(max_tokens=4, **options).read()  # type: ignore[arg-type]
            with suppress(SparseKVError):
                client.generate(text="No context", max_tokens=3, method="csattention").read()


@pytest.fixture(scope="module")
def prometheus(library: Library, lamp: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL, while it scrapes a server that is asked."""
    folder, scraped, listens = tmp_path_factory.mktemp("prometheus"), free_address(), free_address()
    config = folder / "prometheus.yml"
    config.write_text(SCRAPES.format(rules=MONITORING / "alerts.yml", server=scraped))
    stopping = threading.Event()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with DecodeServer(library.config(metrics=scraped, audit_share=1.0)) as server:
        server.load()
        asking = threading.Thread(target=ask_on, args=(server.address, lamp, stopping))
        asking.start()
        with subprocess.Popen(
            [*command, f"--web.listen-address={listens}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                yield f"http://{listens}"
            finally:
                process.terminate()
                stopping.set()
                asking.join()


def found(url: str, expression: str) -> list[object]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=60) as answer:
        samples: list[object] = json.load(answer)["data"]["result"]
        return samples


def expressions() -> list[str]:
    panels = json.loads((MONITORING / "board.json").read_text())["panels"]
    return [
        target["expr"].replace("$__rate_interval", WINDOW) for panel in panels for target in panel["targets"]
    ]


def test_every_panel_has_data_under_load(prometheus: str) -> None:
    def is_there() -> bool:
        with suppress(OSError):
            return bool(found(prometheus, f"rate(sparsekv:audited_kl_nats_count[{WINDOW}])"))
        return False

    wait_until(is_there, 120)
    left = expressions()
    assert len(left) > 25

    def are_answered() -> bool:
        nonlocal left
        left = [each for each in left if not found(prometheus, each)]
        return not left

    with suppress(AssertionError):
        wait_until(are_answered, 60)
    assert left == []


def test_rules_and_metrics_are_accepted(prometheus: str) -> None:
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=60) as answer:
        (group,) = json.load(answer)["data"]["groups"]
    assert len(group["rules"]) == 4
    assert all(rule["health"] != "err" for rule in group["rules"])
    checked = ["promtool", "check", "rules", str(MONITORING / "alerts.yml")]
    assert subprocess.run(checked, check=False, capture_output=True).returncode == 0
