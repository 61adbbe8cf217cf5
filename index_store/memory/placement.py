"""Where contexts lie while they are served: in memory of the device that computes, or partly in the host's.

Rows that a decode step fetches from host memory stay in slots on the device for the steps after it
(`decode_engine/kernels/slots/`). The slots of a context are part of what it takes of the device's memory from the
beginning, though they are made when its first step comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from index_store.errors import InvalidArgumentError
from index_store.store.description.manifest import Manifest


class Placement(Enum):
    """Which memory holds what of a context.

    DEVICE: everything is in memory of the device that computes; where that is the CPU, in the host's. HYBRID: keys and
    values are in host memory that the device reads in place, and all indexes in memory of the device. HOST: indexes
    that the host's own cores search (`HOST_SEARCHED`) are in host memory, too; others stay in memory of the device.
    Keys and values of layers with a sliding window are in memory of the device wherever the others are.
    """

    DEVICE = "device"
    HYBRID = "hybrid"
    HOST = "host"

    @property
    def kv_on_host(self) -> bool:
        """Whether keys and values are in host memory beside a device."""
        return self is not Placement.DEVICE

    def index_on_host(self, kind: str) -> bool:
        """Whether indexes of that kind are in host memory beside a device."""
        return self is Placement.HOST and kind in HOST_SEARCHED


HOST_SEARCHED = frozenset({"query_tables"})
"""Kinds of indexes that are searched on the host where they are in its memory."""


def parse_placement(text: str) -> Placement | None:
    """The placement of that name, None for `auto`. Raises InvalidArgumentError for anything else."""
    if text == "auto":
        return None
    try:
        return Placement(text)
    except ValueError:
        names = ", ".join(placement.value for placement in Placement)
        raise InvalidArgumentError(
            f"--placement is {text!r}, expected auto, {names}", field="placement"
        ) from None


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Bytes of host memory, and of a device's own memory."""

    host: int = 0
    device: int = 0

    def __add__(self, other: MemoryBytes) -> MemoryBytes:
        return MemoryBytes(self.host + other.host, self.device + other.device)

    @property
    def total(self) -> int:
        """Bytes of both memories."""
        return self.host + self.device

    def fits(self, budget: MemoryBytes) -> bool:
        """Whether there is room for both parts."""
        return self.host <= budget.host and self.device <= budget.device


SLOT_SHARE = 16
"""One row in so many has a slot usually: 6.25 %, more than most methods attend to at a step of one session."""

SET = 16
"""Slots come in sets of so many."""

TAG_BYTES = 8
"""Of a slot, besides the row: which key it holds, and when it was used last."""

COUNT_BYTES = 64
"""Of a layer and KV head: what was found and fetched."""

MARKED = 32
"""Keys of which a word of four bytes says which ones a step misses."""


def slots_per_head(keys: int, share: int = SLOT_SHARE) -> int:
    """Slots of every layer and KV head of a context of so many tokens; at least one set."""
    return -(-keys // (share * SET)) * SET


def slot_bytes(manifest: Manifest, share: int = SLOT_SHARE) -> int:
    """Bytes that the slots of all layers take."""
    model, keys, slot = manifest.model, manifest.token_count, manifest.row_bytes + TAG_BYTES
    per_head = slots_per_head(keys, share) * slot + COUNT_BYTES + -(-keys // MARKED) * 4
    return len(model.full_layers) * model.kv_heads * per_head
