"""What layers with a recurrent or convolution state keep of a context: a few tensors, whatever its length."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from index_store.store.description.dtypes import STORED_DTYPES
from index_store.store.description.json_fields import field_error

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
