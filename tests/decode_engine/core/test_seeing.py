"""What Prometheus is told, and that board and alerts ask for what there is."""

from __future__ import annotations

import json
import re
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
from prometheus_client.parser import text_string_to_metric_families as parse

from decode_engine.core.seeing import Histogram
from decode_engine.errors import AddressError
from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from index_store.errors import InvalidArgumentError, MethodUnsupportedError, SparseKVError
from tests.decode_engine.conftest import Library
from tests.support.serving.service import LONG, loaded, wait_until

WINDOW = "30s"

has_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs prometheus and promtool"
)

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
    with loaded(library.config(metrics=scraped, audit_share=1.0)) as server:
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


@pytest.mark.slow
@has_prometheus
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


@pytest.mark.slow
@has_prometheus
def test_rules_and_metrics_are_accepted(prometheus: str) -> None:
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=60) as answer:
        (group,) = json.load(answer)["data"]["groups"]
    assert len(group["rules"]) == 4
    assert all(rule["health"] != "err" for rule in group["rules"])
    checked = ["promtool", "check", "rules", str(MONITORING / "alerts.yml")]
    assert subprocess.run(checked, check=False, capture_output=True).returncode == 0


MONITORING = Path(__file__).parents[3] / "ops/monitoring"
PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"

# What boards and routers of vLLM ask for; see the names in its documentation of production metrics.
OF_THE_FIELD = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_by_source_total",
    "kv_offload_load_bytes_total",
}


class Scraped:
    """A server whose metrics are read."""

    def __init__(self, server: DecodeServer, address: str) -> None:
        self.client = Client(server.address)
        self.address = address

    def text(self) -> str:
        request = urllib.request.Request(f"http://{self.address}/metrics", headers={"Accept": PROMETHEUS})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def value(self, name: str, **labels: str) -> float:
        wanted = {"model_name": "model", **labels}
        return sum(
            sample.value
            for family in parse(self.text())
            for sample in family.samples
            if sample.name == f"sparsekv:{name}" and wanted.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def scraped(library: Library, lamp: str) -> Iterator[Scraped]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with loaded(library.config(metrics=address, metrics_alias=True, audit_share=1.0)) as server:
        watched = Scraped(server, address)
        ask = watched.client.generate
        ask(lamp, text="Who?", max_tokens=5, method="csattention").read()
        ask(text="A prompt on its own", max_tokens=3, n=2, temperature=1).read()
        with ask(lamp, text="Who?", max_tokens=LONG) as left:
            next(iter(left))
            left.cancel()
        wait_until(lambda: watched.value("request_success_total", finished_reason="abort") == 1)
        yield watched
        watched.client.close()


def test_what_happened_is_told(scraped: Scraped) -> None:
    value = scraped.value
    assert value("request_success_total", finished_reason="length") == 3
    assert value("beginning_lookups_total", result="named") == 2
    assert value("beginning_lookups_total", result="none") == 1
    assert value("beginning_misses_total", reason="not_stored") == value("beginning_misses_total") == 1
    assert value("requests_by_tier_total", tier="disk") == value("requests_by_tier_total", tier="none") == 1
    assert value("requests_by_tier_total") == 3
    assert value("time_to_first_token_seconds_count") == value("request_prompt_tokens_count") == 3
    assert value("e2e_request_latency_seconds_count") == value("request_generation_tokens_count") == 3
    assert value("request_generation_tokens_sum") == 11
    assert value("generation_tokens_total") >= 12
    assert value("inter_token_latency_seconds_count") >= 8
    assert value("prompt_tokens_by_source_total", source="computed") == 4 + 4 + 19
    stored = value("prompt_tokens_by_source_total", source="context")
    assert stored == value("prefix_cache_hits_total") > 1000
    assert value("prompt_tokens_total") == value("prefix_cache_queries_total") == stored + 27
    assert value("requests_by_method_total", method="csattention") >= 1
    assert (
        0
        < value("keys_read_total", method="csattention")
        < value("keys_available_total", method="csattention")
    )
    assert (value("context_loads_total"), value("contexts_in_memory")) == (1, 1)
    assert value("kv_offload_load_bytes_total") == value("context_memory_bytes") > 0
    wait_until(lambda: value("num_requests_running") == value("num_requests_waiting") == 0)
    assert value("kv_cache_usage_perc") == 0 < value("context_memory_usage_perc") < 1


def test_a_refusal_is_counted_by_its_reason(scraped: Scraped) -> None:
    with pytest.raises(MethodUnsupportedError) as refused:
        scraped.client.generate(text="No context", max_tokens=3, method="csattention").read()
    wait_until(lambda: scraped.value("request_failures_total", reason=refused.value.reason) == 1)


def test_names_of_the_field_are_there_as_the_official_parser_reads_them(scraped: Scraped) -> None:
    names = {sample.name for family in parse(scraped.text()) for sample in family.samples}
    for prefix in ("sparsekv", "vllm"):
        assert {f"{prefix}:{name}" for name in OF_THE_FIELD} <= names


def test_no_label_grows_with_contexts_requests_or_users(scraped: Scraped) -> None:
    samples = [sample for family in parse(scraped.text()) for sample in family.samples]
    labels = {label for sample in samples for label in sample.labels}
    assert {sample.labels.get("tenant", "other") for sample in samples} == {"other"}, "no file names others"
    told = {
        "kv_dtype",
        "device",
        "max_sessions",
        "max_waiting",
        "session_memory_bytes",
        "context_memory_bytes",
    }
    assert (
        {"model_name", "le"}
        <= labels
        <= {"model_name", "le", "finished_reason", "source", "result", "method", "reason", "tier", "tenant"}
        | told
    )


@pytest.mark.parametrize("file", ["board.json", "alerts.yml"])
def test_boards_and_alerts_ask_for_what_is_there(scraped: Scraped, file: str) -> None:
    text = (MONITORING / file).read_text()
    if file.endswith("json"):
        panels = json.loads(text)["panels"]
        text = " ".join(target["expr"] for panel in panels for target in panel["targets"])
        assert len(panels) > 10
    asked = set(re.findall(r"sparsekv:\w+", text))
    assert len(asked) > 2
    emitted = {sample.name for family in parse(scraped.text()) for sample in family.samples}
    counted_later = {"sparsekv:request_failures_total"}  # of a kind of failure that there has not been
    assert asked - counted_later <= emitted


def test_a_port_that_is_taken_or_that_others_reach_is_refused(scraped: Scraped, library: Library) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"--metrics is 0\.0\.0\.0:9090, which other machines can reach"
    ):
        library.config(metrics="0.0.0.0:9090")
    taken = scraped.address
    with (
        DecodeServer(library.config(metrics=taken)) as server,
        pytest.raises(AddressError, match="--metrics"),
    ):
        server.load()


