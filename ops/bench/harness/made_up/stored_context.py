"""Made-up contexts as files of a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor

from index_store.memory.resident import ResidentContext
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest

_WRITERS = 8


def host_chunks(made: ResidentContext, layer: int) -> list[tuple[str, int, Tensor]]:
    """Array, KV head and contents of one layer's chunks."""
    arrays = {"kv": made.kv(layer)} | {
        f"index/{index.name}/{name}": array
        for index in made.manifest.indexes
        for name, array in made.index(index.name, layer).arrays().items()
    }
    return [(path, head, chunk.cpu()) for path, array in arrays.items() for head, chunk in enumerate(array)]


def write_context(store: Store, made: ResidentContext, id_: str, distinct: int) -> Manifest:
    """Writes a made-up context into the store, several chunks at a time; its first layers take turns over all."""
    manifest = replace(made.manifest, id=id_)
    entries = {entry.path: entry for entry in manifest.arrays}
    with store.writer(id_) as writer, ThreadPoolExecutor(_WRITERS) as pool:
        writer.write_tokens(made.tokens())
        for entry in entries.values():
            if entry.path != "tokens":
                writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
        held = [host_chunks(made, layer) for layer in range(min(distinct, manifest.model.layers))]
        done = [
            pool.submit(writer.write_chunk, path, (layer, head), chunk)
            for layer in range(manifest.model.layers)
            for path, head, chunk in held[layer % distinct]
        ]
        for each in done:
            each.result()
        return writer.publish(manifest)
