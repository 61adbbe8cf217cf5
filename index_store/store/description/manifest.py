"""What a stored context is: a frozen, versioned description that mirrors `manifest.json`.

Constructing any of these classes checks it, so a Manifest that exists is consistent: its arrays have the shapes
that the model and the token count imply, and every path stays inside the context's folder. Errors are
ManifestError and name field, value and (when read from a file) path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from index_store.errors import (
    ChecksumError,
    DtypeMismatchError,
    FormatVersionError,
    InvalidArgumentError,
    ManifestError,
    ModelMismatchError,
)
from index_store.selection.budgets import KEEP_GRID, are_thresholds
from index_store.store.description.array_entry import (
    HEX,
    PATH_PART,
    ArrayEntry,
    conversation_entry,
    kv_entry,
    plane_entry,
    queries_entry,
    state_entry,
    tokens_entry,
    window_entry,
)
from index_store.store.description.callers import check_readers, check_tenant
from index_store.store.description.context_id import (
    DIGEST_DIGITS,
    PREFIX_BLOCK,
    UNSTORED,
    ModelIdentity,
    Parent,
    is_context_id,
)
from index_store.store.description.dtypes import AS_DTYPE, INT8, KV_DTYPES, PLANE_DTYPE, STORED_DTYPES
from index_store.store.description.json_fields import (
    MOST,
    MOST_LABELS,
    Number,
    Scalar,
    Sealed,
    Whole,
    check_labels,
    check_name,
    check_names,
    check_positive,
    check_utc,
    field_error,
)
from index_store.store.files.leftovers import WHOLE

FORMAT_VERSION = 5
"""What is written: 2 added calibrated thresholds and a sample of the queries, 3 leaves the salt out and has layers with
a sliding window, 4 has labels, pins and messages, children and digests of prefixes, 5 may have rows in 8 bits."""

LAYERS_VERSION = 6
"""What is written of a model with states or chunks, so that programs that know none refuse it by its version."""

MARKS_VERSION = 7
"""The same where states are kept behind earlier tokens, too."""

INDEX_VERSION = 8
"""What is written of a model with a learnt index of its own."""

READABLE_VERSIONS = (2, 3, 4, 5, 6, 7, 8)

STATE_MARKS = "state_marks"
"""Note of a prefill: states are kept behind every so many tokens, those of the last one apart."""

SHORTEST_TTL, LONGEST_TTL = timedelta(seconds=1), timedelta(days=36_500)

_LONGER = 1 / 16  # of its time to live; so one use in that time writes, whatever their number

MANIFEST_NAME = "manifest.json"

HIGH_PLANE = "coarse_rows"
"""The index, of that kind, that has four of the 8 bits of rows: the coarse copy in its usual form."""

_HIGH_PARAMETERS: Mapping[str, Scalar] = {
    "coding": "scalar",
    "key_bits": 4,
    "value_bits": 4,
    "value_group": 128,
}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One search index: its kind and parameters, the model layers it covers, and its arrays.

    Array `index/<name>/<array>` is [len(layers), kv_heads, ...]; row j belongs to model layer `layers[j]`.
    thresholds: estimated attention weights above which items hold the shares KEEP_GRID of the keys, as calibrated on
        the context's last queries (index_store/selection/budgets.py); empty without calibration.
    """

    name: str
    kind: str
    parameters: Mapping[str, Scalar]
    layers: tuple[int, ...]
    arrays: tuple[ArrayEntry, ...]
    thresholds: tuple[Number, ...] = ()

    def __post_init__(self) -> None:
        if not PATH_PART.fullmatch(self.name):
            raise field_error("index.name", self.name, "letters, digits, '_', '-', '.'")
        check_name(f"index.{self.name}.kind", self.kind)
        if self.thresholds and not are_thresholds(self.thresholds):
            expected = f"{len(KEEP_GRID)} positive numbers, none above the one before, or none at all"
            raise field_error(f"index.{self.name}.thresholds", self.thresholds, expected)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, without checksums."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything there is to know about a stored context, except the arrays' contents.

    Before it is published its arrays have no checksums; the writer adds them.
    created_at, expires_at: UTC; a context without expires_at never expires.
    dtype: the element type of keys and values. methods: names of the methods it was prefilled for, the default first.
    dense_layers: layers with flat attention; methods that drop what they did not select attend fully there.
    selection_errors: the measured error of every layer by which the dense ones were found; empty when they were given.
    prefill: the parameters of the prefill; seconds: wall time per phase.
    queries: a sample of every layer's queries, as they were before scaling, by which methods can be tuned; None without
        one. query_positions: the token position of each of its rows, ascending; calibration prompts' are not below
        token_count.
    kv: keys and values of the layers whose queries see all keys; of the others where there are no such layers. Of rows
        in 8 bits it is their low plane (`plane_entry`), beside the index HIGH_PLANE. window: of the layers whose
        queries see the last keys only, beside those; None where all layers are of one kind.
    state: of a model with states, those behind the last token (`TextStates.pack`), a child's as well; None of others.
        Before them those of every mark (STATE_MARKS).
    parent: of a child, the context that it continues. token_count are then the tokens of both; tokens, kv and window
        have the child's own alone, all of them in every layer, and there are neither indexes nor queries. A context
        that was a child and was made whole has none; its arrays lie below the folder WHOLE.
    prefix_digests: of the context's beginnings (`context_id.continued_digests`); empty before format 4.
    conversation: the messages that the context was made of, as UTF-8 of JSON
        (index_store/models/conversation/turns.py); None for a context of plain text or of tokens.
    labels: what its owner notes of it. pinned: whether it is kept: it does not expire then. owner: who asked for it
        first, by the name of a token; "" where nobody was asked for one.
    tenant: whose it is, for good. readers: other tenants that may read it (`callers`). renew: seconds that it lives on
        after every use, where it expires at all; None where uses change nothing.
    format_version: the one that it was read in.

    One that is in memory alone (`UNSTORED`) may have no tokens. Its arrays are then described as those of one token:
    none is empty.
    """

    id: str
    name: str
    created_at: datetime
    expires_at: datetime | None
    model: ModelIdentity
    dtype: str
    token_count: int
    methods: tuple[str, ...]
    dense_layers: tuple[int, ...]
    selection_errors: tuple[Number, ...]
    tokens: ArrayEntry
    kv: ArrayEntry
    indexes: tuple[IndexEntry, ...]
    prefill: Mapping[str, Scalar]
    seconds: Mapping[str, Number]
    queries: ArrayEntry | None = None
    query_positions: tuple[Whole, ...] = ()
    window: ArrayEntry | None = None
    state: ArrayEntry | None = None
    parent: Parent | None = None
    prefix_digests: str = field(default="", repr=False)
    conversation: ArrayEntry | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    pinned: bool = False
    owner: str = ""
    tenant: str = ""
    readers: tuple[str, ...] = ()
    renew: Number | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not is_context_id(self.id):
            raise field_error("id", self.id, "64 lower-case hex digits")
        if self.format_version not in READABLE_VERSIONS:
            raise field_error("format_version", self.format_version, str(FORMAT_VERSION))
        check_name("name", self.name)
        check_utc("created_at", self.created_at)
        if self.expires_at is not None:
            check_utc("expires_at", self.expires_at)
        if self.dtype not in KV_DTYPES:
            raise field_error("dtype", self.dtype, f"one of {', '.join(KV_DTYPES)}")
        if self.token_count or self.id != UNSTORED:
            check_positive("token_count", self.token_count)
        if self.token_count > self.model.max_positions:
            raise field_error(
                "token_count", self.token_count, f"at most {self.model.max_positions} positions"
            )
        check_names("methods", self.methods)
        check_labels("labels", self.labels)
        if self.owner:
            check_name("owner", self.owner)
        check_tenant("tenant", self.tenant)
        check_readers(self.readers)
        least, most = SHORTEST_TTL.total_seconds(), LONGEST_TTL.total_seconds()
        if self.renew is not None and not least <= self.renew <= most:
            raise field_error("renew", self.renew, f"null or seconds from {least:g} to {most:.0f}")
        self._check_layers("dense_layers", self.dense_layers)
        self._check_arrays()
        digits = (self.token_count // PREFIX_BLOCK + 1) * DIGEST_DIGITS
        if self.prefix_digests and (
            len(self.prefix_digests) != digits or not HEX.fullmatch(self.prefix_digests)
        ):
            raise field_error(
                "prefix_digests", self.prefix_digests, f"{digits} lower-case hex digits, or none"
            )
        errors = self.selection_errors
        if len(errors) not in (0, self.model.layers):
            expected = f"{self.model.layers} numbers, one per layer, or none"
            raise field_error("selection_errors", errors, expected)

    @property
    def unsaid(self) -> Collection[str]:
        """Fields that the file says nothing of."""
        names = (
            "conversation",
            "labels",
            "pinned",
            "owner",
            "parent",
            "prefix_digests",
            "state",
            "tenant",
            "readers",
            "renew",
        )
        windows = ("window",) if self.model.window is None else ()
        return (*windows, *(name for name in names if not getattr(self, name)))

    @property
    def array_folder(self) -> str:
        """Where the arrays lie, but the messages and the indexes: WHOLE or "", the context's own folder."""
        return WHOLE if self.tokens.path.startswith(f"{WHOLE}/") else ""

    @property
    def own_tokens(self) -> int:
        """Tokens whose keys and values are stored here: all but the parent's."""
        return self.token_count - (0 if self.parent is None else self.parent.token_count)

    @property
    def rows(self) -> str:
        """How exact rows are stored, one of `ROW_CODINGS`; `dtype` is that of what is added to them in any case."""
        return INT8 if self.kv.dtype == PLANE_DTYPE else AS_DTYPE

    @property
    def row_bytes(self) -> int:
        """Bytes that keys and values take of one token and KV head; of rows in 8 bits the half that is no index."""
        two, width = self.kv.shape[3:]
        return two * width * STORED_DTYPES[self.kv.dtype].itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and states; a child's own. Of rows in 8 bits the half that is no index."""
        return sum(array.nbytes for array in self.kv_arrays)

    @property
    def kv_arrays(self) -> tuple[ArrayEntry, ...]:
        """The arrays of keys, values and states: one for every kind of layers."""
        return tuple(entry for entry in (self.kv, self.window, self.state) if entry is not None)

    def layer_entry(self, layer: int) -> ArrayEntry:
        """The array that holds a layer's keys and values."""
        return self.window if self.window is not None and layer in self.model.window_layers else self.kv

    @property
    def index_bytes(self) -> int:
        return sum(index.nbytes for index in self.indexes)

    @property
    def arrays(self) -> tuple[ArrayEntry, ...]:
        """Every array of the context: tokens, messages, keys and values, the sample of queries, then the indexes'."""
        some = (entry for entry in (self.conversation, *self.kv_arrays, self.queries) if entry is not None)
        indexes = (array for index in self.indexes for array in index.arrays)
        return (self.tokens, *some, *indexes)

    def bytes_per_token(self) -> float:
        """Bytes of keys, values and indexes per token of the context; of a child per token of its own."""
        return (self.kv_bytes + self.index_bytes) / self.own_tokens

    @property
    def written_version(self) -> int:
        if self.model.index_keys:
            return INDEX_VERSION
        chunked = self.model.window is not None and self.model.window.chunked
        if self.state_marks:
            return MARKS_VERSION
        return LAYERS_VERSION if chunked or self.model.states is not None else FORMAT_VERSION

    @property
    def state_marks(self) -> Sequence[int]:
        """Numbers of first tokens behind which states are kept, ascending, without all of them."""
        every = self.prefill.get(STATE_MARKS, 0) if self.model.states is not None else 0
        return range(every, self.token_count, every) if isinstance(every, int) and every > 0 else ()

    def expired(self, now: datetime) -> bool:
        """Whether the context's time to live has passed at `now` (timezone-aware). A pinned one's does not."""
        return self.expires_at is not None and self.expires_at <= now and not self.pinned

    def renewed(self, now: datetime) -> Manifest:
        """As a use leaves it: it lives as long as `renew` says from then on, or a little longer, so that the next uses
        change nothing."""
        if self.renew is None or self.expires_at is None:
            return self
        if self.expires_at >= now + timedelta(seconds=self.renew):
            return self
        return replace(self, expires_at=now + timedelta(seconds=self.renew * (1 + _LONGER)))

    @property
    def stored_indexes(self) -> frozenset[str]:
        """Names of the indexes that have a folder: older contexts may list some without any array."""
        return frozenset(index.name for index in self.indexes if index.arrays)

    def index(self, name: str) -> IndexEntry | None:
        """The index of that name, or None when the context has none."""
        return next((index for index in self.indexes if index.name == name), None)

    def labels_with(self, added: Mapping[str, str]) -> Mapping[str, str]:
        """Its labels with further ones, or others. Raises InvalidArgumentError where those are too many together."""
        labels = {**self.labels, **added}
        if len(labels) > MOST_LABELS:
            raise InvalidArgumentError(
                f"context {self.id[:12]} has {len(self.labels)} labels and would have {len(labels)}, expected at most "
                f"{MOST_LABELS}; set fewer, or remove some of it first",
                field="labels",
                context=self.id,
            )
        return labels

    @property
    def layers_of(self) -> Mapping[str, tuple[int, ...]]:
        """By the path of every array that has rows of layers: whose rows they are, in their order."""
        full, windowed = self.model.full_layers, self.model.window_layers
        found = {self.kv.path: full or windowed}
        for entry, layers in ((self.window, windowed), (self.queries, full)):
            found |= {} if entry is None else {entry.path: layers}
        return found | {array.path: index.layers for index in self.indexes for array in index.arrays}

    def changed_arrays(
        self, change: Callable[[ArrayEntry], ArrayEntry], *, layered: bool = False
    ) -> dict[str, Any]:
        """Fields for `replace` with every array changed; layered: only those of `layers_of`."""
        names = ("kv", "window", "queries", *(() if layered else ("tokens", "state", "conversation")))
        present = {name: getattr(self, name) for name in names}
        indexes = (replace(each, arrays=tuple(map(change, each.arrays))) for each in self.indexes)
        return {
            **{name: change(entry) for name, entry in present.items() if entry is not None},
            "indexes": tuple(indexes),
        }

    def with_checksums(self, checksums: Mapping[str, str | None]) -> Manifest:
        """The manifest with the checksums of every array, by path (see `ArrayEntry.checksums`); None takes them out."""

        def sealed(entry: ArrayEntry) -> ArrayEntry:
            return replace(entry, checksums=checksums[entry.path])

        return replace(self, **self.changed_arrays(sealed))

    def _check_layers(self, name: str, layers: tuple[int, ...]) -> None:
        ascending = all(a < b for a, b in itertools.pairwise(layers))
        if not ascending or not all(0 <= layer < self.model.layers for layer in layers):
            raise field_error(name, layers, f"ascending layers of 0..{self.model.layers - 1}")

    def _check_arrays(self) -> None:
        if self.parent is not None and (self.own_tokens < 1 or self.indexes or self.queries is not None):
            expected = (
                f"less than the {self.token_count} tokens of its child, which has no indexes and no queries"
            )
            raise field_error("parent", self.parent, expected)
        tokens = max(1, self.own_tokens)
        made, whole = (self.model, tokens, self.dtype), self.parent is None
        planes = self.rows == INT8
        if planes:
            self._check_planes()
        for name, expected_entry in (
            ("tokens", tokens_entry(tokens)),
            ("kv", plane_entry(*made[:2]) if planes else kv_entry(*made, whole=whole)),
            ("window", window_entry(*made, whole=whole)),
            ("state", state_entry(self.model, self.dtype, len(self.state_marks))),
        ):
            self._check_entry(name, getattr(self, name), expected_entry)
        if self.array_folder and not whole:
            raise field_error("tokens", self.tokens, f"an array outside of {WHOLE}, since this is a child")
        said = self.conversation
        if said is not None and said.layout != conversation_entry(said.nbytes):
            raise field_error("conversation", said, f"{conversation_entry(said.nbytes)}")
        self._check_queries()
        for index in self.indexes:
            self._check_layers(f"indexes.{index.name}.layers", index.layers)
            rows = (len(index.layers), self.model.kv_heads)
            for array in index.arrays:
                parent, _, name = array.path.rpartition("/")
                if parent != f"index/{index.name}" or not name:
                    raise field_error("path", array.path, f"index/{index.name}/<array>")
                if array.shape[:2] != rows:
                    raise field_error(f"{array.path}.shape", array.shape, f"leading sizes {rows}")
                if array.chunks != (1, 1, *array.shape[2:]):
                    raise field_error(f"{array.path}.chunks", array.chunks, "one chunk per layer and KV head")
        total = sum(array.nbytes for array in self.arrays)
        if total > MOST:
            raise field_error("indexes", f"{total} bytes", f"at most {MOST} bytes of all arrays")
        paths = [array.path for array in self.arrays]
        if len(set(paths)) != len(paths):
            raise field_error("indexes", paths, "every array once")

    def _check_planes(self) -> None:
        """Rows in 8 bits are those of layers that see all keys, with the coarse copy of each."""
        if self.parent is not None or not self.model.full_layers:
            raise field_error(
                "kv.dtype", self.kv.dtype, f"{self.dtype}, of a child or of sliding windows alone"
            )
        index = self.index(HIGH_PLANE)
        there = index is not None and index.kind == HIGH_PLANE and index.layers == self.model.full_layers
        if (
            index is None
            or not (there and index.arrays)
            or any(index.parameters.get(name) != value for name, value in _HIGH_PARAMETERS.items())
        ):
            expected = f"index {HIGH_PLANE} in its usual form, in all layers that see all keys, beside rows in 8 bits"
            raise field_error("indexes", sorted(each.name for each in self.indexes), expected)

    def _check_queries(self) -> None:
        positions = self.query_positions
        if any(later < earlier for earlier, later in itertools.pairwise((0, *positions))):
            raise field_error("query_positions", positions, "ascending token positions")
        self._check_entry("queries", self.queries, queries_entry(self.model, len(positions)))

    def _check_entry(self, name: str, found: ArrayEntry | None, expected: ArrayEntry | None) -> None:
        placed = None if expected is None else expected.below(self.array_folder)
        if (None if found is None else found.layout) != placed:
            raise field_error(name, found, f"{placed}")


