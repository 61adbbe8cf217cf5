"""What becomes of the keys that were not selected: the remainders there are, by name. No torch here.

How they are computed is in `remainder_states`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PieceKind:
    """What an index that covers every key divides keys into, so that a remainder can be computed over it.

    made_of: what pieces consist of, in the plural. keys_each: keys that one of those stands for, about, at least.
    """

    made_of: str
    keys_each: int


CLUSTERS, COARSE_ROWS = PieceKind("clusters", 16), PieceKind("coarse rows", 1)

MOMENTS = ("none", "diagonal", "full")
"""Moments that clusters may hold besides means and sums, each including those before it: nothing, variances of keys,
covariances of values and keys."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """How the attention to the keys left in pieces is approximated.

    pieces: what it is computed over; None where nothing is. moments: what the clusters must hold, one of MOMENTS.
    takes_out_rows: whether logits and values of exact keys are taken out, and not only their ids.
    """

    name: str
    summary: str
    pieces: PieceKind | None = None
    moments: str = "none"
    takes_out_rows: bool = False


DROPPED = Remainder("dropped", "Keys that were not selected are left out.")
MONOPOLE = Remainder(
    "monopole",
    "Keys that were not selected count as the mean key of their cluster.",
    CLUSTERS,
    takes_out_rows=True,
)
CENTRED = Remainder(
    "centred",
    "Clusters stand for what was not selected: exact mean logit, variance to second order.",
    CLUSTERS,
    "diagonal",
    takes_out_rows=True,
)
DIPOLE = Remainder(
    "dipole",
    "Centred, with the covariance of values and keys: d x d numbers per cluster.",
    CLUSTERS,
    "full",
    takes_out_rows=True,
)
COARSE = Remainder(
    "coarse", "Keys that were not selected count by their coarse copies, each for itself.", COARSE_ROWS
)
REMAINDERS: Mapping[str, Remainder] = MappingProxyType(
    {each.name: each for each in (DROPPED, MONOPOLE, CENTRED, DIPOLE, COARSE)}
)
