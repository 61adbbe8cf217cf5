"""What a search of query tables on the host would gain from clusters that prune the keys first (coarse to fine).

The packaged reader reads a text of so many tokens with facts in it, in float32, and then questions about them. Its keys
are clustered and its query tables made as contexts get them. For every question's token, layer and KV head, clusters
are ranked by the query's product with their mean key, or by the tables' own entries for it (the mean over a cluster's
keys, `coarse: tables`), and the keys of the best ones survive, up to a share of all. A row says, on average: `recall`,
how many of the 1 % of keys that the tables rank best survive; `lines_by_key` and `lines_by_cluster`, the share of the
64-byte lines of table rows that hold a surviving key, with entries in the order of the keys (as stored) and with a
cluster's keys next to each other; and `by_layer`, recall.

`figure: time` is one thread's time for the sums of one list over `--timed` keys of random tables, eight rows: all keys
one after the other, and shares of their lines drawn at random. The coarse search itself comes on top: it reads D / 8
bytes per key where it reads half precision means of 16 keys each, and m / 16 where it reads tables of the means.

Shape legend: H KV heads, G query heads per KV head, Q queries, D head dim, N keys, m subspaces, C table centroids, K
clusters.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import numpy as np
import torch
import typer
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.evaluation.comparison.machine import describe_machine
from decode_engine.evaluation.tasks import make_document, parse_length, source_text
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.query_tables.search_numba import TILE, add_rows
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.index_specs import INDEX_SPECS
from index_store.models.loading import load_model, load_tokenizer, resolve_model
from index_store.store.stored_context import QuerySample
from prefill_worker.reading.capture import Capture, plan_sample, register_attention
from prefill_worker.reading.prefill import run_context

SHARES = (0.02, 0.05, 0.1, 0.2)
KEPT, SAMPLED, FACTS = 0.01, 1024, 24
LINE_SHARES = (0.12, 0.25, 0.35, 0.5)
LINE_BYTES, ROWS, TURNS = 64, 8, 25


def capture_layers(tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of every layer: keys and values [H, N, 2, D], sampled queries [H, P, G, D] of the text, and the questions'."""
    folder = resolve_model("reader")
    tokenizer = load_tokenizer(folder)
    document = make_document(
        tokenizer, source_text(()), tokens - len(tokenizer.prefix_ids), facts=FACTS, seed=0
    )
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(document.text)]
    count = len(ids)
    for question in document.questions:
        ids += tokenizer.encode(question.prompt)
    loaded = load_model(folder, register_attention(), torch.float32, torch.device("cpu"))
    capture = Capture(
        loaded.identity, len(ids), torch.float32, plan_sample(len(ids), [], len(ids), 0), torch.device("cpu")
    )
    run_context(loaded.model, capture, ids, 2048)
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:SAMPLED].sort().values
    layers = []
    for number in range(loaded.identity.layers):
        queries_HPGD = capture.query_sample(number).queries_HPGD
        kv_HN2D = capture.kv(number)[:, :count].contiguous()
        layers.append((kv_HN2D, queries_HPGD[:, drawn].contiguous(), queries_HPGD[:, count:].contiguous()))
    return layers


