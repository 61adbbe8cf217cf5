"""Contexts as commands show them, whether a folder or a server tells of them: as people read them, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from index_store.cli.console import format_time, on_terminal, print_json, print_table
from index_store.cli.options import OutputFormat
from index_store.errors import InvalidArgumentError, SparseKVError, format_bytes
from index_store.store.catalog import Store
from index_store.store.description.context_id import WindowLayers
from index_store.store.description.dtypes import INT8
from index_store.store.description.manifest import HIGH_PLANE, MANIFESTS, Manifest
from index_store.store.files.leftovers import Leftover
from index_store.store.listing import Entry, state_of, told_of
from sparsekv.v1.values import ContextInfo, IndexInfo

ReferenceArgument = Annotated[
    str,
    typer.Argument(metavar="CONTEXT", help="A context: id, contexts/<id>, first digits of an id, or name."),
]
ReferenceArguments = Annotated[
    list[str],
    typer.Argument(metavar="CONTEXT", help="Contexts: id, contexts/<id>, first digits of an id, or name."),
]
RecursiveOption = Annotated[
    bool, typer.Option("--recursive", help="Remove contexts that continue these, too.")
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="Label to set; KEY- removes one. May be repeated."),
]
PinOption = Annotated[
    bool | None,
    typer.Option("--pin/--unpin", help="Keep it from expiring, and in memory before others; or no longer."),
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


def given_labels(words: Sequence[str]) -> dict[str, str]:
    """Values by key, where there is nothing to remove. Raises InvalidArgumentError."""
    labels = parse_labels(words)
    if None in labels.values():
        raise InvalidArgumentError("--label: expected KEY=VALUE; there are no labels to remove")
    return {key: value for key, value in labels.items() if value is not None}


def with_labels(present: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The labels after some were set or removed."""
    kept = {key: value for key, value in present.items() if key not in changes}
    return kept | {key: value for key, value in changes.items() if value is not None}


def labels_text(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "-"


def stored_info(store: Store, entry: Entry) -> ContextInfo:
    """A context of a folder, as a server would tell of it but for what only servers know."""
    if not isinstance(entry, Manifest):
        state, why = state_of(entry, expired=False), entry.error.message
        return ContextInfo(name=f"contexts/{entry.id}", state=state, state_message=why)
    told = told_of(entry)
    return ContextInfo(
        **told | {"indexes": tuple(IndexInfo(**index) for index in told["indexes"])},
        state=state_of(entry, expired=store.expired(entry)),
        methods=entry.methods,
        placement="objects" if store.elsewhere(entry.id) else "",
        children=len(store.children(entry.id)),
        renew_s=entry.renew,
    )


def id_of(context: ContextInfo) -> str:
    """Without `contexts/`."""
    return context.name.removeprefix("contexts/")


def context_object(context: ContextInfo) -> dict[str, Any]:
    """A context as JSON: the fields of the API's message."""
    fields = asdict(context)
    return {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in fields.items()
    }


_MEMORY = "MEMORY"
COLUMNS = ("ID", "NAME", "STATE", _MEMORY, "METHODS", "TOKENS", "KV", "INDEX", "MODEL", "CREATED", "EXPIRES")
_RIGHT = ("TOKENS", "KV", "INDEX")
_OPTIONAL = ("CREATED", "MODEL", "EXPIRES", "METHODS", "INDEX", "KV", _MEMORY, "STATE")
"""What a narrow terminal does not show, the first of them first."""


def print_contexts(contexts: Sequence[ContextInfo], memory: bool) -> None:
    """A table of them, and on standard error what is wrong with some. memory: with where they are."""
    shown = [column for column in COLUMNS if column != _MEMORY or memory]
    id_length = 12 if on_terminal() else 64
    rows, problems = [], []
    for each in contexts:
        id_ = id_of(each)[:id_length]
        row = [id_, each.display_name or "-", each.state, *([_memory(each)] if memory else [])]
        if each.state in ("READY", "EXPIRED"):
            row += [each.default_method or ",".join(each.methods) or "-", str(each.token_count)]
            row += [format_bytes(each.kv_bytes), format_bytes(each.index_bytes), each.model or "-"]
            row += map(format_time, (each.create_time, each.expire_time))
        else:
            problems.append(f"{id_}: {each.state_message}")
        rows.append(row + ["-"] * (len(shown) - len(row)))
    print_table(shown, rows, right=_RIGHT, optional=[column for column in _OPTIONAL if column in shown])
    for problem in problems:
        typer.echo(problem, err=True)


def _memory(context: ContextInfo) -> str:
    if context.placement == "objects":
        return context.placement
    return (context.placement or "loaded") if context.resident else "-"


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """What is known of one thing, a row for each."""
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:<{width}}  {value}")


