"""A corpus on Ray: documents are read, ordered by length, and made by a pool of workers."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from index_store.cli.console import LINE_EVERY_SECONDS, reporter_for
from index_store.errors import InvalidArgumentError, JobLostError, format_bytes
from prefill_worker.config import CorpusConfig
from prefill_worker.corpus.documents import CorpusFile, Document, documents_of, find_files
from prefill_worker.corpus.making import CorpusWorker, Outcome

if TYPE_CHECKING:
    from pyarrow import Table
    from ray.data import Dataset

_BLOCKS_A_WORKER = 32
_MOST_IN_A_BLOCK = 64
"""Documents that are given out at once: with longest first and so many blocks no worker waits long for another one."""


@dataclass
class CorpusReport:
    """What became of a corpus: documents, tokens of their contexts, bytes of their texts.

    documents, total_bytes: of all; the rest so far. made: contexts that are new. present: that the store had.
    """

    documents: int
    total_bytes: int
    made: int = 0
    present: int = 0
    tokens: int = 0
    nbytes: int = 0
    failed: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Documents that are behind us."""
        return self.made + self.present + len(self.failed)

    def note(self, outcome: Outcome) -> None:
        """Counts one more."""
        self.nbytes += outcome.nbytes
        self.tokens += outcome.tokens
        if outcome.problem:
            self.failed.append(outcome)
        elif outcome.created:
            self.made += 1
        else:
            self.present += 1

    def failures(self) -> list[dict[str, str]]:
        """Documents that failed, as JSON."""
        return [
            {"source": each.source, "reason": each.reason, "problem": each.problem} for each in self.failed
        ]

    def describe(self) -> dict[str, object]:
        """As JSON."""
        counts = {name: getattr(self, name) for name in ("documents", "made", "present", "tokens")}
        return {
            **counts,
            "failed": len(self.failed),
            "text_bytes": self.nbytes,
            "seconds": round(self.seconds, 1),
        }

    def told(self) -> str:
        """In one line."""
        return (
            f"{self.done:,} of {self.documents:,} documents ({self.made:,} made, {self.present:,} there, "
            f"{len(self.failed):,} failed), {self.tokens:,} tokens, {format_bytes(self.nbytes)} of "
            f"{format_bytes(self.total_bytes)} of text"
        )


def run_corpus(
    config: CorpusConfig, stream: TextIO, *, quiet: bool = False, lines: bool = False
) -> CorpusReport:
    """Makes contexts of all documents that the store lacks.

    It keeps no state beside the store: run again, it goes on where it was ended or killed. stream: where progress is
    told, as JSON lines where `lines`. Raises InvalidArgumentError without Ray or without documents, and what
    `CorpusWorker` raises.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if config.ray_address is None:
        # Ray reads it when it is imported. Else its processes listen at all of the machine's addresses: it replaces
        # 127.0.0.1 by another one, wherever it is told so.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray.data
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            "corpus needs the package ray; install it with `pip install 'sparsekv[ray]'`"
        ) from error
    began = time.monotonic()
    files, others = find_files(config.sources)
    CorpusWorker(config)  # refuses here what every worker would refuse
    reporter = reporter_for(stream, quiet=quiet)
    if others:
        reporter.note(f"{others:,} files of other kinds are passed over")
    with _cluster(config.ray_address):
        listed = ray.data.from_items([asdict(file) for file in files])
        read = partial(_read, text_field=config.text_field, name_field=config.name_field)
        documents = listed.flat_map(read).sort("nbytes", descending=True).materialize()
        sizes = {
            row["source"]: row["nbytes"] for row in documents.select_columns(["source", "nbytes"]).iter_rows()
        }
        report = CorpusReport(len(sizes), sum(sizes.values()))
        reporter.note(f"{report.documents:,} documents, {format_bytes(report.total_bytes)} of text")
        with reporter.phase("corpus", "documents") as update:
            spoke = time.monotonic()
            for outcome in _outcomes(documents, len(sizes), config):
                del sizes[outcome.source]
                report.note(outcome)
                update(report.done, report.documents)
                if time.monotonic() - spoke >= LINE_EVERY_SECONDS or not sizes:
                    spoke = time.monotonic()
                    report.seconds = spoke - began
                    reporter.note(json.dumps(report.describe()) if lines else report.told())
        lost = JobLostError("its worker ended, and others after it; most likely for want of memory")
        for source, nbytes in sizes.items():
            report.note(Outcome(source, nbytes, problem=lost.message, reason=lost.reason))
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """A running cluster, or one of this machine, on loopback, that ends with the block."""
    import ray
    from ray.data import DataContext

    os.environ.setdefault(
        "RAY_BACKEND_LOG_LEVEL", "fatal"
    )  # else it warns of arguments that this process holds
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            ray.init(_node_ip_address="127.0.0.1", include_dashboard=False, **quiet)
        else:
            ray.init(address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        told = str(error).strip().split("\n", 1)[0]
        raise InvalidArgumentError(f"--ray-address is {address!r}, and Ray does not begin: {told}") from error
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.max_errored_blocks = (
        -1
    )  # documents of a worker that ends again and again have failed, others go on
    try:
        yield
    finally:
        ray.shutdown()


def _outcomes(documents: Dataset, count: int, config: CorpusConfig) -> Iterator[Outcome]:
    import ray
    from ray.data import ActorPoolStrategy

    together = max(1, min(_MOST_IN_A_BLOCK, count // (config.workers * _BLOCKS_A_WORKER)))
    total = ray.cluster_resources()
    share = {"num_cpus": max(1, int(total.get("CPU", 1)) // config.workers)}
    if config.torch_device.type == "cuda":
        share = {"num_gpus": 1, "num_cpus": 1}
    for resource, name in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        if share.get(resource, 0) * config.workers > total.get(name, 0):
            raise InvalidArgumentError(
                f"--workers is {config.workers}, and Ray has {total.get(name, 0):g} {name}s; expected as many at most"
            )
    made = documents.repartition(target_num_rows_per_block=together).materialize()
    with warnings.catch_warnings():
        # Restarts have no parameters of a name yet; without them a document that kills its worker does so for ever.
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        made = made.map_batches(
            _Made,
            fn_constructor_args=(config,),
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=config.workers),
            max_restarts=-1,
            max_task_retries=config.retries,
            **share,
        )
    for row in made.iter_rows():
        yield Outcome(**row)


def _read(row: dict[str, Any], text_field: str, name_field: str) -> Iterator[dict[str, Any]]:
    for document in documents_of(CorpusFile(**row), text_field, name_field):
        yield {**asdict(document), "nbytes": document.nbytes}


class _Made:
    """A worker in a process of its own."""

    def __init__(self, config: CorpusConfig) -> None:
        self._worker = CorpusWorker(config)

    def __call__(self, batch: Table) -> Table:
        import pyarrow

        rows = [{name: value for name, value in row.items() if name != "nbytes"} for row in batch.to_pylist()]
        return pyarrow.Table.from_pylist(
            [asdict(each) for each in self._worker.make(Document(**row) for row in rows)]
        )
