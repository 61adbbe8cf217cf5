"""What contexts and steps take of a GPU's memory, against what the accounting of `sessions_gpu.py` counts for them.

Contexts of a few layers are written, loaded and stepped over in every placement, and what torch has allocated is
compared with what was counted: the exit code is 1 when anything took a tenth more than its count, or could not be
compared.

One JSON line per method and placement.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import torch
import typer
from captured_steps import Lanes
from first_token import DISTINCT, write_context
from general_steps import failure, parse_method, require_device
from random_model import DTYPE, QUERY_STD, make_model
from served_memory import METHODS, Served

from decode_engine.config import Compilation, search_cores
from decode_engine.evaluation.comparison.machine import describe_machine
from decode_engine.host_search.workers import SearchThreads
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.step_model import step_model
from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import MemoryBytes, Placement
from index_store.methods.method import Method
from index_store.store.catalog import Store
from index_store.store.manifest import ModelIdentity

LAYERS, SESSION_TOKENS, STEPS = DISTINCT, 128, 3
SHARE, SLACK = 1.1, 2**24
"""What may be taken per byte counted, and beside it: logits and inputs of a step, rounding by the allocator."""


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
            row: dict[str, Any] = {
                "bench": "memory_gpu", "method": label, "placement": placement.value,
                "tokens": tokens, "layers": identity.layers,
            }  # fmt: skip
            try:
                served = Served(manifest, method, placement, SESSION_TOKENS)
                counted = placed_bytes(manifest, device, placement).device - served.slots
                # The second time everything is compiled, and libraries have their own memory.
                for _ in range(2):
                    loaded, stepped = taken(model, run, store, manifest.id, method, placement, device)
                row |= {
                    "context_counted": counted, "context_taken": loaded,
                    "rest_counted": served.needed(1, 1).device - counted, "rest_taken": stepped - loaded,
                }  # fmt: skip
            except Exception as error:  # other placements may well be compared
                row |= failure(error)
            yield row | ({"missed": True} if misses(row) else {})


def misses(row: Mapping[str, Any]) -> bool:
    """Whether more was taken than counted."""
    return "error" not in row and any(
        row[f"{part}_taken"] > SHARE * row[f"{part}_counted"] + SLACK for part in ("context", "rest")
    )


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
            lanes = Lanes(run, model, [context], searching)
            lanes.start(method)
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


def main(
    methods: Annotated[str, typer.Option(help="Comma-separated; see decode_gpu.py.")] = METHODS,
    tokens: Annotated[int, typer.Option(help="Of a context.")] = 65536,
) -> None:
    """Compares counts with a GPU's memory."""
    require_device()
    # Matrix products keep scratch memory for every stream, 32 MiB where this says nothing, which is no context's.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    model, identity = make_model(LAYERS)
    device = torch.device("cuda")
    machine, failed = describe_machine(), False
    for label in methods.split(","):
        for row in compared(model, identity, label, parse_method(label), device, tokens):
            failed = failed or "missed" in row or "error" in row
            typer.echo(json.dumps(row | {"machine": machine}))
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