def require_model(manifest: Manifest, identity: ModelIdentity) -> None:
    """Raises ModelMismatchError unless the context was prefilled by exactly this model and tokenizer."""
    for what, found, expected in (
        ("model", manifest.model.fingerprint, identity.fingerprint),
        ("tokenizer", manifest.model.tokenizer_fingerprint, identity.tokenizer_fingerprint),
    ):
        if found != expected:
            raise ModelMismatchError(
                f"context {manifest.id[:12]} was prefilled by {manifest.model.name} ({what} fingerprint {found}), "
                f"expected {identity.name} ({expected}); serve that model for it, or prefill its document again with "
                "this one: both may lie in one store, under one name",
                found=found,
                expected=expected,
                part=what,
            )


def require_dtype(manifest: Manifest, dtype: str) -> None:
    """Raises DtypeMismatchError unless keys and values are stored in that dtype."""
    if manifest.dtype != dtype:
        raise DtypeMismatchError(
            f"context {manifest.id[:12]} stores keys and values as {manifest.dtype}, expected {dtype}; "
            f"prefill the document again with --dtype {dtype} or serve with --dtype {manifest.dtype}",
            found=manifest.dtype,
            expected=dtype,
        )


def _without_salt(document: dict[str, Any]) -> None:
    """Version 2 had the salt in clear text, which only the id needs to know."""
    if document["format_version"] == 2 and not isinstance(document.pop("salt", None), str):
        raise field_error("salt", None, "a text")


def _check_written(manifest: Manifest) -> None:
    for entry in manifest.arrays:
        if entry.checksums is None:
            raise field_error(
                f"{entry.path}.checksums", None, "a checksum per chunk, as the writer adds them"
            )


MANIFESTS = Sealed(
    Manifest,
    "the manifest",
    "delete the context (`index-store rm`) and make it again: prefill its document, or continue its parent anew",
    wrong=ManifestError,
    damaged=ChecksumError,
    foreign=FormatVersionError,
    versions=READABLE_VERSIONS,
    written=lambda manifest: manifest.written_version,
    check=_check_written,
    upgrade=_without_salt,
)
"""Files `manifest.json`."""
