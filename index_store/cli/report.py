"""Contexts as commands show them, whether a folder or a server tells of them, and as JSON what a folder tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Annotated, Protocol

import typer

from index_store.cli.console import format_time, on_terminal, print_table
from index_store.errors import InvalidArgumentError, SparseKVError, format_bytes
from index_store.selection.budgets import KEEP_GRID
from index_store.store.description.context_id import WindowLayers
from index_store.store.description.dtypes import INT8
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import HIGH_PLANE, IndexEntry, Manifest
from index_store.store.files.leftovers import Leftover
from index_store.store.listing import BrokenContext, state_of

LabelArguments = Annotated[
    list[str], typer.Argument(metavar="KEY=VALUE", help="Labels to set; KEY- removes one.")
]


def parse_labels(words: Sequence[str]) -> dict[str, str | None]:
    """Values by key, None for a label to remove. Raises InvalidArgumentError."""
    labels: dict[str, str | None] = {}
    for word in words:
        key, equals, value = word.partition("=")
        removed = not equals and key.endswith("-")
        if not (equals or removed) or not key.rstrip("-"):
            raise InvalidArgumentError(f"label {word[:80]!r}: expected KEY=VALUE, or KEY- to remove it")
        key = key[:-1] if removed else key
        if key in labels:
            raise InvalidArgumentError(f"label {key[:80]!r} is given twice, expected it once")
        labels[key] = None if removed else value
    return labels


def with_labels(present: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The labels after some were set or removed."""
    kept = {key: value for key, value in present.items() if key not in changes}
    return kept | {key: value for key, value in changes.items() if value is not None}


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as they are written."""
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "-"


_MEMORY = "MEMORY"
COLUMNS = ("ID", "NAME", "STATE", _MEMORY, "METHODS", "TOKENS", "KV", "INDEX", "MODEL", "CREATED", "EXPIRES")
_RIGHT = ("TOKENS", "KV", "INDEX")
_OPTIONAL = ("CREATED", "MODEL", "EXPIRES", "METHODS", "INDEX", "KV", _MEMORY, "STATE")
"""What a narrow terminal does not show, the first of them first."""


@dataclass(frozen=True, slots=True)
class ShownContext:
    """A context of a list. cells: those of COLUMNS behind MEMORY, empty where it cannot be used, for the reason
    `problem`. memory: where a server has it; None of a folder, which has no such column."""

    id: str
    name: str
    state: str
    cells: tuple[str, ...] = ()
    memory: str | None = None
    problem: str = ""

    @classmethod
    def of(cls, entry: Manifest | BrokenContext, *, expired: bool) -> ShownContext:
        """As a folder tells."""
        state = state_of(entry, expired=expired)
        if isinstance(entry, BrokenContext):
            return cls(entry.id, "-", state, problem=entry.error.message)
        sizes = (entry.token_count, entry.kv_bytes, entry.index_bytes)
        times = (entry.created_at, entry.expires_at)
        return cls(
            entry.id, entry.name, state, list_cells(",".join(entry.methods), sizes, entry.model.name, times)
        )


def list_cells(
    methods: str, sizes: tuple[int, int, int], model: str, times: tuple[datetime, datetime | None]
) -> tuple[str, ...]:
    """Cells of a `ShownContext`. sizes: tokens, bytes of keys and values, of indexes. times: made, expires."""
    tokens, *nbytes = sizes
    return (methods, str(tokens), *map(format_bytes, nbytes), model, *map(format_time, times))


def print_contexts(contexts: Sequence[ShownContext]) -> None:
    """A table of them, and on standard error what is wrong with some."""
    shown = [column for column in COLUMNS if column != _MEMORY or any(each.memory for each in contexts)]
    id_length = 12 if on_terminal() else 64
    rows = []
    for each in contexts:
        memory = [each.memory or "-"] if _MEMORY in shown else []
        first = [each.id[:id_length], each.name, each.state, *memory]
        rows.append([*first, *(each.cells or ["-"] * (len(shown) - len(first)))])
    print_table(shown, rows, right=_RIGHT, optional=[column for column in _OPTIONAL if column in shown])
    for each in contexts:
        if each.problem:
            typer.echo(f"{each.id[:id_length]}: {each.problem}", err=True)


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """What is known of one thing, a row for each."""
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:<{width}}  {value}")


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
        "renew": entry.renew,
        "pinned": entry.pinned,
        "labels": dict(entry.labels),
        "tenant": entry.tenant,
        "readers": list(entry.readers),
        "messages": entry.conversation is not None,
    }


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
        *(
            family_rows("", 0, children)
            if manifest.parent is None
            else family_rows(manifest.parent.id, manifest.parent.token_count, children)
        ),
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
        *note_rows(
            manifest,
            (manifest.created_at, manifest.expires_at),
            manifest.renew,
            manifest.conversation is not None,
        ),
    ]
    return rows


def family_rows(parent: str, parent_tokens: int, children: int) -> list[tuple[str, str]]:
    """What a context continues, by id, "" for nothing, and what continues it."""
    continues = [("continues", f"{parent}, {parent_tokens} tokens")] if parent else []
    return [*continues, *([("children", str(children))] if children else [])]


class Noted(Protocol):
    """A context, whoever tells of it."""

    @property
    def pinned(self) -> bool: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def owner(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def readers(self) -> Sequence[str]: ...


def note_rows(
    context: Noted, times: tuple[datetime, datetime | None], renew: float | None, talk: bool
) -> list[tuple[str, str]]:
    """What is noted of a context. times: made, expires. renew: seconds that it lives on after a use. talk: whether it
    was made of messages."""
    made, expires = map(format_time, times)
    if renew is not None and times[1] is not None:
        expires += f"; {timedelta(seconds=renew)} after a use at least"
    belongs = (("tenant", context.tenant), ("readers", ", ".join(context.readers)), ("owner", context.owner))
    return [
        ("created", made),
        ("expires", f"pinned; otherwise {expires}" if context.pinned else expires),
        ("labels", labels_text(context.labels)),
        *((label, said) for label, said in belongs if said),
        ("made of", "messages" if talk else "text or tokens"),
    ]


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
    return {"reason": error.reason, "message": error.message, **error.metadata}


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
