"""Records: where everything of a sequence lies, in device memory, one row of int64 per sequence and layer.

A launch serves sequences on different contexts of different lengths. So addresses, strides and counts are data, which
kernels read themselves: a captured graph serves whichever sequences were written into the rows last, and nothing waits
for the host. A row of zeros is an idle sequence: it has no keys, and its attention is 0.

Key ids: 0 .. KEYS - 1 are the context's, ids from KEYS on the tail's. Keys [FIRST, END) of the context are searched
and about KEEP of them attended; all others of the context (sinks before FIRST, the recent window from END on) and the
whole tail are attended exactly. FIRST is 0 where a method has no budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

RECORD_FIELDS = 40

KV, KV_HEAD = 0, 1
"""Address of keys and values [H, N, 2, d] of the context; bytes from one KV head to the next. Of rows in two planes the
low one is there, uint8 [H, N, 2, d/2]."""
TAIL, TAIL_HEAD = 2, 3
"""Address of keys and values [H, capacity, 2, d] of the session's own tokens; bytes from one KV head to the next."""
KEYS, FIRST, END, TAIL_KEYS, KEEP = 4, 5, 6, 7, 8
"""Counts, see above. They are the same in all layers, and change from step to step."""
STEP = 9
"""Number of the step in a mailbox shared with the host (`host.mailbox`), from 1 on; 0 where nothing is searched."""
STEP_FIELDS = (KEYS, STEP + 1)

OWN = range(10, 16)
"""What only the kernels of the search read, each in a way of its own; query tables as follows."""
TABLES, TABLE_ROW, CENTROIDS, SCALES = OWN[:4]
"""Query tables [H, S, A] int8, bytes from one row to the next, centroids [H, m, C, d/m] and scales [H, m] float32."""
MEANS, VALUE_MEANS, SIZES, OFFSETS, MEMBERS, ASSIGNMENT, VARIANCES, CLUSTERS = range(16, 24)
UNCLUSTERED = 30
"""Clusters of keys: see `device_clusters.DeviceClusters`; CLUSTERS is their number. Keys before UNCLUSTERED are in
none."""
SLOTS, SLOT_HEAD, TAGS, STAMPS, TALLIES, SETS = range(24, 30)
"""A session's slot cache of the layer (`slot_cache.SlotCache`): address of its rows [H, slots, 2, d], bytes from one KV
head to the next, addresses of tags and stamps [H, slots] int32 and of tallies [H, 8] int64, and its number of sets. All
zero where there is no cache."""
WINDOW = 31
"""How many keys a query sees, its own included; 0 for all; below 0 those of its own chunk, of so many. Unless for all,
the address KV is that of key 0, of which, as of other keys that no query sees any more, no row may be there."""

COARSE_COPY = range(32, 38)
KEY_CODES, VALUE_CODES, KEY_SCALES, KEY_OFFSETS, VALUE_SCALES, VALUE_OFFSETS = COARSE_COPY
"""A coarse copy of the context's keys and values, all of KEYS rows: see `coarse.sizes`. Of rows in two planes it is the
high one, whatever is searched."""
MISSED = 38
"""Address of the slot cache's marks, a bit for every key [H, ceil(KEYS / 32)] int32: see `slot_fetch`."""


class Recorded(Protocol):
    """A sequence that says what its record holds."""

    def fields(self) -> Mapping[int, int]:
        """Values of fields; the others are 0."""


def records_of(sequences: Sequence[Recorded | None], device: torch.device | str) -> Tensor:
    """Records [B, RECORD_FIELDS] int64 on the device; None is an idle row. The sequences must outlive their use."""
    rows = torch.zeros(len(sequences), RECORD_FIELDS, dtype=torch.int64)
    for row, sequence in zip(rows, sequences, strict=True):
        for field, value in ({} if sequence is None else sequence.fields()).items():
            row[field] = value
    return rows.to(device)
