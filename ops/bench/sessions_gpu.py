"""How many sessions on long contexts a GPU serves at once, by the engine's own accounting of memory.

A device budget holds the model's weights, contexts as the arena counts them (`placed_bytes`: indexes, keys and values
where they are placed there, slots where they are not), what kernels derive from clusters, buffers of batches, and what
sessions may come to hold (`session_bytes`: `--session-tokens` of prompt and answer, with everything that joins the
indexes). The operator is taken to give contexts and sessions all of the budget that the weights leave. Host memory
holds the rest of the contexts, and what batches exchange with searching cores.

`own` is the largest number of sessions of which each has a context of its own, for every size of host memory, and
`limit` what the next one lacks; `shared` is that on one context, with the first of these sizes. The model has the
shape of Llama-3.1-8B, the contexts are described by manifests, and nothing of that size is made: no GPU is needed.

One JSON line per method and placement; `--table` prints a table for a document instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import typer
from general_steps import parse_method
from random_model import DTYPE, make_model, weight_bytes
from served_memory import METHODS, Served

from decode_engine.model.warm_up import made_up_context
from index_store.memory.memory_sizes import parse_size
from index_store.memory.placement import MemoryBytes, Placement
from index_store.methods.method import Method
from index_store.store.manifest import (
    IndexEntry,
    Manifest,
    ModelIdentity,
    index_array_entry,
    kv_entry,
    tokens_entry,
)

BLOCK = 8192
"""Keys that are clustered together, so that arrays grow in proportion from one multiple to the next."""
MOST = 4096


def describe_context(identity: ModelIdentity, method: Method, tokens: int) -> Manifest:
    """The manifest of a context of the method: its arrays grow in proportion, as two small ones show.

    Raises typer.BadParameter unless tokens are a multiple of BLOCK.
    """
    if tokens % BLOCK or tokens < BLOCK:
        raise typer.BadParameter(f"tokens are {tokens}, expected a multiple of {BLOCK}")
    narrow = replace(identity, layers=1, query_heads=1, kv_heads=1)
    small, twice = (made_up_context(narrow, DTYPE, method, count).manifest for count in (BLOCK, 2 * BLOCK))
    indexes = []
    for first, second in zip(small.indexes, twice.indexes, strict=True):
        arrays = []
        for one, two in zip(first.arrays, second.arrays, strict=True):
            grown = [
                a + (b - a) * (tokens // BLOCK - 1) for a, b in zip(one.shape[2:], two.shape[2:], strict=True)
            ]
            shape = (identity.kv_heads, *grown)
            arrays.append(
                index_array_entry(first.name, one.path.rpartition("/")[2], identity.layers, shape, one.dtype)
            )
        layers = tuple(range(identity.layers))
        indexes.append(
            IndexEntry(first.name, first.kind, first.parameters, layers, tuple(arrays), first.thresholds)
        )
    return replace(
        small,
        model=identity,
        token_count=tokens,
        tokens=tokens_entry(tokens),
        kv=kv_entry(identity, tokens, DTYPE),
        indexes=tuple(indexes),
    )


def most_sessions(served: Served, budget: MemoryBytes, shared: bool) -> tuple[int, str]:
    """The largest number that fits into what the weights leave, and the memory that one more would overflow."""
    count = 0
    while count < MOST:
        needed = served.needed(count + 1, 1 if shared else count + 1)
        if not needed.fits(budget):
            return count, "device" if needed.device > budget.device else "host"
        count += 1
    return count, "neither"


def figure(served: Served, room: int, hosts: Sequence[str]) -> dict[str, Any]:
    """The line of one method and placement. room: of the device, without the weights."""
    row: dict[str, Any] = {
        "context_host_gb": round(served.context.host * 1e-9, 3),
        "context_device_gb": round(served.context.device * 1e-9, 3),
        "session_gb": round(served.session * 1e-9, 3),
        "batch_row_gb": round(served.batches(1).device * 1e-9, 3),
    }
    budgets = {name: MemoryBytes(parse_size(name), room) for name in hosts}
    for name, budget in budgets.items():
        row[f"own_{name}"], row[f"limit_{name}"] = most_sessions(served, budget, shared=False)
    row["shared"], row["shared_limit"] = most_sessions(served, budgets[hosts[0]], shared=True)
    return row


def table(rows: Sequence[dict[str, Any]], hosts: Sequence[str]) -> str:
    """For a document."""
    head = [
        "method",
        "placement",
        "context: device, host",
        "session",
        *(f"own contexts, {h}" for h in hosts),
        "one context",
    ]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---:|" + "---|" * len(hosts) + "---:|"]
    for row in rows:
        own = [f"{row[f'own_{name}']} ({row[f'limit_{name}']})" for name in hosts]
        cells = [
            f"`{row['method']}`",
            f"`{row['placement']}`",
            f"{row['context_device_gb']:.1f}, {row['context_host_gb']:.1f} GB",
            f"{row['session_gb']:.2f} GB",
            *own,
            f"{row['shared']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    methods: Annotated[str, typer.Option(help="Comma-separated; see decode_gpu.py.")] = METHODS,
    tokens: Annotated[int, typer.Option(help="Of a context.")] = 131072,
    session_tokens: Annotated[int, typer.Option(help="Prompt and answer of a session.")] = 512,
    device: Annotated[str, typer.Option(help="Bytes of GPU memory for everything.")] = "40GB",
    hosts: Annotated[
        str, typer.Option(help="Bytes of host memory for contexts, comma-separated.")
    ] = "128GiB,1TiB",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 32,
    as_table: Annotated[bool, typer.Option("--table", help="Print a table for a document.")] = False,
) -> None:
    """Counts sessions; one JSON line per method and placement."""
    parsed = {label: parse_method(label) for label in methods.split(",")}
    model, identity = make_model(layers, "meta")
    weights, sizes = weight_bytes(model), hosts.split(",")
    room = parse_size(device) - weights
    rows = []
    for label, method in parsed.items():
        manifest = describe_context(identity, method, tokens)
        for placement in Placement:
            row = {
                "bench": "sessions", "method": label, "placement": placement.value, "tokens": tokens, "layers": layers,
                "session_tokens": session_tokens, "device": device, "weights_gb": round(weights * 1e-9, 3),
            }  # fmt: skip
            rows.append(row | figure(Served(manifest, method, placement, session_tokens), room, sizes))
            if not as_table:
                typer.echo(json.dumps(rows[-1]))
    if as_table:
        typer.echo(table(rows, sizes))


if __name__ == "__main__":
    typer.run(main)
