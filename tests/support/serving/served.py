"""Prefilled toy contexts in memory, each with a runner of the model that made it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from index_store.cli.console import LineReporter
from index_store.memory.arena import Arena
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import run_job
from tests.support.models import write_model_folder

TEXT = "The lamp of the grey harbour was lit by a keeper who counted ships. " * 6
PROMPT = "\nQuestion: who lit it?\nAnswer:"


@dataclass(frozen=True)
class Served:
    """A prefilled toy context and the runner of its model."""

    folder: Path
    store: Store
    context: ResidentContext
    runner: ModelRunner

    def start(self, method: Method) -> Session:
        """A session of the method over the context."""
        return self.runner.start(self.context, method.on(self.context.manifest))


def serve(
    path: Path,
    family: str,
    methods: tuple[str, ...] = ("csattention", "csattention-paper", "multipole-tree"),
    *,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    weights: str = "auto",
) -> Iterator[Served]:
    folder = write_model_folder(path / "model", family, layers=3, head_dim=head_dim, dtype=dtype)
    document = path / "document.txt"
    document.write_text(TEXT)
    report = run_job(
        PrefillConfig(
            model=str(folder),
            store=path / "store",
            input=(document,),
            method=methods,
            chunk=100,
            dense_layers="0",
        ),
        LineReporter(io.StringIO()),
    )
    store = Store(path / "store")
    with Arena(2**30).acquire(store, report.manifest.id) as context:
        yield Served(folder, store, context, ModelRunner(resolve_model(str(folder)), weights=weights))
