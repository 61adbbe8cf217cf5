"""The files of ops/deploy: every option in them is one, ports and times fit each other, and systemd takes its units."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from decode_engine.gateway.app import ROUTES
from decode_engine.processes.attached import IN_ORDER_S
from decode_engine.rpc.door.access import TokenFile
from index_store.store.catalog import Store
from tests.support.forking import ran

DEPLOY = Path(__file__).parents[2] / "ops/deploy"
CERTIFICATES = Path(__file__).parents[1] / "support/certificates"
PROGRAMS = {"decode-engine": "decode_engine", "prefill-worker": "prefill_worker"}
PLACES = {
    "/etc/sparsekv/tls/tls": "tls",
    "/var/lib/sparsekv/store": "store",
    "/etc/sparsekv": "etc",
    "/store": "store",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """What the files name, in a folder: a store, tokens, a certificate and its key."""
    Store(tmp_path / "store", create=True)
    (tmp_path / "etc/tokens").mkdir(parents=True)
    TokenFile(tmp_path / "etc/tokens/tokens.json").create("laptop")
    shutil.copy(CERTIFICATES / "server.pem", tmp_path / "tls.crt")
    shutil.copy(CERTIFICATES / "server.key", tmp_path / "tls.key")
    return tmp_path


def moved(text: str, here: Path) -> str:
    """With places of a machine as those of the folder."""
    places = sorted(PLACES, key=len, reverse=True)
    return re.sub("|".join(places), lambda match: str(here / PLACES[match[0]]), text)


def used(
    words: list[str], here: Path, variables: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """The options that a command would use, as it says itself."""
    program, *rest = words
    line = [*(moved(word, here) for word in rest), "--check-config", "--format", "json"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, moved(value, here))
        with pytest.raises(SystemExit) as ended:
            import_module(f"{PROGRAMS[program]}.__main__").main(line)
    told = capsys.readouterr()
    assert ended.value.code == 0, told
    found = json.loads(told.out)
    assert not set(variables) & set(found["other_variables"])
    return {name: each["value"] for name, each in found["options"].items() if each["from"] != "default"}


def loaded(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def ports(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_compose_starts_what_there_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = loaded("compose.yaml")
    services = file["services"]
    server, worker = services["server"], services["worker"]
    told = used(["decode-engine", *server["command"]], here, server["environment"], capsys)
    assert used([*worker["entrypoint"], *worker["command"]], here, {}, capsys)["model"] == told["model"]
    published = [each.split(":") for each in server["ports"]]
    assert all(host == "127.0.0.1" for host, _, _ in published)
    assert [int(inside) for _, _, inside in published] == [ports(told["listen"]), told["http-port"]]
    (scrape,) = loaded("prometheus.yml")["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"server:{ports(told['metrics'])}"]}]
    assert f":{told['http-port']}/health" in server["healthcheck"]["test"][-1]
    assert int(server["stop_grace_period"].removesuffix("s")) > told["grace"] + IN_ORDER_S
    job = scrape["job_name"]
    rules = (DEPLOY.parent / "monitoring/alerts.yml").read_text()
    assert f'up{{job="{job}"}}' in rules
    for each in services.values():
        assert set(each.get("depends_on", ())) <= set(services)
        for volume in each.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in file["volumes"]


@pytest.mark.parametrize(("unit", "file"), [("sparsekv", "serve"), ("sparsekv-worker", "worker")])
def test_units_start_what_there_is(
    here: Path, unit: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DEPLOY / f"{unit}.service").read_text()
    values = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    variables = dict(
        pair.split("=") for name, said in values if name == "Environment" for pair in said.split()
    )
    assert variables["SPARSEKV_CONFIG"] == f"/etc/sparsekv/{file}.toml"
    settings = (DEPLOY / f"{file}.toml").read_text()
    (here / "etc" / f"{file}.toml").write_text(moved(settings, here))
    own = {name: value for name, value in variables.items() if name == "SPARSEKV_CONFIG"}
    lines = {name: said.removeprefix("/opt/sparsekv/bin/").split() for name, said in values}
    assert lines["ExecStartPre"] == [*lines["ExecStart"], "--check-config"]
    assert used(lines["ExecStart"], here, own, capsys)["model"] == "reader"
    shown = re.sub(r"^# (?=[a-z-]+ = \")", "", settings, flags=re.MULTILINE)
    assert set(tomllib.loads(shown)) - set(tomllib.loads(settings)) >= {"quotas"}
    limit = float(dict(values)["TimeoutStopSec"])
    assert limit > tomllib.loads(settings).get("grace", 0) + IN_ORDER_S
    assert dict(values)["SuccessExitStatus"] == str(128 + signal.SIGTERM)


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """By its own tool where the system has it; every key is one that it knows in any case."""
    known = {
        *("Description", "After", "Wants", "Type", "User", "StateDirectory", "CacheDirectory"),
        "LogsDirectory",
        *("Environment", "ExecStartPre", "ExecStart", "KillMode", "TimeoutStopSec", "Restart"),
        "SuccessExitStatus",
        *("LimitNOFILE", "Nice"),
        *("NoNewPrivileges", "PrivateTmp", "ProtectHome", "ProtectSystem", "WantedBy"),
    }
    units = []
    for path in sorted(DEPLOY.glob("*.service")):
        text = path.read_text().replace("/opt/sparsekv/bin", str(Path(sys.executable).parent))
        assert set(re.findall(r"^(\w+)=", text, re.MULTILINE)) <= known
        units.append(tmp_path / path.name)
        units[-1].write_text(text)
    tool = shutil.which("systemd-analyze")
    if tool is not None:
        done = ran([tool, "verify", "--man=no", *units])
        assert (done.returncode, done.stderr) == (0, "")


def test_kubernetes_starts_what_there_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    pod = documents["StatefulSet"]["spec"]["template"]
    server, worker = pod["spec"]["containers"]
    for name, text in documents["ConfigMap"]["data"].items():
        (here / "etc" / name).write_text(moved(text, here))
    told = used(["decode-engine", *server["args"]], here, {}, capsys)
    assert used([*worker["command"], *worker["args"]], here, {}, capsys)["store"] == told["store"]

    open_ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    wanted = {"grpc": ports(told["listen"]), "http": told["http-port"], "metrics": ports(told["metrics"])}
    assert open_ports == wanted
    for each in documents["Service"]["spec"]["ports"]:
        assert each["port"] == wanted[each["targetPort"]]
    clients, monitoring = documents["NetworkPolicy"]["spec"]["ingress"]
    assert [each["port"] for each in clients["ports"]] == [wanted["grpc"], wanted["http"]]
    assert [each["port"] for each in monitoring["ports"]] == [wanted["metrics"]]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(wanted["metrics"])

    paths = {route.path for route in ROUTES}
    probes = {name: server[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {each["path"] for each in probes.values()} <= paths
    assert probes["liveness"]["path"] != probes["readiness"]["path"]
    assert all((each["scheme"], each["port"]) == ("HTTPS", "http") for each in probes.values())
    before = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > before + told["grace"] + IN_ORDER_S

    labels = pod["metadata"]["labels"]
    for kind, selector in (("StatefulSet", "selector"), ("NetworkPolicy", "podSelector")):
        assert documents[kind]["spec"][selector]["matchLabels"] == labels
    assert documents["Service"]["spec"]["selector"] == labels
    volumes = {each["name"] for each in pod["spec"]["volumes"]} | {"store"}
    for each in (*pod["spec"]["initContainers"], server, worker):
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
        assert all(mount["mountPath"] for mount in each["volumeMounts"])
    limit = int(server["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert limit > int(told["memory"].removesuffix("GiB"))
