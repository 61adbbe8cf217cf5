"""What contexts and steps take of a GPU's memory, against what the accounting of `sessions_gpu.py` counts for them."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from first_token import DISTINCT, write_context
from host_gpu import Lanes
from random_model import DTYPE, QUERY_STD, make_model
from served_memory import Served

from decode_engine.config import Compilation, search_cores
from decode_engine.device.step_model import step_model
from decode_engine.evaluation.machine import describe_machine
from decode_engine.host.workers import SearchThreads
from decode_engine.warm_up import made_up_context
from index_store.arena import Arena
from index_store.catalog import Store
from index_store.context_loading import placed_bytes
from index_store.manifest import ModelIdentity
from index_store.methods import Method
from index_store.placement import MemoryBytes, Placement

LAYERS, TOKENS, SESSION_TOKENS, STEPS = DISTINCT, 65536, 128, 3
SHARE, SLACK = 1.1, 2**24
"""What may be taken per byte counted, and beside it: logits and inputs of a step, rounding by the allocator."""


def check_counts(methods: Mapping[str, Method]) -> int:
    """Prints a line per method and placement; 1 when one took more than was counted, or there is no GPU."""
    if not torch.cuda.is_available():
        typer.echo("error: --check needs a CUDA device", err=True)
        return 1
    # Matrix products keep scratch memory for every stream, 32 MiB where this says nothing, which is no context's.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    model, identity = make_model(LAYERS)
    device = torch.device("cuda")
    machine, failed = describe_machine(), False
    for label, method in methods.items():
        for row in compared(model, identity, label, method, device, TOKENS):
            failed = failed or "missed" in row
            typer.echo(json.dumps(row | {"machine": machine}))
    return int(failed)


def compared(
    model: Any, identity: ModelIdentity, label: str, method: Method, device: torch.device, tokens: int
) -> Iterator[dict[str, Any]]:
    """A row for each placement: bytes after loading and after steps, counted and taken."""
    run = step_model(model, Compilation.OFF)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store", create=True)
        made = made_up_context(
            identity, DTYPE, method, tokens, distinct=DISTINCT, device=device, calibrated_for=QUERY_STD
        )
        manifest = write_context(store, made, "0" * 64)
        made.release()
        del made
        for placement in Placement:
            served = Served(manifest, method, placement, SESSION_TOKENS)
            counted = placed_bytes(manifest, device, placement).device - served.slots
            # The second time everything is compiled, and libraries have their own memory.
            for _ in range(2):
                loaded, stepped = taken(model, run, store, manifest.id, method, placement, device)
            row = {
                "bench": "sessions", "figure": "check", "method": label, "placement": placement.value,
                "tokens": tokens, "layers": identity.layers,
                "context_counted": counted, "context_taken": loaded,
                "rest_counted": served.needed(1, 1).device - counted, "rest_taken": stepped - loaded,
            }  # fmt: skip
            yield row | ({"missed": True} if misses(row) else {})


def misses(row: Mapping[str, Any]) -> bool:
    """Whether more was taken than counted."""
    return any(row[f"{part}_taken"] > SHARE * row[f"{part}_counted"] + SLACK for part in ("context", "rest"))


def taken(
    model: Any,
    run: Any,
    store: Store,
    id_: str,
    method: Method,
    placement: Placement,
    device: torch.device,
) -> tuple[int, int]:
    """Bytes of the device after loading the context, and after steps of a session on it."""
    begin = allocated(device)
    searching = SearchThreads(search_cores())
    try:
        with Arena(MemoryBytes(2**40, 2**40), device=device, placement=placement).acquire(
            store, id_
        ) as context:
            loaded = allocated(device) - begin
            lanes = Lanes(run, model, [context], method, searching)
            tokens = [7]
            for _ in range(STEPS):
                tokens = lanes.step(tokens)
            stepped = allocated(device) - begin
            del lanes
    finally:
        searching.close()
    return loaded, stepped


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on the device, as torch counts them."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
