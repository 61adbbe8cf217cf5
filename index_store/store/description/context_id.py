"""Which model made a context, and the context's id: a hash over what was read and how, whatever indexes it has.

Beside it digests of the context's beginnings, by which contexts are found that begin with given tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from index_store.errors import InvalidArgumentError
from index_store.store.description.dtypes import STORED_DTYPES
from index_store.store.description.json_fields import check_name, check_positive, field_error

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads of one layer. head_dim: d of queries, keys and values.

    window: a query sees so many keys, its own included, and no context keeps more of the layer; None for all keys.
    chunked: a query sees those of its own chunk, of so many tokens, instead.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    chunked: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    def kept(self, tokens: int) -> int:
        """How many of a context's tokens are kept of the layer: the last ones."""
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True, slots=True)
class WindowLayers:
    """The layers with a sliding window, all of one shape.

    layers: ascending. size: keys that a query sees, its own included. chunked: those of its own chunk of so many.
    """

    layers: tuple[int, ...]
    size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    chunked: bool = False

    @property
    def unsaid(self) -> tuple[str, ...]:
        """Fields that a manifest says nothing of."""
        return () if self.chunked else ("chunked",)

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.query_heads, self.kv_heads, self.head_dim, self.size, self.chunked)


STATE_KINDS = ("conv", "recurrent")

FIXED_DTYPES = ("int64", "float32")
"""Dtypes that a model may keep a state in whatever it computes in."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of every of some layers.

    kind, number: as transformers' cache of such a layer has it: one of STATE_KINDS, and which of that kind. layers: of
    the model, ascending. shape: in one layer, of one text. dtype: one of FIXED_DTYPES; "" for the dtype of keys and
    values.
    """

    kind: str
    number: int
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    def nbytes(self, dtype: str) -> int:
        """Bytes in all of its layers, in a context that stores keys and values in that dtype."""
        return len(self.layers) * math.prod(self.shape) * STORED_DTYPES[self.dtype or dtype].itemsize


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The states of a model. Its layers that attend are counted by themselves wherever keys and values are.

    layers: of the model, all of them. attending: those that attend, ascending. parts: in the order in which they are
    stored: wider elements first, so that none lies across its own alignment.
    """

    layers: int
    attending: tuple[int, ...]
    parts: tuple[StatePart, ...]

    def __post_init__(self) -> None:
        for name, layers in (("attending", self.attending), *(("parts", part.layers) for part in self.parts)):
            ascending = all(one < other for one, other in itertools.pairwise((-1, *layers, self.layers)))
            if not layers or not ascending:
                expected = f"some ascending layers of 0..{self.layers - 1}"
                raise field_error(f"model.states.{name}", layers, expected)
        if not self.parts:
            raise field_error("model.states.parts", self.parts, "one or more")
        for part in self.parts:
            if part.kind not in STATE_KINDS or part.number < 0 or part.dtype not in ("", *FIXED_DTYPES):
                raise field_error("model.states.parts", part, f"{' or '.join(STATE_KINDS)} of a known dtype")
            if not part.shape or min(part.shape) < 1:
                raise field_error("model.states.parts", part.shape, "one or more positive sizes")
        dtypes = [(*FIXED_DTYPES, "").index(part.dtype) for part in self.parts]
        if dtypes != sorted(dtypes):
            raise field_error("model.states.parts", self.parts, f"parts in {', '.join(FIXED_DTYPES)} first")

    def nbytes(self, dtype: str) -> int:
        """Bytes of all parts in a context that stores keys and values in that dtype."""
        return sum(part.nbytes(dtype) for part in self.parts)


_MOST_OF_A_MODEL = 2**31 - 1
_HEX_ID = re.compile(r"[0-9a-f]{64}")
_ID_VERSION = 3
"""Not the format of what is stored: what was read keeps its id when it is written in another way. Before 3 indexes
counted, so those of a context were fixed when it was made."""


PREFIX_BLOCK = 256
"""Tokens from one digest of a context's beginnings to the next."""

DIGEST_DIGITS = 32

UNSTORED = "0" * 64
"""In place of an id: of contexts that are in memory alone."""


