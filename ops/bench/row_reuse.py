"""How many of the rows that a decode step attends to were attended shortly before, and how many could be foretold.

That is what decides how many rows a step reads from host memory where keys and values lie there (docs/offload.md).

Regime: the packaged novels' first tokens are the context, prefilled by prefill-worker's command; then tokens are
sampled with temperature 1 from a fixed seed. Of the context's keys that a step's search lists in a layer and KV head:

- `again`: the share that was listed in the step before;
- `in_slots`: the share that would be in slots, as many as a context of that length has, the ones used longest ago taken
  first (here from all slots of a head; a device takes them from the 16 of a set);
- `foretold`: the share that is among the best keys, as many as are listed, for the queries predicted one layer early
  (`layer_ahead`), by their exact attention weights; layers but the first;
- `either`: the share that is in slots or foretold; layers but the first. The rest is what steps with `--prefetch` wait
  for.

The first --warm-up tokens are not counted. One JSON line per share of keys that is kept.

Shape legend: H KV heads, T = 1 positions, G group heads, N tokens of the context, R searched keys, d head dim.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import torch
import typer
from long_generation import prefill
from torch import Tensor

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.evaluation.comparison.machine import describe_machine
from decode_engine.evaluation.tasks import parse_length
from decode_engine.layers.sparse_layer import Observation, SparseLayer
from decode_engine.model.runner import ModelRunner
from decode_engine.steps.layer_ahead import predicted_queries
from index_store.errors import SparseKVError
from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import slots_per_head
from index_store.memory.resident import ResidentContext
from index_store.methods.method import get_method
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store


@dataclass
class Layer:
    """What a layer's steps listed until now, [H, N].

    last_HN: bool, in the last step. used_HN: int32, number of the step that listed a key last, 0 for none or when its
    slot was taken.
    """

    last_HN: Tensor
    used_HN: Tensor
    steps: int = 0

    def in_slots(self) -> Tensor:
        return self.used_HN > 0

    def add(self, listed_HN: Tensor, slots: int) -> None:
        self.steps += 1
        self.last_HN = listed_HN
        self.used_HN[listed_HN] = self.steps
        left = self.used_HN.argsort(1, descending=True)[:, slots:]
        self.used_HN.scatter_(1, left, 0)


@dataclass
class Counts:
    """Of listed keys: all, and those that were or could have been there; `ahead` are those of layers but the first."""

    listed: int = 0
    again: int = 0
    in_slots: int = 0
    ahead: int = 0
    foretold: int = 0
    either: int = 0
    layers: dict[int, Layer] = field(default_factory=dict)

    def add(self, number: int, seen: Observation, predicted: Tensor | None, counted: bool) -> None:
        listed_HN = listed_keys(seen)
        layer = self.layers.get(number)
        if layer is None:
            layer = Layer(torch.zeros_like(listed_HN), torch.zeros(listed_HN.shape, dtype=torch.int32))
            self.layers[number] = layer
        if counted:
            there_HN = layer.in_slots()
            self.listed += int(listed_HN.sum())
            self.again += int((listed_HN & layer.last_HN).sum())
            self.in_slots += int((listed_HN & there_HN).sum())
            if predicted is not None:
                foretold_HN = best_keys(seen, predicted, listed_HN.sum(1))
                self.ahead += int(listed_HN.sum())
                self.foretold += int((listed_HN & foretold_HN).sum())
                self.either += int((listed_HN & (foretold_HN | there_HN)).sum())
        layer.add(listed_HN, slots_per_head(listed_HN.shape[1]))

    def shares(self) -> dict[str, float]:
        return {
            "again": round(self.again / self.listed, 4),
            "in_slots": round(self.in_slots / self.listed, 4),
            "foretold": round(self.foretold / self.ahead, 4),
            "either": round(self.either / self.ahead, 4),
        }


def listed_keys(seen: Observation) -> Tensor:
    """[H, N] bool: keys of the context that the search lists."""
    heads, tokens = seen.rows.context_HN2D.shape[:2]
    listed_HN = torch.zeros(heads, tokens, dtype=torch.bool)
    for head, count in enumerate(seen.selection.counts_HT[:, 0].tolist()):
        ids = seen.selection.ids_HTK[head, 0, :count].long()
        listed_HN[head, ids[ids < tokens]] = True
    return listed_HN


def best_keys(seen: Observation, predicted_1QTD: Tensor, counts_H: Tensor) -> Tensor:
    """[H, N] bool: so many keys of the searched part of the context, for queries that were predicted, not scaled."""
    kv_HN2D = seen.rows.context_HN2D
    heads, tokens, _, dim = kv_HN2D.shape
    end = min(tokens, seen.search_end)
    q_HGD = predicted_1QTD[0, :, -1].float().view(heads, -1, dim) * dim**-0.5
    weights_HR = (q_HGD @ kv_HN2D[:, seen.sinks : end, 0].float().transpose(1, 2)).softmax(-1).sum(1)
    best_HN = torch.zeros(heads, tokens, dtype=torch.bool)
    for head, count in enumerate(counts_H.tolist()):
        best_HN[head, weights_HR[head].topk(count).indices + seen.sinks] = True
    return best_HN


def measure(
    runner: ModelRunner, context: ResidentContext, expression: str, keep: float, first: int, tokens: int,
    warm_up: int, seed: int,
) -> dict[str, float]:  # fmt: skip
    """Shares over the tokens that are generated after `first`."""
    session = runner.start(context, get_method(expression, keep).on(context.manifest))
    sampler, token, counts = Sampler(SamplingParameters(temperature=1.0, seed=seed)), first, Counts()
    observed: dict[int, Observation] = {}
    for number, layer in enumerate(session.layers):
        if isinstance(layer, SparseLayer):
            layer.observer = lambda seen, number=number: observed.__setitem__(number, seen)
    try:
        for step in range(warm_up + tokens):
            predicted: dict[int, Tensor] = {}
            with predicted_queries(runner.model, predicted):
                logits = runner.forward([session], [[token]])[0]
            for number, seen in observed.items():
                counts.add(number, seen, predicted.get(number), step >= warm_up)
            token = sampler.sample(logits[-1])
    finally:
        session.close()
    return counts.shares()


def main(
    out: Annotated[Path, typer.Option(help="Folder for the store.")],
    method: Annotated[str, typer.Option(help="Method that lists keys.")] = "pq",
    context_length: Annotated[str, typer.Option(help="Tokens of the context.")] = "16k",
    tokens: Annotated[int, typer.Option(help="Tokens to generate and count.")] = 200,
    warm_up: Annotated[int, typer.Option(help="Tokens to generate before.")] = 20,
    keep: Annotated[str, typer.Option(help="Fractions of the keys to keep.")] = "0.01,0.02,0.05",
    model: Annotated[str, typer.Option(help="Packaged model or a Hugging Face folder.")] = "reader",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Generates text after a long context and counts rows; one JSON line per share of keys."""
    machine = describe_machine()
    try:
        out.mkdir(parents=True, exist_ok=True)
        runner = ModelRunner(resolve_model(model))
        id_, first = prefill(runner, model, [method], parse_length(context_length), out)
        store = Store(out / "store")
        with Arena(placed_bytes(store.manifest(id_))).acquire(store, id_) as context:
            for share in (float(part) for part in keep.split(",")):
                row: dict[str, Any] = {
                    "method": method,
                    "keep": share,
                    "context": context.manifest.token_count,
                }
                row |= measure(runner, context, method, share, first, tokens, warm_up, seed)
                row |= {"tokens": tokens, "machine": machine}
                sys.stdout.write(json.dumps({"bench": "row_reuse", **row}) + "\n")
                sys.stdout.flush()
    except SparseKVError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
