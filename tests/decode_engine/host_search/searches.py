"""Small searches on the host, and the general path's lists for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decode_engine.host_search.mailbox import Mailbox, MailboxSizes, SearchedRow
from index_store.indexes.query_tables.index import QueryTables
from index_store.methods.method import INDEX_SPECS
from index_store.selection.cutting import best_keys
from index_store.store.description.json_fields import Scalar

HEADS, GROUP, DIM, SUBSPACES, CENTROIDS = 2, 3, 16, 4, 5
SECONDS = 120.0


class Layer:
    """Random query tables of one layer."""

    def __init__(self, keys: int, seed: int, *, strided: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (HEADS, SUBSPACES, CENTROIDS)
        self.keys = keys
        scores = torch.randint(-127, 128, (*shape, keys), dtype=torch.int8, generator=generator)
        centroids = torch.randn(*shape, DIM // SUBSPACES, generator=generator)
        self.arrays = {
            "scores": scores,
            "centroids": torch.nn.functional.normalize(centroids, dim=-1),
            "scales": 0.01 + 0.05 * torch.rand(HEADS, SUBSPACES, generator=generator),
        }
        parameters: dict[str, Scalar] = {
            **INDEX_SPECS["query_tables"].parameters,
            "subspaces": SUBSPACES,
            "centroids": CENTROIDS,
            "split": "strided" if strided else "contiguous",
        }
        kv = torch.zeros(HEADS, keys, 2, DIM)
        self.index = QueryTables.from_arrays(parameters, self.arrays, kv)

    @property
    def places(self) -> list[int]:
        return [self.arrays[name].data_ptr() for name in ("scores", "centroids", "scales")]

    def expected(self, q_X: Tensor, row: SearchedRow, *, pooled: bool) -> list[Tensor]:
        """The general path's list of every KV head."""
        q_HTGD = (q_X.view(HEADS, 1, GROUP, DIM) * DIM**-0.5).float()
        options: dict[str, Scalar] = {"group": "pooled" if pooled else "per_head", "weights": "projection"}
        ranking = self.index.rank(q_HTGD, row.first, row.end, None, options)
        kept = best_keys(ranking, row.keep)
        return [ids[0, : int(count[0])] for ids, count in zip(kept.ids_HTK, kept.counts_HT, strict=True)]


def make_plan(rows: int, *, pooled: bool = True, strided: bool = True, layers: int = 3) -> MailboxSizes:
    return MailboxSizes(rows, HEADS, GROUP, DIM, SUBSPACES, CENTROIDS, pooled, strided, layers, 40_000)


def searched(row: int, layers: Sequence[Layer], first: int, end: int, keep: int) -> SearchedRow:
    places = np.array([layer.places for layer in layers], np.int64)
    return SearchedRow(row, first, end, keep, layers[0].keys, places)


class FakeDevice(threading.Thread):
    """Plays the device's side of a mailbox for one step: posts queries layer by layer, and waits for the lists of each.

    go_on: it waits for this behind the first layer, in the middle of the step. between: set when it has come there.
    lists: by layer, of every list of the used rows. error: what ended the step early.
    """

    def __init__(self, mailbox: Mailbox, q_LBX: Tensor, *, go_on: threading.Event | None = None) -> None:
        super().__init__(daemon=True)
        self.mailbox, self.q_LBX, self.go_on = mailbox, q_LBX, go_on
        self.between = threading.Event()
        self.lists: dict[int, list[Tensor]] = {}
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for layer in self.mailbox.order:
                if self.lists:
                    self.between.set()
                    if self.go_on is not None and not self.go_on.wait(SECONDS):
                        raise TimeoutError("was not told to go on")
                self.mailbox.post(layer, self.q_LBX[layer])
                heads = self.mailbox.sizes.heads
                numbers = [row * heads + h for row in self.mailbox.used for h in range(heads)]
                self.lists[layer] = [self._wait(layer, number) for number in numbers]
        except BaseException as error:
            self.error = error

    def _wait(self, layer: int, number: int) -> Tensor:
        limit = time.monotonic() + SECONDS
        while (found := self.mailbox.answer(layer, number)) is None:
            if time.monotonic() > limit:
                raise TimeoutError(f"no list {number} of layer {layer}")
            time.sleep(0.0002)
        return found.clone()