def print_either(output: OutputFormat, document: Mapping[str, object], *lines: str) -> None:
    """A result as JSON, or its lines."""
    if output is OutputFormat.JSON:
        print_json(document)
    else:
        for line in lines:
            typer.echo(line)


def print_done(done: str, ids: Sequence[str], output: OutputFormat) -> None:
    """Which contexts something was done to: `removed`, `pinned`."""
    print_either(output, {done: list(ids)}, *(f"{done} {id_}" for id_ in ids))


def print_context(context: ContextInfo, output: OutputFormat) -> None:
    """All that is said of one."""
    if output is OutputFormat.JSON:
        print_json(context_object(context))
    else:
        print_rows(detail_rows(context))


def rows_text(rows: str, dtype: str) -> str:
    """How keys and values are stored, in words."""
    return f"4 of 8 bits, the others are index {HIGH_PLANE}" if rows == INT8 else dtype


def detail_rows(context: ContextInfo) -> list[tuple[str, str]]:
    """All that is said of a context, as (label, value)."""
    default = f"{context.default_method} {context.default_budget}".strip()
    expires = format_time(context.expire_time)
    if context.renew_s is not None and context.expire_time is not None:
        expires += f"; {timedelta(seconds=context.renew_s)} after a use at least"
    parent = context.parent.removeprefix("contexts/")
    said = {
        "id": id_of(context),
        "name": context.display_name,
        "state": f"{context.state}: {context.state_message}" if context.state_message else context.state,
        "in memory": _memory(context),
        "model": f"{context.model} ({context.architecture})",
        "tokens": str(context.token_count),
        "kv": f"{format_bytes(context.kv_bytes)}, {rows_text(context.rows, context.dtype)}",
        "continues": f"{parent}, {context.parent_token_count} tokens" if parent else "",
        "children": str(context.children or ""),
        **{f"index {index.name}": _index_text(index) for index in context.indexes},
        "indexes": format_bytes(context.index_bytes),
        "methods": ", ".join(context.methods),
        "default": f"{default}, tuned" if context.tuned else default,
        "dense layers": layers_text(context.dense_layers),
        "created": format_time(context.create_time),
        "expires": f"pinned; otherwise {expires}" if context.pinned else expires,
        "labels": labels_text(context.labels),
        "tenant": context.tenant,
        "readers": ", ".join(context.readers),
        "owner": context.owner,
        "made of": "messages" if context.is_conversation else "text or tokens",
    }
    return [(label, value) for label, value in said.items() if value]


def _index_text(index: IndexInfo) -> str:
    parameters = ", ".join(f"{name}={value}" for name, value in index.parameters.items()) or "-"
    return f"{index.kind}, {index.bytes_per_token:.1f} bytes per token, {layers_text(index.layers)}, {parameters}"


def stored_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """What only the folder tells of a context; all of it is in the manifest."""
    model = manifest.model
    heads = f"{model.query_heads} query heads, {model.kv_heads} KV heads, d {model.head_dim}"
    positions = len(manifest.query_positions)
    said = {
        "fingerprint": model.fingerprint,
        "layers": f"{model.layers}, {heads}",
        "windows": "" if model.window is None else _window(model.window),
        "bytes per token": f"{manifest.bytes_per_token():.1f}",
        "queries": f"of {positions} positions of every layer" if positions else "",
        "selection errors": ", ".join(f"{error:.4f}" for error in manifest.selection_errors),
        "prefill": ", ".join(f"{name}={value}" for name, value in manifest.prefill.items()),
        "seconds": ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in manifest.seconds.items()),
    }
    return [(label, value) for label, value in said.items() if value]


def stored_object(context: ContextInfo, manifest: Manifest) -> dict[str, Any]:
    """A context of a folder as JSON, with its whole manifest."""
    return {**context_object(context), "manifest": json.loads(MANIFESTS.render(manifest))}


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
    return {"reason": error.reason, "message": error.message, **error.metadata}


def layers_text(layers: Sequence[int], of: int | None = None) -> str:
    """Some of a model's layers, told so that the number of a layer is not taken for how many there are."""
    known = "" if of is None else f" of {of}"
    if not layers:
        return f"none{known}"
    return f"{len(layers)}{known} (layer{'' if len(layers) == 1 else 's'} {', '.join(map(str, layers))})"


def _window(window: WindowLayers) -> str:
    seen = "chunks of" if window.chunked else "the last"
    return f"{seen} {window.size} keys in layers {', '.join(map(str, window.layers))}"