def layer_rows(
    kv_HN2D: Tensor, sample_HPGD: Tensor, queries_HQGD: Tensor, subspaces: int
) -> dict[tuple[str, float], tuple[float, float, float]]:
    """Recall and both shares of lines, by coarse search and share of surviving keys."""
    heads, count = kv_HN2D.shape[:2]
    drawn = torch.arange(sample_HPGD.shape[1])
    source = LayerSource(kv_HN2D, QuerySample(sample_HPGD, drawn))
    spec, tables_spec = INDEX_SPECS["key_clusters"], INDEX_SPECS["query_tables"]
    clusters = INDEX_KINDS[spec.kind].build(spec.parameters, source, 0).arrays()["assignment"].long()
    own = {"subspaces": subspaces, "centroids": 512 // subspaces}
    tables = INDEX_KINDS[tables_spec.kind].build({**tables_spec.parameters, **own}, source, 0).arrays()
    found: dict[tuple[str, float], list[tuple[float, float, float]]] = {}
    for h in range(heads):
        named = clusters[h] >= 0
        assignment_N = torch.where(named, clusters[h], 0)
        number = int(clusters[h].max()) + 1
        sizes_K = torch.bincount(clusters[h][named], minlength=number)
        order_N = torch.argsort(torch.where(named, clusters[h], number), stable=True)
        q_QD = queries_HQGD[h].mean(1)
        means_KD = (
            torch.zeros(number, q_QD.shape[1]).index_add_(0, clusters[h][named], kv_HN2D[h, named, 0])
            / sizes_K.clamp(min=1)[:, None]
        )
        scores_QN = table_scores(q_QD, tables["centroids"][h], tables["scales"][h], tables["scores"][h])
        scores_QN[:, ~named] = -torch.inf  # sinks, which are attended to anyway
        kept_QK = scores_QN.topk(round(KEPT * count), dim=1).indices
        by_tables_QK = torch.zeros(len(q_QD), number).index_add_(
            1, clusters[h][named], scores_QN[:, named]
        ) / sizes_K.clamp(min=1)
        for coarse, ranked_QK in (("means", q_QD @ means_KD.t()), ("tables", by_tables_QK)):
            best_QK = ranked_QK.masked_fill(sizes_K == 0, -torch.inf).argsort(dim=1, descending=True)
            keys_QK = sizes_K[best_QK].cumsum(1)
            for share in SHARES:
                chosen_QK = torch.zeros_like(ranked_QK, dtype=torch.bool)
                chosen_QK.scatter_(1, best_QK, keys_QK <= max(share * count, int(sizes_K.max())))
                survive_QN = chosen_QK[:, assignment_N] & named
                recall = float(survive_QN.gather(1, kept_QK).float().mean())
                by_key, by_cluster = lines(survive_QN), lines(survive_QN[:, order_N])
                found.setdefault((coarse, share), []).append((recall, by_key, by_cluster))
    return {
        key: (float(each[:, 0].mean()), float(each[:, 1].mean()), float(each[:, 2].mean()))
        for key, values in found.items()
        for each in [torch.tensor(values)]
    }


def table_scores(q_QD: Tensor, centroids_MCB: Tensor, scales_M: Tensor, scores_MCN: Tensor) -> Tensor:
    """[Q, N]: the sum over subspaces of the nearest centroid's row, weighed by the query's projection on it."""
    subspaces = len(centroids_MCB)
    total_QN = torch.zeros(len(q_QD), scores_MCN.shape[2])
    for number in range(subspaces):
        products_QC = q_QD[:, number::subspaces] @ centroids_MCB[number].t()
        weights_Q, rows_Q = products_QC.max(1)
        total_QN += (weights_Q.clamp(min=0) * scales_M[number])[:, None] * scores_MCN[number, rows_Q].float()
    return total_QN


def lines(survive_QN: Tensor) -> float:
    """Share of the lines, of as many entries as bytes, in which one or more survive."""
    whole = survive_QN.shape[1] // LINE_BYTES * LINE_BYTES
    return float(survive_QN[:, :whole].view(len(survive_QN), -1, LINE_BYTES).any(2).float().mean())


@njit(nogil=True)  # type: ignore[untyped-decorator]
def add_lines(
    table_SN: NDArray[np.int8],
    rows_M: NDArray[np.int32],
    weights_M: NDArray[np.float32],
    begins_X: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """The sums for lines of LINE_BYTES keys, one after the other."""
    for number in range(begins_X.shape[0]):
        acc = out[number * LINE_BYTES : (number + 1) * LINE_BYTES]
        add_rows(table_SN, rows_M, weights_M, begins_X[number], acc)


def time_rows(keys: int) -> Iterator[dict[str, Any]]:
    """Times of one list on one thread, other table rows every time."""
    rng = np.random.default_rng(0)
    table_SN = rng.integers(-127, 128, (512, keys), dtype=np.int8)
    weights = np.linspace(0.5, 1, ROWS, dtype=np.float32)
    out = np.empty(keys, np.float32)

    def every_key(rows: NDArray[np.int32]) -> None:
        for low in range(0, keys, TILE):
            add_rows(table_SN, rows, weights, low, out[low : low + TILE])

    whole = median_us(rng, every_key)
    yield {"figure": "time", "keys": keys, "share": 1.0, "us": round(whole, 1)}
    for share in LINE_SHARES:
        count = round(share * keys / LINE_BYTES)
        begins = np.sort(rng.choice(keys // LINE_BYTES, count, replace=False)) * LINE_BYTES

        def some(rows: NDArray[np.int32], begins: NDArray[np.int64] = begins) -> None:
            add_lines(table_SN, rows, weights, begins, out)

        us = median_us(rng, some)
        yield {
            "figure": "time", "keys": keys, "share": share, "us": round(us, 1), "of_whole": round(us / whole, 3)
        }  # fmt: skip


def median_us(rng: np.random.Generator, work: Callable[[NDArray[np.int32]], None]) -> float:
    """Median time of the work, which is given other rows every time."""
    times = []
    for _ in range(TURNS):
        rows = rng.choice(512, ROWS, replace=False).astype(np.int32)
        begin = time.perf_counter()
        work(rows)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[3:])


@torch.inference_mode()
def main(
    length: Annotated[str, typer.Option(help="Tokens that the reader reads.")] = "32k",
    subspaces: Annotated[int, typer.Option(help="Of the tables.")] = 8,
    timed: Annotated[str, typer.Option(help="Keys of the tables that are timed.")] = "128k",
) -> None:
    """Prints one JSON line per row."""
    machine = describe_machine()
    tokens = parse_length(length)
    results = [layer_rows(*layer, subspaces) for layer in capture_layers(tokens)]
    for coarse, share in results[0]:
        of_layers = [result[coarse, share] for result in results]
        recall, by_key, by_cluster = (statistics.mean(each) for each in zip(*of_layers, strict=True))
        row = {
            "bench": "coarse_search", "figure": "recall", "tokens": tokens, "subspaces": subspaces,
            "coarse": coarse, "share": share, "recall": round(recall, 4), "lines_by_key": round(by_key, 4),
            "lines_by_cluster": round(by_cluster, 4), "by_layer": [round(each[0], 3) for each in of_layers],
        }  # fmt: skip
        typer.echo(json.dumps(row | {"machine": machine}))
    for timing in time_rows(parse_length(timed)):
        typer.echo(json.dumps({"bench": "coarse_search"} | timing | {"machine": machine}))


if __name__ == "__main__":
    typer.run(main)
