"""MuSe's error on queries, keys and values of the reader: by clusters, iterations and caps, by terms, by layer.

usage: python ops/bench/muse_error.py [--tokens 8192] [--device cpu] [--parts settings,ablations,causal,starts]

The reader reads a text with facts in it, in float32, and queries, keys and values of all layers are kept. `settings`:
acausal relative squared error (|found - exact|^2 / |exact|^2) for the settings of the paper's tables 1 and 5.
`ablations`: without the dipole, without the two stages (one query cluster), without the monopole (table 3), by layer.
`causal`: with exact blocks of 512, 1,024 and 2,048 tokens, with and without the dipole, by layer, and of the queries
after the first block alone; and as prefill computes it, block by block. `starts`: how tight the clusters of indexes
become that start from MuSe's clusters, and those that start anew, after how many iterations. One JSON line per row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from decode_engine.evaluation.tasks import make_document, source_text
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.index_specs import INDEX_SPECS
from index_store.models.loading import load_model, load_tokenizer, resolve_model
from index_store.store.stored_context import QuerySample
from prefill_worker.muse.attention import muse_attention
from prefill_worker.muse.backend import EAGER, backend_for
from prefill_worker.muse.kernels.reference import attend_reference
from prefill_worker.muse.ranges import RangeAttention
from prefill_worker.muse.settings import MuseSettings
from prefill_worker.reading.capture import Capture, plan_sample, register_attention
from prefill_worker.reading.prefill import run_context

CLUSTERS = (32, 64, 128)
ITERATIONS = (1, 3, 5)
CAPS = (1.5, 2.0, 4.0)
BLOCKS = (512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Layer:
    """Queries [1, Hq, N, d], keys and values [1, H, N, d] of one layer, float32."""

    query: Tensor
    key: Tensor
    value: Tensor

    def exact(self, causal: bool) -> Tensor:
        return scaled_dot_product_attention(
            self.query, self.key, self.value, is_causal=causal, enable_gqa=True
        )

    def muse(self, settings: MuseSettings, causal: bool) -> Tensor:
        return muse_attention(self.query, self.key, self.value, causal, enable_gqa=True, settings=settings)


def capture_layers(model_name: str, tokens: int, device: torch.device) -> list[Layer]:
    """Runs the model over a text with facts, and keeps what its attention was given."""
    folder = resolve_model(model_name)
    tokenizer = load_tokenizer(folder)
    document = make_document(tokenizer, source_text(()), tokens - len(tokenizer.prefix_ids), facts=24, seed=0)
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(document.text)]
    loaded = load_model(folder, register_attention(), torch.float32, device)
    plan = plan_sample(len(ids), [], len(ids), 0)
    capture = Capture(loaded.identity, len(ids), torch.float32, plan, device)
    run_context(loaded.model, capture, ids, 2048)
    layers = []
    for number in range(loaded.identity.layers):
        key, value = capture.kv(number).unbind(2)
        queries_HPGD = capture.query_sample(number).queries_HPGD
        query = queries_HPGD.transpose(1, 2).flatten(0, 1)
        layers.append(Layer(*(x[None].contiguous() for x in (query, key, value))))
    return layers


def squared_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).double().square().sum() / exact.double().square().sum())


def settings_rows(layers: list[Layer]) -> Iterator[dict[str, Any]]:
    exact = [layer.exact(False) for layer in layers]
    for clusters in CLUSTERS:
        for iterations in ITERATIONS:
            for cap in CAPS:
                settings = MuseSettings(clusters=clusters, iterations=iterations, cap=cap)
                errors = [
                    squared_error(layer.muse(settings, False), out)
                    for layer, out in zip(layers, exact, strict=True)
                ]
                row = {"figure": "settings", "clusters": clusters, "iterations": iterations, "cap": cap}
                yield {**row, **by_layer(errors)}


def ablation_rows(layers: list[Layer], settings: MuseSettings) -> Iterator[dict[str, Any]]:
    exact = [layer.exact(False) for layer in layers]
    variants = {
        "all terms": settings,
        "without dipole": replace(settings, dipole=False),
        "without two stages": replace(settings, query_clusters=1),
        "neither": replace(settings, query_clusters=1, dipole=False),
    }
    for name, variant in variants.items():
        errors = [
            squared_error(layer.muse(variant, False), out) for layer, out in zip(layers, exact, strict=True)
        ]
        yield {"figure": "ablation", "terms": name, **by_layer(errors)}
    errors = []
    for layer, out in zip(layers, exact, strict=True):
        backend = backend_for(layer.query)
        query, key, value = (x.unsqueeze(2) for x in (layer.query, layer.key, layer.value))
        of_keys, of_queries = (
            backend.find_clusters(x, settings.clusters, settings.cap, settings.iterations, seed)
            for seed, x in enumerate((key, query))
        )
        found = attend_reference(
            query, key, value, of_queries, of_keys, out.shape[-1] ** -0.5, monopole=False
        )[0]
        errors.append(squared_error(found.squeeze(2), out))
    yield {"figure": "ablation", "terms": "without monopole", **by_layer(errors)}


def causal_rows(layers: list[Layer], settings: MuseSettings) -> Iterator[dict[str, Any]]:
    exact = [layer.exact(True) for layer in layers]
    for block in BLOCKS:
        for dipole in (False, True):
            variant = replace(settings, block=block, dipole=dipole)
            found = [layer.muse(variant, True) for layer in layers]
            errors = [squared_error(one, out) for one, out in zip(found, exact, strict=True)]
            late = [
                squared_error(one[:, :, block:], out[:, :, block:])
                for one, out in zip(found, exact, strict=True)
            ]
            row = {"figure": "causal", "block": block, "dipole": dipole, **by_layer(errors)}
            yield {**row, "after the first block": sum(late) / len(late)}
            blocks = [read_in_blocks(layer, variant)[0] for layer in layers]
            errors = [squared_error(one, out) for one, out in zip(blocks, exact, strict=True)]
            yield {"figure": "prefill", "block": block, "dipole": dipole, **by_layer(errors)}


def read_in_blocks(layer: Layer, settings: MuseSettings) -> tuple[Tensor, RangeAttention]:
    """Causal output [1, Hq, N, d] as prefill computes it, block by block, and what it has found on the way."""
    kv_HN2D = torch.stack([layer.key[0], layer.value[0]], dim=2)
    heads, count = kv_HN2D.shape[:2]
    queries_HGND = layer.query[0].view(heads, -1, *layer.query.shape[2:])
    attention = RangeAttention(settings, 1)
    outs = []
    for first in range(0, count, settings.block):
        some = slice(first, min(first + settings.block, count))
        own = kv_HN2D[:, some]
        outs.append(attention.attend(0, queries_HGND[:, :, some], first, own, lambda a, b: kv_HN2D[:, a:b]))
    return torch.cat(outs, dim=2).flatten(0, 1)[None], attention


def starts_rows(layers: list[Layer], settings: MuseSettings) -> Iterator[dict[str, Any]]:
    """Of all keys: variance within clusters (cosine: 1 - cosine) relative to that after 10 iterations from scratch.

    Of queries: mean cosine to the nearest of 32 centroids in every of 16 subspaces.
    """
    keys, queries = INDEX_SPECS["key_clusters"], INDEX_SPECS["query_tables"]
    for started, iterations in ((False, 10), (False, 5), (False, 2), (True, 10), (True, 5), (True, 2)):
        apart, near = [], []
        for number, layer in enumerate(layers):
            source = layer_source(layer, settings, number, started)
            # Of keys, k-means takes a quarter of its iterations where it starts from clusters.
            own = {"iterations": 4 * iterations if started else iterations}
            arrays = INDEX_KINDS[keys.kind].build({**keys.parameters, **own}, source, 0).arrays()
            apart.append(spread_of_directions(source.keys_HND, arrays["assignment"]))
            own = {"iterations": iterations}
            tables = INDEX_KINDS[queries.kind].build({**queries.parameters, **own}, source, 0).arrays()
            near.append(nearness(source, tables["centroids"]))
        row = {"figure": "starts", "started": started, "iterations": iterations}
        yield {**row, **by_layer(apart), "query_cosine": [round(x, 5) for x in near]}


def layer_source(layer: Layer, settings: MuseSettings, number: int, started: bool) -> LayerSource:
    """The layer as prefill leaves it, with the clusters that blocks of 2,048 tokens found or without."""
    kv_HN2D = torch.stack([layer.key[0], layer.value[0]], dim=2)
    heads, count = kv_HN2D.shape[:2]
    starts = None
    queries_HGND = layer.query[0].view(heads, -1, *layer.query.shape[2:])
    if started:
        attention = read_in_blocks(layer, replace(settings, block=2048, dipole=False))[1]
        starts = attention.starts(0, heads, count)
    positions = torch.randperm(count, generator=torch.Generator().manual_seed(number))[:4096].sort().values
    sample = queries_HGND[:, :, positions].transpose(1, 2).contiguous()
    return LayerSource(kv_HN2D, QuerySample(sample, positions), None, starts)


def spread_of_directions(keys_HND: Tensor, assignment_HN: Tensor) -> float:
    """Mean of 1 - cosine of every key and the mean direction of its cluster."""
    directions = torch.nn.functional.normalize(keys_HND.float(), dim=-1)
    own_HN1 = assignment_HN.long().clamp(min=0)[..., None].expand_as(directions)
    sums = torch.zeros_like(directions).scatter_add_(1, own_HN1, directions)
    centres = torch.nn.functional.normalize(sums, dim=-1).gather(1, own_HN1)
    return float((1 - (directions * centres).sum(-1))[assignment_HN >= 0].mean())


def nearness(source: LayerSource, centroids_HMCB: Tensor) -> float:
    subspaces = centroids_HMCB.shape[1]
    rows_HPD = source.queries.queries_HPGD.flatten(1, 2)
    slices = torch.stack([rows_HPD[..., number::subspaces] for number in range(subspaces)], dim=1)
    slices = torch.nn.functional.normalize(slices, dim=-1)
    return float((slices @ centroids_HMCB.transpose(2, 3)).amax(-1).mean())


def by_layer(errors: list[float]) -> dict[str, Any]:
    return {"error": sum(errors) / len(errors), "layers": [round(error, 5) for error in errors]}


def emit(row: dict[str, Any], device: torch.device) -> None:
    rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    sys.stdout.write(json.dumps({"bench": "muse_error", **rounded, "machine": machine}) + "\n")
    sys.stdout.flush()


@torch.inference_mode()
def main(
    tokens: Annotated[int, typer.Option(help="Of the text.")] = 8192,
    model: Annotated[str, typer.Option(help="reader, or a Hugging Face folder.")] = "reader",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    parts: Annotated[str, typer.Option(help="Comma-separated.")] = "settings,ablations,causal,starts",
) -> None:
    """Prints one JSON line per row of the tables."""
    on = torch.device(device)
    layers = capture_layers(model, tokens, on)
    settings = MuseSettings()
    rows = {
        "settings": lambda: settings_rows(layers),
        "ablations": lambda: ablation_rows(layers, settings),
        "causal": lambda: causal_rows(layers, settings),
        "starts": lambda: starts_rows(layers, settings),
    }
    for part in parts.split(","):
        for row in rows[part]():
            emit(row, on)
    if on.type == "cuda":  # kernels and references must agree on real data
        difference = [
            squared_error(
                layer.muse(settings, False),
                muse_attention(
                    layer.query, layer.key, layer.value, enable_gqa=True, settings=settings, backend=EAGER
                ),
            )
            for layer in layers
        ]
        emit({"figure": "kernels against references", **by_layer(difference)}, on)


if __name__ == "__main__":
    typer.run(main)
