"""Killed, interrupted, crowded and out of disk: the store stays usable, and the next job cleans up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from index_store.cli.console import reporter_for
from index_store.methods.presets import get_method
from index_store.store.catalog import Store
from index_store.store.writer import ContextWriter
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import run_job
from tests.index_store.store.writing.writer_processes import WRITING, die_at_call
from tests.prefill_worker.conftest import MakeConfig, hidden_entries
from tests.support.forking import killed_at_each_step, ran, start
from tests.support.models import LAYER_KINDS, write_model_folder


def run_in_process(config: PrefillConfig, result: Path | None = None) -> None:
    report = run_job(config, reporter_for())
    if result is not None:
        result.write_text(json.dumps({"id": report.manifest.id, "created": report.created}))


def run_until(config: PrefillConfig, die_at: int) -> None:
    """Kills itself before a step of writing."""
    die_at_call(die_at, (ContextWriter, "write_state"), *WRITING)
    run_job(config, reporter_for())


@pytest.mark.nightly
def test_killed_before_any_array_of_a_model_with_states(make_config: MakeConfig, tmp_path: Path) -> None:
    family, settings = LAYER_KINDS["states"]
    model = write_model_folder(tmp_path / "model", family, layers=3, **settings)
    config = make_config(model=str(model), method=("full",))
    kept = run_job(replace(config, salt="keeper"), reporter_for()).manifest
    store, steps = Store(config.store), 0
    for _ in killed_at_each_step(run_until, config):
        steps += 1
        for manifest in store.list():
            assert store.verify(manifest.id) == []
            if manifest.id != kept.id:  # killed after the rename
                store.delete(manifest.id)
    assert (
        steps > len(kept.arrays) + 2
    )  # each is made, and one of them is the states'; then the sync and the rename
    assert store.verify(kept.id) == []
    assert hidden_entries(config.store) == []


@pytest.mark.slow
def test_jobs_with_different_methods_share_a_context(make_config: MakeConfig) -> None:
    methods = ("csattention", "squeezed", "quest")
    jobs = [start(run_in_process, make_config(method=(method,))) for method in methods]
    for process in jobs:
        process.join()
    assert [process.exitcode for process in jobs] == [0, 0, 0]
    store = Store(make_config().store)
    (stored,) = store.list()
    assert set(stored.methods) == set(methods)
    assert all(get_method(method).on(stored) for method in methods)
    assert store.verify(stored.id) == []
    assert hidden_entries(store.path) == []


def command(config: PrefillConfig, *more: str) -> list[str]:
    arguments = [
        "run",
        "--model",
        config.model,
        "--input",
        str(config.input[0]),
        "--store",
        str(config.store),
    ]
    return [sys.executable, "-m", "prefill_worker", *arguments, *more]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_ends_the_job_cleanly(make_config: MakeConfig, tmp_path: Path, sent: int, code: int) -> None:
    config = make_config()
    config.input[0].write_text("The tide came in, and went out again. " * 100)
    # In a pipe progress is told every ten seconds; here at every step.
    often = "import index_store.cli.console as shown; shown.LINE_EVERY_SECONDS = 0; "
    often += "from prefill_worker.__main__ import main; main()"
    python, _, _, *arguments = command(config, "--chunk", "1")
    process = subprocess.Popen(
        [python, "-c", often, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:  # until the model reads
        seen += line
        if line.startswith("prefill:"):
            break
    process.send_signal(sent)
    output, rest = process.communicate(timeout=120)
    assert process.returncode == code, seen + rest
    assert output == ""
    assert "Traceback" not in rest
    assert Store(config.store).entries() == []
    assert hidden_entries(config.store) == []


@pytest.mark.slow
def test_a_disk_limit_ends_the_job_with_a_sentence(make_config: MakeConfig) -> None:
    """A limit on the size of files stands for a disk that fills up while a chunk is written."""
    config = make_config()
    # No bytecode is written under the limit, which would cut it off for everybody who imports it later.
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "limited", *command(config)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = ran(limited, env=environment)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "Raise the limit on file size" in last
    assert "Traceback" not in done.stderr
    assert Store(config.store).entries() == []
    assert hidden_entries(config.store) == []
