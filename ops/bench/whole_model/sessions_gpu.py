"""How many sessions on long contexts a GPU serves at once, by the engine's own accounting of memory.

usage: python ops/bench/whole_model/sessions_gpu.py [--methods full,csattention] [--tokens 131072] [--hosts 128GiB]

A device budget holds the model's weights, contexts as the arena counts them (`placed_bytes`: indexes, keys and values
where they are placed there, slots where they are not), what kernels derive from clusters, buffers of batches, and what
sessions may come to hold (`session_bytes`: `--session-tokens` of prompt and answer, with everything that joins the
indexes). The operator is taken to give contexts and sessions all of the budget that the weights leave. Host memory
holds the rest of the contexts, and what batches exchange with searching cores.

`own` is the largest number of sessions of which each has a context of its own, for every size of host memory, and
`limit` what the next one lacks; `shared` is that on one context, with the first of these sizes. The model has the
shape of Llama-3.1-8B, the contexts are described by manifests, and nothing of that size is made: no GPU is needed.

One JSON line per method and placement, and a table of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.made_up.contexts import make_model, weight_bytes
from harness.made_up.sessions import Served, describe_context, most_sessions
from harness.parsing import parse_method
from harness.report import reporting

from index_store.memory.memory_sizes import parse_size
from index_store.memory.placement import MemoryBytes, Placement

METHODS = "full,csattention,csattention+dropped:0.01/m8/pooled,refined+dropped:0.01"


def figure(served: Served, room: int, hosts: Sequence[str]) -> dict[str, Any]:
    """The line of one method and placement. room: of the device, without the weights."""
    row: dict[str, Any] = {
        "context_host_gb": served.context.host * 1e-9,
        "context_device_gb": served.context.device * 1e-9,
        "session_gb": served.session * 1e-9,
        "batch_row_gb": served.batches(1).device * 1e-9,
    }
    budgets = {name: MemoryBytes(parse_size(name), room) for name in hosts}
    for name, budget in budgets.items():
        row[f"own_{name}"], row[f"limit_{name}"] = most_sessions(served, budget, shared=False)
    row["shared"], row["shared_limit"] = most_sessions(served, budgets[hosts[0]], shared=True)
    return row


def main(
    methods: Annotated[str, typer.Option(help="Comma-separated; see decode_gpu.py.")] = METHODS,
    tokens: Annotated[int, typer.Option(help="Of a context.")] = 131072,
    session_tokens: Annotated[int, typer.Option(help="Prompt and answer of a session.")] = 512,
    device: Annotated[str, typer.Option(help="Bytes of GPU memory for everything.")] = "40GB",
    hosts: Annotated[
        str, typer.Option(help="Bytes of host memory for contexts, comma-separated.")
    ] = "128GiB,1TiB",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 32,
) -> None:
    """Counts sessions; one JSON line per method and placement."""
    with reporting("sessions", gpu=False) as report:
        model, identity = make_model(layers, "meta")
        weights, sizes = weight_bytes(model), hosts.split(",")
        for label in methods.split(","):
            method = parse_method(label)
            manifest = describe_context(identity, method, tokens)
            for placement in Placement:
                row: dict[str, Any] = {
                    "method": label, "placement": placement.value, "tokens": tokens, "layers": layers,
                    "session_tokens": session_tokens, "device": device, "weights_gb": weights * 1e-9,
                }  # fmt: skip
                served = Served(manifest, method, placement, session_tokens)
                report.add(row | figure(served, parse_size(device) - weights, sizes))


if __name__ == "__main__":
    typer.run(main)
