"""Contexts that a benchmark makes for itself, and a server of its own over them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from decode_engine.evaluation.tasks.documents import source_text
from harness.report import CheckFailedError
from index_store.cli.console import SilentReporter
from index_store.models.resolve import resolve_model
from index_store.models.tokenizer import Tokenizer, load_tokenizer
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from prefill_worker.build.stages import Clock
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.document_layers import KeptModel, Means
from prefill_worker.jobs.job import carry_out
from prefill_worker.jobs.prepared_job import job_over_tokens


class Shelf:
    """A new store, and contexts that are prefilled into it one after the other by one model, which is loaded once."""

    def __init__(
        self, store: Path, methods: Sequence[str] = (), *, model: str = "reader", device: str = "cpu"
    ) -> None:
        """methods: those whose indexes contexts have; the default method's where there are none."""
        self.store, self._model, self._methods, self._device = store, model, tuple(methods), device
        self._folder = resolve_model(model)
        self._means = Means(KeptModel().load, stays=True, store=Store(store, create=True))
        self.tokenizer: Tokenizer = load_tokenizer(self._folder)

    def add(self, name: str, text: str) -> Manifest:
        """A context of a text."""
        return self._add(name, [*self.tokenizer.prefix_ids, *self.tokenizer.encode(text)])

    def add_slice(self, name: str, tokens: int, number: int, of: int, tenant: str = "") -> Manifest:
        """A context of so many tokens of the packaged novels: the slice of that number, of some all over them.

        Slices overlap where they have to; each begins elsewhere. Raises CheckFailedError where the novels are too
        short.
        """
        prefix = self.tokenizer.prefix_ids
        room = len(self._novels) - (tokens - len(prefix))
        if room < of:
            raise CheckFailedError(
                f"{of} contexts of {tokens} tokens do not begin at different places of a text of {len(self._novels)}"
            )
        start = room * number // of
        return self._add(name, [*prefix, *self._novels[start : start + tokens - len(prefix)]], tenant)

    @cached_property
    def _novels(self) -> list[int]:
        return self.tokenizer.encode(source_text(()))

    def _add(self, name: str, token_ids: Sequence[int], tenant: str = "") -> Manifest:
        config = PrefillConfig(
            model=self._model,
            store=self.store,
            input=(Path("-"),),  # in whose place are the tokens
            name=name,
            method=self._methods,
            device=self._device,
            tenant=tenant,
        )
        job = job_over_tokens(config, self._folder, token_ids, name)
        return carry_out(job, SilentReporter(), Clock(), self._means).manifest


@dataclass(frozen=True)
class Served:
    """A server that takes calls. pid: of its process. url: of its HTTP port, "" without one."""

    pid: int
    address: str
    url: str


@contextmanager
def serving(store: Path, *options: str, model: str = "reader", device: str = "cpu") -> Iterator[Served]:
    """Starts `decode-engine serve` on free ports and ends it. Raises CheckFailedError where it does not start."""
    command = [sys.executable, "-m", "decode_engine", "serve", "--store", str(store), "--model", model]
    command += ["--device", device, "--listen", "127.0.0.1:0", "--format", "json", "--log-level", "error"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline() if server.stdout else ""
            if not line:
                raise CheckFailedError("the server did not start")
            told = json.loads(line)
            yield Served(server.pid, told["address"], told.get("url", ""))
        finally:
            server.terminate()