def test_audits_are_told_by_metrics_and_explanations(scraped: Scraped, lamp: str) -> None:
    def found() -> tuple[float, float]:
        told = {"method": "csattention"}
        return scraped.value("audited_kl_nats_count", **told), scraped.value("audited_kl_nats_sum", **told)

    steps, nats = found()
    with scraped.client.generate(
        lamp, text="Who?", max_tokens=9, method="csattention", explain=True
    ) as generation:
        generation.read()
        why = generation.summary.explanation
    assert (why.audited_steps, why.audited_kl > 0) == (8, True)
    wait_until(lambda: found()[0] == steps + 8)
    assert found()[1] - nats == pytest.approx(8 * why.audited_kl)
    with scraped.client.generate(lamp, text="Who?", max_tokens=3, method="full", explain=True) as generation:
        generation.read()
        why = generation.summary.explanation
    assert (why.audited_steps, why.audited_kl) == (0, 0.0)  # nothing was left out


def test_drafts_are_counted(scraped: Scraped, lamp: str) -> None:
    with scraped.client.generate(lamp, text="Who? Who? Who?", max_tokens=60, method="exact") as generation:
        generation.read()
        summary = generation.summary
    assert scraped.value("spec_decode_num_draft_tokens_total") == summary.drafted_tokens > 0
    assert scraped.value("spec_decode_num_accepted_tokens_total") == summary.accepted_tokens


def test_values_fall_below_the_least_bound_that_is_not_below_them() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.note(value)
    assert histogram.told() == ([("1", 2.0), ("2", 3.0), ("+Inf", 4.0)], 10.0)
