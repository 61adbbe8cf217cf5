"""Small synthetic contexts for tests: every stored dtype, several layers, contents that follow from a seed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, cast

import google_crc32c
import torch
from torch import Tensor

from index_store.family.children import Continuation, OwnRows
from index_store.indexes.interface.layer_index import LayerIndex
from index_store.methods.method import INDEX_SPECS
from index_store.selection.budgets import KEEP_GRID
from index_store.store.catalog import Store
from index_store.store.description.array_entry import (
    ArrayEntry,
    index_array_entry,
    kv_entry,
    plane_entry,
    queries_entry,
    tokens_entry,
)
from index_store.store.description.context_id import ModelIdentity, context_id
from index_store.store.description.dtypes import STORED_DTYPES, dtype_name
from index_store.store.description.json_fields import Scalar, render_document
from index_store.store.description.manifest import HIGH_PLANE, MANIFESTS, IndexEntry, Manifest
from index_store.store.files.leftovers import WHOLE
from index_store.store.writer import ContextWriter

CREATED = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)

MODEL = ModelIdentity(
    name="toy",
    architecture="LlamaForCausalLM",
    fingerprint="a" * 64,
    tokenizer_fingerprint="b" * 64,
    layers=3,
    query_heads=4,
    kv_heads=2,
    head_dim=8,
    vocab_size=1000,
    max_positions=4096,
)

PARAMETERS: dict[str, Scalar] = {"subspaces": 4, "split": "strided", "cosine": False, "ratio": 0.25}
THRESHOLDS = tuple(0.01 / (1.0 + 100.0 * keep) for keep in KEEP_GRID)


@dataclass(frozen=True)
class RecordedIndex:
    """Stands in for an index class where only its construction matters: remembers what it was made of."""

    kind: ClassVar[str] = "recorded"

    parameters: Mapping[str, Scalar]
    stored: Mapping[str, Tensor]
    keys_HND: Tensor

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], keys_HND: Tensor
    ) -> RecordedIndex:
        return cls(parameters, arrays, keys_HND)


KINDS: Mapping[str, type[LayerIndex]] = {RecordedIndex.kind: cast(type[LayerIndex], RecordedIndex)}


@dataclass(frozen=True)
class SyntheticContext:
    """A context in memory: tokens [N], kv [L, H, N, 2, d], queries [L, H, P, G, d], arrays by path [layers, H, ...].

    draft: its manifest before it is published, without checksums.
    """

    draft: Manifest
    tokens: Tensor
    kv: Tensor
    queries: Tensor
    arrays: dict[str, Tensor]

    @property
    def id(self) -> str:
        return self.draft.id

    @property
    def manifest(self) -> Manifest:
        """The manifest that publishing must lead to."""
        tokens = (self.draft.tokens, self.tokens.to(torch.uint32))
        arrays = [tokens, *self.by_layer()]
        return self.draft.with_checksums({entry.path: checksums(entry, data) for entry, data in arrays})

    def write(self, store: Store) -> str:
        """Writes and publishes it; returns the id."""
        with store.writer(self.id) as writer:
            self.write_arrays(writer)
            writer.publish(self.draft)
        return self.id

    def write_arrays(self, writer: ContextWriter) -> None:
        """Writes all that is published with it."""
        writer.write_tokens(self.tokens)
        for entry, data in self.by_layer():
            writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
            for row in range(data.shape[0]):
                for head in range(data.shape[1]):
                    writer.write_chunk(entry.path, (row, head), data[row, head])

    def by_layer(self) -> list[tuple[ArrayEntry, Tensor]]:
        """(entry without checksums, data) of every array but the tokens'."""
        queries = [] if self.draft.queries is None else [(self.draft.queries, self.queries)]
        return [(self.draft.kv, self.kv), *queries, *self.entries()]

    def entries(self) -> list[tuple[ArrayEntry, Tensor]]:
        """(entry without checksums, data) of every index array."""
        return [(array, self.arrays[array.path]) for index in self.draft.indexes for array in index.arrays]


def checksums(entry: ArrayEntry, data: Tensor) -> str:
    """What the manifest must record of an array whose chunks follow each other in memory."""
    chunks = data.reshape(-1).view(torch.uint8).reshape(-1, entry.chunk_bytes)
    return "".join(f"{google_crc32c.value(chunk.numpy().tobytes()):08x}" for chunk in chunks)


def random_array(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random contents of any stored dtype; every bit pattern of integers may occur."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    size = dtype.itemsize
    raw = torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).squeeze(-1)


