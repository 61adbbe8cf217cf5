"""Contexts as the `index-store` command shows them: JSON objects and table rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from index_store.attention.layer_shape import WindowLayers
from index_store.cli.console import format_time
from index_store.cli.labels import labels_text
from index_store.errors import SparseKVError, format_bytes
from index_store.selection.threshold_curve import KEEP_GRID
from index_store.store.description.dtypes import INT8
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import HIGH_PLANE, IndexEntry, Manifest
from index_store.store.files.leftovers import Leftover
from index_store.store.listing import BrokenContext, state_of

LIST_COLUMNS = ("ID", "NAME", "STATE", "MODEL", "METHODS", "TOKENS", "KV", "INDEX", "CREATED", "EXPIRES")
LIST_RIGHT = ("TOKENS", "KV", "INDEX")
LIST_OPTIONAL = ("CREATED", "MODEL", "EXPIRES", "METHODS", "INDEX", "KV", "STATE")
"""What a narrow terminal does not show, the first of them first."""


def summary(entry: Manifest | BrokenContext, expired: bool) -> dict[str, object]:
    """One context of a listing, as JSON."""
    if isinstance(entry, BrokenContext):
        return {"id": entry.id, "state": state_of(entry, expired=False), "error": error_object(entry.error)}
    return {
        "id": entry.id,
        "name": entry.name,
        "state": state_of(entry, expired=expired),
        "model": entry.model.name,
        "dtype": entry.dtype,
        "rows": entry.rows,
        "methods": list(entry.methods),
        "tokens": entry.token_count,
        "parent": None if entry.parent is None else entry.parent.id,
        "parent_tokens": 0 if entry.parent is None else entry.parent.token_count,
        "kv_bytes": entry.kv_bytes,
        "index_bytes": entry.index_bytes,
        "bytes_per_token": entry.bytes_per_token(),
        "created_at": entry.created_at.isoformat(),
        "expires_at": entry.expires_at.isoformat() if entry.expires_at else None,
        "pinned": entry.pinned,
        "labels": dict(entry.labels),
        "messages": entry.conversation is not None,
    }


def list_row(entry: Manifest | BrokenContext, expired: bool, id_length: int) -> list[str]:
    """One context of a listing, as the cells of LIST_COLUMNS."""
    id_ = entry.id[:id_length]
    if isinstance(entry, BrokenContext):
        return [id_, "-", state_of(entry, expired=False), *["-"] * 7]
    return [
        id_,
        entry.name,
        state_of(entry, expired=expired),
        entry.model.name,
        ",".join(entry.methods),
        str(entry.token_count),
        format_bytes(entry.kv_bytes),
        format_bytes(entry.index_bytes),
        format_time(entry.created_at),
        format_time(entry.expires_at),
    ]


def details(manifest: Manifest, expired: bool, children: int) -> dict[str, object]:
    """Everything about one context, as JSON. children: how many contexts continue it."""
    model = manifest.model
    return {
        **summary(manifest, expired),
        "children": children,
        "model": {
            "name": model.name,
            "architecture": model.architecture,
            "fingerprint": model.fingerprint,
            "tokenizer_fingerprint": model.tokenizer_fingerprint,
            "layers": model.layers,
            "query_heads": model.query_heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "max_positions": model.max_positions,
            "window": None if model.window is None else asdict(model.window),
        },
        "dense_layers": list(manifest.dense_layers),
        "selection_errors": list(manifest.selection_errors),
        "indexes": [_index_object(index, manifest.token_count) for index in manifest.indexes],
        "query_positions": list(manifest.query_positions),
        "prefill": dict(manifest.prefill),
        "seconds": dict(manifest.seconds),
    }


def rows_text(rows: str, dtype: str) -> str:
    """How keys and values are stored, in words."""
    return f"4 of 8 bits, the others are index {HIGH_PLANE}" if rows == INT8 else dtype


def detail_rows(manifest: Manifest, expired: bool, children: int) -> list[tuple[str, str]]:
    """Everything about one context, as (label, value). children: as in `details`."""
    model = manifest.model
    rows = [
        ("id", manifest.id),
        ("name", manifest.name),
        ("state", state_of(manifest, expired=expired)),
        ("model", f"{model.name} ({model.architecture}, {model.fingerprint[:12]})"),
        (
            "layers",
            f"{model.layers}, {model.query_heads} query heads, {model.kv_heads} KV heads, d {model.head_dim}",
        ),
        *([] if model.window is None else [("windows", _window(model.window))]),
        ("tokens", str(manifest.token_count)),
        *_family(manifest, children),
        (
            "kv",
            f"{_size(manifest.kv_bytes, manifest.own_tokens)}, {rows_text(manifest.rows, manifest.dtype)}",
        ),
    ]
    for index in manifest.indexes:
        rows.append((f"index {index.name}", f"{_size(index.nbytes, manifest.token_count)}, {index.kind}"))
        rows.append(("  layers", layers_text(index.layers, model.layers)))
        rows.append(("  parameters", _pairs(index.parameters)))
        if index.thresholds:
            most, least = index.thresholds[0], index.thresholds[-1]
            rows.append(
                ("  thresholds", f"{least:.3g} to {most:.3g}, keep {KEEP_GRID[-1]:g} to {KEEP_GRID[0]:g}")
            )
        rows += [
            (f"  {array.path.rpartition('/')[2]}", f"{list(array.shape)} {array.dtype}")
            for array in index.arrays
        ]
    if manifest.queries is not None:
        count = len(manifest.query_positions)
        rows.append(("queries", f"{format_bytes(manifest.queries.nbytes)}, {count} positions of every layer"))
    rows += [
        ("total", _size(manifest.kv_bytes + manifest.index_bytes, manifest.own_tokens)),
        ("methods", ", ".join(manifest.methods)),
        ("dense layers", layers_text(manifest.dense_layers, model.layers)),
        ("selection errors", ", ".join(f"{error:.4f}" for error in manifest.selection_errors) or "-"),
        ("prefill", _pairs(manifest.prefill)),
        (
            "seconds",
            ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in manifest.seconds.items()) or "-",
        ),
        ("created", format_time(manifest.created_at)),
        ("expires", expiry_text(manifest.expires_at, manifest.pinned)),
        ("labels", labels_text(manifest.labels)),
        ("made of", "text or tokens" if manifest.conversation is None else "messages"),
    ]
    return rows


def _family(manifest: Manifest, children: int) -> list[tuple[str, str]]:
    parent = manifest.parent
    continues = [] if parent is None else [("continues", f"{parent.id}, {parent.token_count} tokens")]
    return [*continues, *([("children", str(children))] if children else [])]


def expiry_text(time: datetime | None, pinned: bool) -> str:
    """When a context expires, for people."""
    return f"pinned; otherwise {format_time(time)}" if pinned else format_time(time)


def leftover_list(leftovers: Sequence[Leftover]) -> list[dict[str, object]]:
    """What killed jobs and deletions left, as JSON."""
    return [
        {
            "kind": item.kind,
            "path": str(item.path),
            "bytes": item.nbytes,
            "changed_at": item.changed_at.isoformat(),
        }
        for item in leftovers
    ]


def leftovers_text(leftovers: Sequence[Leftover]) -> str:
    """The same in a sentence; there are some."""
    size = format_bytes(sum(item.nbytes for item in leftovers))
    count = f"{len(leftovers)} folder{'' if len(leftovers) == 1 else 's'}"
    oldest = format_time(min(item.changed_at for item in leftovers))
    return f"Killed jobs or deletions left {count} of {size}, the oldest of {oldest}; `index-store gc` removes them."


def error_object(error: SparseKVError) -> dict[str, object]:
    """An error, as JSON."""
    return {
        "reason": error.reason,
        "message": error.message,
        **error.metadata,
    }


def _index_object(index: IndexEntry, tokens: int) -> dict[str, object]:
    return {
        "name": index.name,
        "kind": index.kind,
        "parameters": dict(index.parameters),
        "layers": list(index.layers),
        "bytes": index.nbytes,
        "bytes_per_token": index.nbytes / tokens,
        "thresholds": list(index.thresholds),
        "arrays": [
            {"path": array.path, "shape": list(array.shape), "dtype": array.dtype, "bytes": array.nbytes}
            for array in index.arrays
        ],
    }


def _size(nbytes: int, tokens: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes, {nbytes / tokens:.1f} per token)"


def _pairs(values: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "-"


def layers_text(layers: Sequence[int], of: int | None = None) -> str:
    """Some of a model's layers, told so that the number of a layer is not taken for how many there are."""
    known = "" if of is None else f" of {of}"
    if not layers:
        return f"none{known}"
    return f"{len(layers)}{known} (layer{'' if len(layers) == 1 else 's'} {', '.join(map(str, layers))})"


def _window(window: WindowLayers) -> str:
    seen = "chunks of" if window.chunked else "the last"
    return f"{seen} {window.size} keys in layers {', '.join(map(str, window.layers))}"
