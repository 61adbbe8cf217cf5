"""Prefilled toy contexts in memory, each with a runner of the model that made it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from index_store.cli.console import LineReporter
from index_store.memory.arena import Arena
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import run_job
from tests.support.models import LAYER_KINDS, write_model_folder

TEXT = "The lamp of the grey harbour was lit by a keeper who counted ships. " * 6
PROMPT = "\nQuestion: who lit it?\nAnswer:"


@dataclass(frozen=True)
class Served:
    """A prefilled toy context and the runner of its model."""

    folder: Path
    store: Store
    context: ResidentContext
    runner: ModelRunner

    def start(self, method: Method | str) -> Session:
        """A session of the method over the context."""
        method = get_method(method) if isinstance(method, str) else method
        return self.runner.start(self.context, method.on(self.context.manifest))


def serve(
    path: Path,
    kind: str,
    methods: tuple[str, ...] = ("csattention", "csattention-paper", "multipole-tree"),
    text: str = TEXT,
    *,
    dense_layers: str = "0",
    rows: str = "dtype",
    weights: str = "auto",
    **settings: Any,
) -> Iterator[Served]:
    """A context of a model of three layers. kind: one of LAYER_KINDS, or a family. settings: of the model's folder."""
    family, special = LAYER_KINDS.get(kind, (kind, {"head_dim": 32}))
    folder = write_model_folder(path / "model", family, layers=3, **{**special, **settings})
    yield from serve_text(
        path, str(folder), methods, text, dense_layers=dense_layers, rows=rows, weights=weights
    )


def serve_text(
    path: Path,
    model: str,
    methods: tuple[str, ...],
    text: str = TEXT,
    *,
    dense_layers: str = "0",
    rows: str = "dtype",
    weights: str = "auto",
) -> Iterator[Served]:
    document = path / "document.txt"
    document.write_text(text)
    config = PrefillConfig(
        model=model,
        store=path / "store",
        input=(document,),
        method=methods,
        chunk=100,
        dense_layers=dense_layers,
        rows=rows,
    )
    manifest = run_job(config, LineReporter(io.StringIO())).manifest
    with Arena(2**30).acquire(Store(config.store), manifest.id) as context:
        runner = ModelRunner(resolve_model(model), weights=weights)
        yield Served(Path(model), Store(config.store), context, runner)
        runner.close()


serving = contextmanager(serve)
