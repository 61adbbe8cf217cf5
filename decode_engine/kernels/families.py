"""Which sizes each family of kernels takes: one table, which launches, captured steps and benchmarks ask.

What does not fit runs on the general path, so refusals are clauses that say why (`Family.refusal`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from index_store.errors import InvalidArgumentError

LARGEST_GROUP = 16
"""Query heads of a KV head: rows of the tensor cores' smallest tile."""
MAX_KEYS = 2**21
"""Of a context that is searched."""


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels that take the same sizes.

    takes: subject and verb of the sentence. head_dims: channels of a head. max_group: query heads of a KV head, from 1
    on. keys: of a context, least and most; None where any number is taken. parts: into how many parts an index divides
    a head, and how many different ones these have: a word, least and most of each. dtypes: of queries.
    """

    takes: str
    head_dims: tuple[int, ...]
    max_group: int
    keys: tuple[int, int] | None = None
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)

    def refusal(
        self, group: int, head_dim: int, keys: int | None = None, parts: tuple[int, int] | None = None
    ) -> str | None:
        """Why kernels cannot do such sizes, as a clause; None when they can. parts: two numbers, as in the table."""
        least, most = self.keys or (0, 0)
        fits = keys is None or self.keys is None or least <= keys <= most
        if not 1 <= group <= self.max_group or head_dim not in self.head_dims or not fits:
            given = "" if keys is None or self.keys is None else f", {keys} keys"
            room = "" if not given else f", and {least if least > 1 else 'up'} to {most} keys"
            return (
                f"group {group}, head dimension {head_dim}{given}; {self.takes} groups of 1 to {self.max_group} and "
                f"dimensions {', '.join(map(str, self.head_dims[:-1]))} and {self.head_dims[-1]}{room}"
            )
        if parts is None:
            return None
        (word, (fewest, many)), (of_word, (of_fewest, of_many)) = self.parts.items()
        number, of_number = parts
        if fewest <= number <= many and not head_dim % number and of_fewest <= of_number <= of_many:
            return None
        return (
            f"{number} {word} of {of_number} {of_word} for head dimension {head_dim}; {self.takes} {fewest} to {many} "
            f"{word} that divide it, of {of_fewest} to {of_many} {of_word}"
        )

    def check(
        self, group: int, head_dim: int, keys: int | None = None, parts: tuple[int, int] | None = None
    ) -> None:
        """Raises InvalidArgumentError for sizes that `refusal` refuses."""
        refusal = self.refusal(group, head_dim, keys, parts)
        if refusal is not None:
            raise InvalidArgumentError(refusal)


ATTENTION = Family("kernels that attend take", (64, 128, 256), LARGEST_GROUP)
KEY_CLUSTERS = Family("the kernels over key clusters take", (64, 128), 8)
QUERY_TABLES = Family(
    "the kernels over query tables take",
    (64, 128),
    8,
    (1, MAX_KEYS),
    MappingProxyType({"subspaces": (2, 32), "centroids": (1, 256)}),
)
COARSE_ROWS = Family("the kernels over coarse rows take", (64, 128, 256), LARGEST_GROUP, (32, MAX_KEYS))
HOST_TABLES = Family("threads on the host search for", (64, 128), 8)

COARSE_SIZES = MappingProxyType(
    {64: (LARGEST_GROUP, (4,)), 128: (LARGEST_GROUP, (2, 3, 4)), 256: (LARGEST_GROUP // 2, (2, 3, 4))}
)
"""Of coarse rows, by head dimension: query heads of a KV head at most, and bits of a channel. Sums are in registers."""
COARSE_GROUPS = 2
"""Groups of channels of a value with a scale each, at most."""


def coarse_refusal(
    group: int, head_dim: int, bits: tuple[int, int], value_groups: int, keys: int
) -> str | None:
    """`COARSE_ROWS.refusal`, and of rows: bits of a channel of keys and of values, groups of a value's channels."""
    refusal = COARSE_ROWS.refusal(group, head_dim, keys)
    if refusal is not None:
        return refusal
    takes, (most, widths) = COARSE_ROWS.takes, COARSE_SIZES[head_dim]
    if group > most:
        return f"group {group}, head dimension {head_dim}; {takes} groups of 1 to {most} of that dimension"
    if not {*bits} <= {*widths}:
        return (
            f"codes of {bits[0]} bits a channel of keys and {bits[1]} of values, head dimension {head_dim}; {takes} "
            f"{', '.join(map(str, widths))} of that dimension"
        )
    if not 1 <= value_groups <= COARSE_GROUPS:
        return f"{value_groups} groups of channels in a value; {takes} 1 to {COARSE_GROUPS}"
    return None
