"""Children: stored contexts that continue another one, whose keys, values and indexes they need and do not copy.

A child has its own tokens, with their keys and values in every layer. All that searches is its parent's: a session on
the child is one on the parent whose tail begins with the child's rows. There is one generation: what continues a child
holds the child's rows as well and continues the same parent, so that the child in the middle may go.

A child's id is that of the whole token sequence, read on this parent in this way. So the same continuation has the same
id, whoever makes it. Made whole (`prefill_worker/jobs/children.py`) it keeps that id and stands alone.

Shape legend: H KV heads, N tokens of the parent, D tokens of the child's own, d head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import torch
from torch import Tensor

from index_store.errors import (
    ContextCorruptError,
    ContextExpiredError,
    ContextNotFoundError,
    FormatVersionError,
    InvalidArgumentError,
)
from index_store.family.parents import ATTENTION, EXACT, child_id
from index_store.store.catalog import Store, utc_now
from index_store.store.description.array_entry import kv_entry, tokens_entry, window_entry
from index_store.store.description.context_id import Parent, continued_digests
from index_store.store.description.dtypes import stored_dtype
from index_store.store.description.manifest import Manifest
from index_store.store.files.reading import read_bounded


@dataclass(frozen=True, slots=True)
class OwnRows:
    """What a child has of its own. token_ids: [D] int64. rows: by layer [H, D, 2, d] in the stored dtype.

    state: packed states behind the last token; None of a model without.
    """

    token_ids: Tensor
    rows: Sequence[Tensor]
    state: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of all layers."""
        return sum(rows.nbytes for rows in self.rows) + (0 if self.state is None else self.state.nbytes)

    def first(self, count: int) -> OwnRows:
        """Of the first tokens alone, without states."""
        return OwnRows(self.token_ids[:count], [rows[:, :count] for rows in self.rows])


@dataclass(frozen=True, slots=True)
class Continuation:
    """What becomes a child. before: the tokens of the parent, [N]. attention: how its tokens attended (`joined`).

    conversation: what is kept of the messages that all of its tokens are, as of a context of its own.
    """

    parent: Manifest
    before: Tensor
    own: OwnRows
    attention: str
    name: str
    expires_at: datetime | None = None
    owner: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    conversation: bytes | None = None
    renew: float | None = None

    @property
    def token_ids(self) -> Tensor:
        """All tokens, [N + D]."""
        return torch.cat([self.before, self.own.token_ids])

    def id(self) -> str:
        return child_id(self.parent, self.attention, self.token_ids, messages=self.conversation is not None)


def joined(before: str, added: str) -> str:
    """How the tokens of a child attended, of which the later ones were added in their own way."""
    return added if before in ("", added) else f"{before}, {added}"


def attention_of(manifest: Manifest) -> str:
    """How the tokens of a child attended; "" of other contexts."""
    return "" if manifest.parent is None else str(manifest.prefill.get(ATTENTION, EXACT))


def publish_child(store: Store, made: Continuation) -> Manifest:
    """Stores a child, durably and all at once; returns its manifest.

    Where the store has it already, it stays; it gets the name, the labels, and the later of both expiries. Raises
    ContextNotFoundError when the parent was removed meanwhile, InvalidArgumentError for too many labels, and what
    `ContextWriter.publish` raises.
    """
    id_ = made.id()
    with store.lock(id_):
        present = _present(store, id_)
        if present is not None:
            ends = (present.expires_at, made.expires_at)
            latest = None if None in ends else max(end for end in ends if end is not None)
            labels = present.labels_with(made.labels)
            renew = present.renew if made.renew is None else made.renew
            wanted = replace(present, name=made.name, expires_at=latest, labels=labels, renew=renew)
            if wanted == present:
                return present
            with store.writer(id_) as writer:
                return writer.publish_into(present, wanted)
        return _write(store, id_, made)


def _present(store: Store, id_: str) -> Manifest | None:
    """The child where the store has it already, whole or not; one that is damaged or has expired is removed."""
    try:
        child = store.manifest(id_)
        if child.parent is None:
            store.open(id_).close()
        else:
            read_own_rows(store, child)
        return child
    except ContextNotFoundError:
        return None
    except (ContextCorruptError, ContextExpiredError, FormatVersionError):
        store.delete(id_)
        return None


def _write(store: Store, id_: str, made: Continuation) -> Manifest:
    model, own = made.parent.model, made.own
    count = len(own.token_ids)
    kv = kv_entry(model, count, made.parent.dtype, whole=False)
    window = window_entry(model, count, made.parent.dtype, whole=False)
    with store.writer(id_) as writer:
        writer.write_tokens(own.token_ids)
        for entry in (kv,) if window is None else (kv, window):
            writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
        for layer, (path, place) in enumerate(_places(made.parent)):
            for head, rows in enumerate(own.rows[layer]):
                writer.write_chunk(path, (place, head), rows)
        state = writer.write_state(own.state)
        messages = None if made.conversation is None else writer.write_conversation(made.conversation)
        manifest = Manifest(
            id=id_,
            name=made.name,
            created_at=utc_now(),
            expires_at=made.expires_at,
            renew=made.renew,
            model=model,
            dtype=made.parent.dtype,
            token_count=made.parent.token_count + count,
            methods=made.parent.methods,
            dense_layers=made.parent.dense_layers,
            selection_errors=(),
            tokens=tokens_entry(count),
            kv=kv,
            window=window,
            state=state,
            indexes=(),
            prefill={ATTENTION: made.attention},
            seconds={},
            parent=Parent(made.parent.id, made.parent.token_count),
            prefix_digests=_digests(made),
            conversation=messages,
            owner=made.owner,
            tenant=made.parent.tenant,
            labels=made.labels,
        )
        with store.family_lock(made.parent.id):
            store.manifest(made.parent.id)  # raises when it was removed meanwhile
            return writer.publish(manifest)


def _digests(made: Continuation) -> str:
    """Those of the parent and on: who does not know the parent's salt does not find the child either."""
    known = made.parent.prefix_digests
    return continued_digests(known, made.token_ids) if known else ""


def _places(manifest: Manifest) -> list[tuple[str, int]]:
    """Of every layer: the array that has its rows, and its place in there."""
    full, windowed = manifest.model.full_layers, manifest.model.window_layers
    in_window = {layer: ("window" if full else "kv", place) for place, layer in enumerate(windowed)}
    in_kv = {layer: ("kv", place) for place, layer in enumerate(full)}
    return [{**in_window, **in_kv}[layer] for layer in range(manifest.model.layers)]


def read_own_rows(store: Store, child: Manifest) -> OwnRows:
    """Reads what a child has of its own, into host memory, and verifies every checksum.

    Raises what `Store.open` raises, a ContextCorruptError for what was altered, InvalidArgumentError for a context that
    is no child.
    """
    if child.parent is None:
        raise InvalidArgumentError(f"context {child.id} is no child")
    dtype = stored_dtype(child.dtype).torch_dtype
    with store.open(child.id, child) as context:
        token_ids = context.tokens()
        rows = [
            torch.empty(child.layer_entry(layer).shape[1:], dtype=dtype, device="cpu")
            for layer in range(child.model.layers)
        ]

        def read() -> None:
            for layer, out_HD2D in enumerate(rows):
                for head, out in enumerate(out_HD2D):
                    context.read_head(child.layer_entry(layer).path, layer, head, out)

        read_bounded(read, context.read_limit_s)
        return OwnRows(token_ids, rows, context.state())