def synthetic_context(
    tokens: int = 37,
    seed: int = 0,
    name: str = "handbook",
    dtype: str = "bfloat16",
    model: ModelIdentity = MODEL,
    created: datetime = CREATED,
    ttl: timedelta | None = None,
    index_dtypes: tuple[str, ...] = ("int8", "float16", "int32", "float32"),
    query_rows: int = 3,
    index_kind: str = RecordedIndex.kind,
) -> SyntheticContext:
    """A context of `tokens` random tokens: layer 0 dense, one index over the others with an array per dtype."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.vocab_size, (tokens,), generator=generator)
    kv_shape = (model.layers, model.kv_heads, tokens, 2, model.head_dim)
    kv = random_array(kv_shape, STORED_DTYPES[dtype].torch_dtype, generator)
    layers = tuple(range(1, model.layers))
    sample = queries_entry(model, query_rows)
    queries = random_array(sample.shape if sample else (0,), torch.float32, generator)
    entries, arrays = [], {}
    for number, index_dtype in enumerate(index_dtypes):
        head_shape = (model.kv_heads, 4 + number, tokens)
        entry = index_array_entry("tables", f"array_{index_dtype}", len(layers), head_shape, index_dtype)
        entries.append(entry)
        arrays[entry.path] = random_array(entry.shape, STORED_DTYPES[index_dtype].torch_dtype, generator)
        assert dtype_name(arrays[entry.path].dtype) == index_dtype
    draft = Manifest(
        id=context_id(model, dtype, {"seed": seed, "method": PARAMETERS}, "", ids),
        name=name,
        created_at=created,
        expires_at=created + ttl if ttl is not None else None,
        model=model,
        dtype=dtype,
        token_count=tokens,
        methods=("csattention",),
        dense_layers=(0,),
        selection_errors=tuple(0.25 / 10**layer for layer in range(model.layers)),
        tokens=tokens_entry(tokens),
        kv=kv_entry(model, tokens, dtype),
        indexes=(IndexEntry("tables", index_kind, PARAMETERS, layers, tuple(entries), THRESHOLDS),),
        prefill={"chunk": 2048, "calibration": False},
        seconds={"forward": 1.5, "index": 0.25},
        queries=sample,
        query_positions=tuple(tokens - query_rows + 2 + row for row in range(query_rows)),
    )
    return SyntheticContext(draft, ids, kv, queries, arrays)


def indexed_context(
    name: str, parameters: Mapping[str, Scalar], built: Sequence[LayerIndex], kv: Tensor, group: int
) -> SyntheticContext:
    """A context with these keys and values [3, H, N, 2, d], and an index of layers 1 and 2; layer 0 is dense."""
    _, heads, tokens, _, head_dim = kv.shape
    model = other_model(kv_heads=heads, query_heads=heads * group, head_dim=head_dim)
    context = synthetic_context(tokens=tokens, dtype=dtype_name(kv.dtype), model=model, index_dtypes=())
    layers = [index.arrays() for index in built]
    entries = tuple(
        index_array_entry(name, array, len(layers), data.shape, dtype_name(data.dtype))
        for array, data in layers[0].items()
    )
    arrays = {f"index/{name}/{array}": torch.stack([layer[array] for layer in layers]) for array in layers[0]}
    index = IndexEntry(name, built[0].kind, parameters, (1, 2), entries)
    return replace(context, draft=replace(context.draft, indexes=(index,)), kv=kv, arrays=arrays)


def in_planes(plain: Manifest) -> Manifest:
    """The manifest of a context that was not written, with rows in 8 bits."""
    model, spec = plain.model, INDEX_SPECS[HIGH_PLANE]
    codes = index_array_entry(HIGH_PLANE, "key_codes", len(model.full_layers), (model.kv_heads, 3), "uint8")
    high = IndexEntry(HIGH_PLANE, spec.kind, spec.parameters, model.full_layers, (codes,))
    return replace(plain, kv=plane_entry(model, plain.token_count), indexes=(*plain.indexes, high))


def other_model(**changes: object) -> ModelIdentity:
    """The toy model with some fields changed."""
    return replace(MODEL, **changes)


class RecordingLocker:
    """A page locker that notes what it is asked for, and fails or waits on demand. maps: whether it has such memory."""

    def __init__(self, error: str | None = None, *, maps: bool = False) -> None:
        self.locked: list[int] = []
        self.mapped: dict[int, int] = {}
        """Bytes by address."""
        self.maps = maps
        self.error = error
        self.before: Callable[[], None] = lambda: None

    def map(self, nbytes: int) -> Tensor | None:
        if not self.maps:
            return None
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.mapped[memory.data_ptr()] = nbytes
        return memory

    def lock(self, tensor: Tensor) -> None:
        self.before()
        if self.error is not None:
            raise RuntimeError(self.error)
        self.locked.append(tensor.data_ptr())

    def unlock(self, tensor: Tensor) -> None:
        self.locked.remove(tensor.data_ptr())


RETIRED_INDEXES: Mapping[str, tuple[str, Mapping[str, Scalar]]] = {
    "dipole_clusters": (
        "key_clusters",
        {
            "keys_per_cluster": 32,
            "metric": "euclidean",
            "block": 8192,
            "iterations": 10,
            "moments": "full",
            "window": 0,
            "sinks": 8,
        },
    ),
    "product_codes": ("product_codes", {"subspaces": 8, "bits": 8, "split": "strided", "iterations": 10}),
    "coarse_codes": (
        "coarse_rows",
        {"coding": "product", "key_bits": 2, "value_bits": 2, "value_group": 128, "iterations": 10},
    ),
}
"""Kinds and parameters of indexes that stored contexts may have, and that nobody can search any more, by name."""


def add_index(
    store: Store,
    present: Manifest,
    name: str = "more",
    seed: int = 0,
    *,
    kind: str = RecordedIndex.kind,
    parameters: Mapping[str, Scalar] = PARAMETERS,
    **changes: Any,
) -> tuple[Manifest, dict[str, Tensor]]:
    """Adds an index of random numbers over all layers to a published context: its manifest, and the data by path.

    changes: other fields of the manifest, such as its name.
    """
    generator = torch.Generator().manual_seed(seed)
    layers, heads = present.model.layers, present.model.kv_heads
    arrays = {f"index/{name}/{array}": torch.randn(layers, heads, 3, generator=generator) for array in "ab"}
    with store.lock(present.id), store.writer(present.id) as writer:
        entries = []
        for path, data in arrays.items():
            entries.append(writer.create_array(path, data.shape, (1, 1, 3), "float32"))
            for layer in range(layers):
                for head in range(heads):
                    writer.write_chunk(path, (layer, head), data[layer, head])
        added = IndexEntry(name, kind, parameters, tuple(range(layers)), tuple(entries))
        wanted = replace(present, indexes=(*present.indexes, added), **changes)
        return writer.publish_into(present, wanted), arrays


def make_whole(store: Store, child: Manifest) -> Manifest:
    """Publishes a child as a context that stands alone, of zeros, with an index."""
    made = (child.model, child.token_count, child.dtype)
    kv = kv_entry(*made).below(WHOLE)
    with store.lock(child.id), store.writer(child.id) as writer:
        tokens = writer.write_tokens([0] * child.token_count, WHOLE)
        index = index_array_entry("more", "a", child.model.layers, (child.model.kv_heads, 3), "float32")
        for entry in (kv, index):
            writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
            zeros = torch.zeros(entry.shape[2:], dtype=STORED_DTYPES[entry.dtype].torch_dtype)
            for chunk in entry.chunk_indices():
                writer.write_chunk(entry.path, chunk, zeros)
        added = IndexEntry("more", RecordedIndex.kind, PARAMETERS, tuple(range(child.model.layers)), (index,))
        return writer.publish_whole(replace(child, tokens=tokens, kv=kv, indexes=(added,), parent=None))


def continuation(
    store: Store,
    parent: str | Manifest,
    count: int = 5,
    seed: int = 1,
    expires_at: datetime | None = None,
    attention: str = "exact",
    name: str = "child",
) -> Continuation:
    """Random tokens and rows that continue a stored context."""
    generator = torch.Generator().manual_seed(seed)
    base = store.manifest(parent) if isinstance(parent, str) else parent
    with store.open(base.id) as context:
        before = context.tokens()
    rows = [
        random_array(
            (shape.kv_heads, count, 2, shape.head_dim), STORED_DTYPES[base.dtype].torch_dtype, generator
        )
        for shape in map(base.model.shape, range(base.model.layers))
    ]
    ids = torch.randint(0, base.model.vocab_size, (count,), generator=generator)
    return Continuation(base, before, OwnRows(ids, rows), attention, name, expires_at)


def bits(tensor: Tensor) -> bytes:
    """The tensor's elements as raw bytes: equality of these is bit-exact, NaN included."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def flip(path: Path, position: int = 5, bit: int = 0) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Stands in for what fails so."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def open_files(folder: Path) -> list[str]:
    """Files below a folder that this process has open; those of servers that run in it are no concern of a test's."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(descriptor))
    return sorted(path for path in found if Path(path).is_relative_to(folder))


def write_manifests(
    store: Path, count: int, context: SyntheticContext | None = None, first: int = 0
) -> Sequence[str]:
    """Adds contexts `book 0`, `book 1`, ... to a store, each an hour younger than the one before; returns their ids."""
    document = json.loads(MANIFESTS.render((context or synthetic_context()).manifest))
    del document["checksum"]
    ids = []
    for number in range(first, first + count):
        id_ = f"{number:08x}" + "c" * 56
        created = CREATED + timedelta(hours=number)
        changed = {"id": id_, "name": f"book {number}", "created_at": created.isoformat()}
        folder = store / "contexts" / id_
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_bytes(render_document(document | changed))
        ids.append(id_)
    return ids
