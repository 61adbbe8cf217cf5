"""A model of random weights in the shape of Llama-3.1-8B, and contexts for benchmarks of whole steps, random or a
trained model's, in GPU memory or with copies in host memory.

Pinning gigabytes takes seconds: contexts of all shapes take turns in two ranges of host memory, one for keys and values
and one for query tables, which are made and locked once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from decode_engine.model.decode_attention import ATTENTION_NAME, register_attention
from decode_engine.model.warm_up import made_up_context
from harness.made_up.trained_rows import TrainedRows
from index_store.memory.devices import finish
from index_store.memory.host_memory import HostBlock, aligned, copy_source, default_page_locker
from index_store.memory.placement import HOST_SEARCHED, SLOT_SHARE, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.models.fused.layers import fuse_layers
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE, stored_dtype

DTYPE = "bfloat16"
VOCABULARY = 128256
QUERY_STD = 1.28
"""Of the model's queries: weights of standard deviation .02 times the root of the hidden size."""


def make_model(
    layers: int, device: str = "cuda", attention: str = ATTENTION_NAME, fused: bool = True
) -> tuple[Any, ModelIdentity]:
    """A Llama-3.1-8B of random weights, or its first layers; on the device `meta` it takes no memory.

    attention: transformers' name of the implementation; by default decode-engine's. fused: on a GPU, with the layers of
    a model that is loaded there.
    """
    register_attention()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2**21,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    model.eval().requires_grad_(False)
    if fused and device == "cuda":
        fuse_layers(model)
    identity = ModelIdentity(
        "random-8b", "LlamaForCausalLM", "0" * 64, "0" * 64, layers, 32, 8, 128, VOCABULARY, 2**21
    )
    return model, identity


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def read_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that a step reads: all but the embeddings, of which it reads a row."""
    skipped: Any = model.get_input_embeddings()  # type: ignore[operator]
    return weight_bytes(model) - int(skipped.weight.nbytes)


HOST_GB = 17.2
"""Of keys and values in host memory: those of one sequence of 128K tokens."""
DISTINCT = 8
"""Layers' worth of keys and indexes of a sequence that is in GPU memory alone; fewer for larger batches."""


def readable_block(nbytes: int) -> HostBlock:
    """Host memory for keys and values that a GPU reads, as the arena makes it."""
    return HostBlock(nbytes, default_page_locker(), gathered=True)


def table_block(nbytes: int) -> HostBlock:
    """Host memory for query tables that cores search; page-locked only to be filled faster."""
    return HostBlock(nbytes, default_page_locker(), huge_pages=True)