def is_context_id(text: str) -> bool:
    """Whether the text has the form of a context id: 64 lower-case hex digits."""
    return _HEX_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model prefilled a context, and the sizes that its keys and values follow from.

    fingerprint: hash over the model's configuration and weights; tokenizer_fingerprint: over its tokenizer files.
    layers: that attend, which is all of them but where `states` says otherwise. query_heads, kv_heads, head_dim (d): of
    the layers whose queries see all keys; where there are none, of the others. max_positions: the longest sequence the
    model takes, in tokens. window: the layers whose queries see the last keys only; None without any. states: what
    layers keep that have a recurrent or convolution state; None without any. index_keys: numbers in a key of the index
    by which the model itself selects what it attends to, for which the last KV head stands; 0 without such an index.
    """

    name: str
    architecture: str
    fingerprint: str
    tokenizer_fingerprint: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    window: WindowLayers | None = None
    states: ModelStates | None = None
    index_keys: int = 0

    def __post_init__(self) -> None:
        for name in ("name", "architecture", "fingerprint", "tokenizer_fingerprint"):
            check_name(f"model.{name}", getattr(self, name))
        for name in ("layers", "query_heads", "kv_heads", "head_dim", "vocab_size"):
            check_positive(f"model.{name}", getattr(self, name), _MOST_OF_A_MODEL)
        check_positive("model.max_positions", self.max_positions)
        if self.query_heads % self.kv_heads:
            raise field_error(
                "model.query_heads", self.query_heads, f"a multiple of {self.kv_heads} KV heads"
            )
        if self.window is not None:
            self._check_window(self.window)
        if self.states is not None and len(self.states.attending) != self.layers:
            raise field_error("model.states.attending", self.states.attending, f"{self.layers} layers")
        if not 0 <= self.index_keys <= 2 * self.head_dim:
            raise field_error("model.index_keys", self.index_keys, f"0 to {2 * self.head_dim}")

    @property
    def unsaid(self) -> tuple[str, ...]:
        """Fields that a manifest says nothing of."""
        return tuple(name for name in ("window", "states", "index_keys") if not getattr(self, name))

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Layers whose queries see the last keys only, ascending."""
        return () if self.window is None else self.window.layers

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers whose queries see all keys, ascending."""
        return tuple(layer for layer in range(self.layers) if layer not in self.window_layers)

    @property
    def searched_layers(self) -> tuple[int, ...]:
        """Layers that may have indexes, ascending: those whose queries see all keys, unless the model selects them."""
        return () if self.index_keys else self.full_layers

    def shape(self, layer: int) -> LayerShape:
        if self.window is not None and layer in self.window.layers:
            return self.window.shape
        return LayerShape(self.query_heads, self.kv_heads, self.head_dim)

    def _check_window(self, window: WindowLayers) -> None:
        for name in ("size", "query_heads", "kv_heads", "head_dim"):
            check_positive(f"model.window.{name}", getattr(window, name))
        if window.query_heads % window.kv_heads:
            expected = f"a multiple of {window.kv_heads} KV heads"
            raise field_error("model.window.query_heads", window.query_heads, expected)
        layers = window.layers
        if not layers or layers != tuple(sorted(set(layers))) or layers[0] < 0 or layers[-1] >= self.layers:
            expected = f"some ascending layers of 0..{self.layers - 1}"
            raise field_error("model.window.layers", layers, expected)


@dataclass(frozen=True, slots=True)
class Parent:
    """The context that a child continues: its id, and how many tokens it has."""

    id: str
    token_count: int

    def __post_init__(self) -> None:
        if not is_context_id(self.id):
            raise field_error("parent.id", self.id, "64 lower-case hex digits")
        check_positive("parent.token_count", self.token_count)


def context_id(
    model: ModelIdentity,
    dtype: str,
    reading: Mapping[str, object],
    salt: str,
    token_ids: Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.integer]] | Tensor,
    tenant: str = "",
) -> str:
    """The address of a context: what was read, by which model and how, for whom, determines its id, and nothing else.

    SHA-256 over a version, both fingerprints, stored dtype, options of the reading (JSON values, nested as needed, in
    any order), salt, tenant and token ids, as 64 hex digits. No salt that a caller gives stands for a tenant. Names,
    times and indexes do not count: they may change. Nor does how it was computed: arrays from another device or compute
    dtype differ in their last bits and are the same context.
    """
    header = {"id_version": _ID_VERSION, **_made_by(model, dtype, salt, tenant), "reading": reading}
    try:
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"options of the reading must be finite JSON values: {error}") from None
    tokens = _checked_tokens(model, token_ids)
    digest = hashlib.sha256(text.encode())
    digest.update(b"\0" + tokens.astype("<u4").tobytes())
    return digest.hexdigest()


def first_digest(model: ModelIdentity, dtype: str, salt: str, tenant: str = "") -> str:
    """The digest of no tokens: model, dtype, salt and tenant alone decide it, so contexts of others are not found."""
    header = json.dumps({"prefix": PREFIX_BLOCK, **_made_by(model, dtype, salt, tenant)}, sort_keys=True)
    return hashlib.sha256(header.encode()).hexdigest()[:DIGEST_DIGITS]


def continued_digests(
    known: str, token_ids: Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.integer]] | Tensor
) -> str:
    """The digests of all beginnings of whole blocks, joined. known: those of the first ones, at least `first_digest`.

    Each is a hash over the one before it and the tokens of its block.
    """
    import numpy as np

    tokens = np.asarray(token_ids).astype("<u4")
    digests = [known[at : at + DIGEST_DIGITS] for at in range(0, len(known), DIGEST_DIGITS)]
    for block in range(len(digests) - 1, len(tokens) // PREFIX_BLOCK):
        part = tokens[block * PREFIX_BLOCK : (block + 1) * PREFIX_BLOCK].tobytes()
        digests.append(hashlib.sha256(bytes.fromhex(digests[-1]) + part).hexdigest()[:DIGEST_DIGITS])
    return "".join(digests)


def _made_by(model: ModelIdentity, dtype: str, salt: str, tenant: str) -> dict[str, str]:
    return {
        **({"tenant": tenant} if tenant else {}),
        "model": model.fingerprint,
        "tokenizer": model.tokenizer_fingerprint,
        "dtype": dtype,
        "salt": salt,
    }


def _checked_tokens(
    model: ModelIdentity,
    token_ids: Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.integer]] | Tensor,
) -> np.ndarray[tuple[int, ...], np.dtype[np.integer]]:
    import numpy as np  # late: whoever only lists a store does without

    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"token ids must be a non-empty list of integers, got shape {tokens.shape}"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= model.vocab_size:
        raise InvalidArgumentError(
            f"token ids span {int(tokens.min())}..{int(tokens.max())}, the model's are 0..{model.vocab_size - 1}"
        )
    return tokens