class HostRange:
    """Host memory that is filled from its front and then used anew; locked where there is a GPU."""

    def __init__(self, nbytes: int, block: HostBlock) -> None:
        """block: of so many bytes. Raises RuntimeError where there is a GPU and the pages cannot be locked."""
        self._block = block
        self._raw = block.take((nbytes,), torch.uint8)
        if not block.locked:
            self._raw.zero_()  # by all cores; locking would touch the pages with one
            block.lock()
        if torch.cuda.is_available() and not block.locked:
            raise RuntimeError(f"{nbytes} bytes of host memory cannot be page-locked; try less (--host-gb)")
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self._raw.numel()

    def put(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of the tensor here."""
        start, nbytes = self._used, tensor.numel() * tensor.element_size()
        if start + nbytes > self.nbytes:
            raise RuntimeError(
                f"{nbytes} bytes do not fit behind {start} of {self.nbytes}; ask for more (--host-gb)"
            )
        self._used = start + aligned(nbytes)
        place = self._raw[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
        copy_source(place, tensor.device).copy_(tensor)  # a device writes what it maps as fast as it reads it
        return place

    def clear(self) -> None:
        """Forgets what is in it; tensors that were put here change when others are."""
        self._used = 0


def make_ranges(gigabytes: float, searched: Sequence[Method] = ()) -> list[HostRange]:
    """A range for keys and values, and one for query tables, which take as much at most, and little for centroids.

    searched: all methods of the contexts, where any will be placed on the host.
    """
    nbytes = math.ceil(gigabytes * 1e9)
    ranges = [HostRange(nbytes, readable_block(nbytes))]
    specs = (spec for method in searched for spec in method.index_specs())
    tables = len({spec.name for spec in specs if spec.kind in HOST_SEARCHED})
    if tables:
        more = tables * (nbytes + nbytes // 16)
        ranges.append(HostRange(more, table_block(more)))
    return ranges


class PlacedContexts:
    """A context for each session of a batch, in any placement with the same contents.

    They have as many layers' worth of keys, values and indexes as fit into the ranges, or a few where there are none;
    the model's layers take turns over these.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        methods: Sequence[Method],
        length: int,
        batch: int,
        device: torch.device,
        ranges: Sequence[HostRange] = (),
        slot_share: int = SLOT_SHARE,
        rows: str = AS_DTYPE,
        trained: TrainedRows | None = None,
    ) -> None:
        """With the indexes of all methods, and rows as in `made_up_context`. trained: has keys and values for them.

        ranges: one for keys and values, and one for query tables where contexts are placed on the host; what was there
        is lost. Without any, contexts are placed on the device alone. slot_share: of contexts in host memory.
        """
        self._slot_share = slot_share
        self.distinct = distinct_layers(identity, length, batch, ranges)
        for each in ranges:
            each.clear()
        self._ranges = ranges
        first, *others = methods
        self._sources = [
            made_up_context(
                identity, DTYPE, first, length, also=others, distinct=self.distinct, device=device, seed=row,
                calibrated_for=QUERY_STD, rows=rows, kv=self._trained_kv(row, identity, length, trained),
            )
            for row in range(batch)
        ]  # fmt: skip
        self._kv: dict[tuple[int, int], Tensor] = {}
        self._tables: dict[tuple[int, str, int], dict[str, Tensor]] = {}

    def make(self, placement: Placement) -> list[ResidentContext]:
        """Contexts of that placement, which the caller releases."""
        made = [self._make(row, source, placement) for row, source in enumerate(self._sources)]
        finish(made[0].device)  # what copies, so that cores of the host may read as well
        return made

    def release(self) -> None:
        """Lets go of what no context uses that was made; no others can be made afterwards."""
        release(self._sources)
        self._sources = []

    def trained_queries(self, identity: ModelIdentity, trained: TrainedRows) -> list[Tensor]:
        """For each layer of the model the queries of the trained keys, [batch, Hq, 1, d] in their dtype, unscaled."""
        shape = (identity.kv_heads, identity.query_heads // identity.kv_heads, identity.head_dim)
        batch = range(len(self._sources))
        own = [
            torch.stack([trained.q(row * self.distinct + number, *shape) for row in batch])
            for number in range(self.distinct)
        ]
        dtype = stored_dtype(DTYPE).torch_dtype
        rows = [each.flatten(1, 2)[:, :, None].to(dtype) for each in own]
        return [rows[layer % self.distinct] for layer in range(identity.layers)]

    def _trained_kv(
        self, row: int, identity: ModelIdentity, length: int, trained: TrainedRows | None
    ) -> Callable[[int], Tensor] | None:
        """Keys and values of each layer of a row's own; None where they are random."""
        if trained is None:
            return None
        shape = (identity.kv_heads, length, identity.head_dim)
        return lambda number: trained.kv(row * self.distinct + number, *shape)

    def _make(self, row: int, source: ResidentContext, placement: Placement) -> ResidentContext:
        manifest = source.manifest
        kv = {
            layer: self._keys_values(row, source, layer, placement) for layer in range(manifest.model.layers)
        }
        arrays = {
            (entry.name, layer): self._index(
                row, source, entry.name, layer, placement.index_on_host(entry.kind)
            )
            for entry in manifest.indexes
            for layer in entry.layers
        }
        return ResidentContext(
            manifest,
            source.tokens(),
            kv,
            arrays,
            placement=placement,
            device=source.device,
            slot_share=self._slot_share,
        )

    def _keys_values(self, row: int, source: ResidentContext, layer: int, placement: Placement) -> Tensor:
        own = layer % self.distinct
        if not placement.kv_on_host:
            return source.stored_rows(own)
        if (row, own) not in self._kv:
            self._kv[row, own] = self._ranges[0].put(source.stored_rows(own))
        return self._kv[row, own]

    def _index(
        self, row: int, source: ResidentContext, name: str, layer: int, on_host: bool
    ) -> dict[str, Tensor]:
        own = layer % self.distinct
        arrays = source.index(name, own).arrays()
        if not on_host:
            return arrays
        if (row, name, own) not in self._tables:
            put = self._ranges[-1].put
            self._tables[row, name, own] = {key: put(array) for key, array in arrays.items()}
        return self._tables[row, name, own]


def distinct_layers(
    identity: ModelIdentity, length: int, batch: int, ranges: Sequence[HostRange] = ()
) -> int:
    """Layers with contents of their own."""
    row_bytes = 2 * identity.head_dim * stored_dtype(DTYPE).torch_dtype.itemsize
    per_layer = batch * identity.kv_heads * length * row_bytes
    fitting = ranges[0].nbytes // per_layer if ranges else max(2, DISTINCT // batch)
    return max(1, min(identity.layers, fitting))


def release(contexts: Sequence[ResidentContext]) -> None:
    """Lets go of the contexts' memory."""
    for context in contexts:
        context.release()
