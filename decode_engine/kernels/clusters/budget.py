"""What clusters count against a budget: those of their keys that are searched.

Clusters are of all keys of a context. While a session is near the context's end, its recent window covers the last of
them; they are attended anyway and must not use up what is meant for others. Each program then counts for itself, before
it waits for the launch before. Once the window has left the context, nothing is counted, copied or read twice.

Shape legend: C clusters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.record_fields import (
    ASSIGNMENT,
    END,
    FIRST,
    KEYS,
    UNCLUSTERED,
    field,
    searched_keys,
)


@triton.jit
def any_outside(records_ptr: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Whether a sequence's clusters hold keys that are not searched: recent ones, or sinks that are not left out."""
    before = field(records_ptr, b, FIRST) > field(records_ptr, b, UNCLUSTERED)
    return before | (field(records_ptr, b, END) < field(records_ptr, b, KEYS))


@triton.jit
def count_searched(
    records_ptr: tl.tensor,
    b: tl.tensor,
    head: tl.tensor,
    sizes_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    clusters: tl.tensor,
    AT_ONCE: tl.constexpr,
) -> None:
    """Writes how many keys of each of a row's clusters [C] are searched; sizes are of all of them."""
    for start in range(0, clusters, 8 * AT_ONCE):
        at = start + tl.arange(0, 8 * AT_ONCE)
        sizes = tl.load(sizes_ptr + at, mask=at < clusters, other=0)
        tl.store(counts_ptr + at, sizes, mask=at < clusters)
    tl.debug_barrier()
    keys = field(records_ptr, b, KEYS)
    assignment_ptr = field(records_ptr, b, ASSIGNMENT).to(tl.pointer_type(tl.int32)) + head * keys
    unclustered = field(records_ptr, b, UNCLUSTERED).to(tl.int32)
    first, end = searched_keys(records_ptr, b)
    count_off(assignment_ptr, counts_ptr, unclustered, first, AT_ONCE)
    count_off(assignment_ptr, counts_ptr, end, keys.to(tl.int32), AT_ONCE)
    tl.debug_barrier()


@triton.jit
def count_off(
    assignment_ptr: tl.tensor, counts_ptr: tl.tensor, begin: tl.tensor, end: tl.tensor, AT_ONCE: tl.constexpr
) -> None:
    """Takes keys begin..end-1 off the counts of their clusters."""
    for start in range(begin, end, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        cluster = tl.load(assignment_ptr + at, mask=at < end, other=-1)
        tl.atomic_add(
            counts_ptr + cluster, tl.full([AT_ONCE], -1, tl.int32), mask=cluster >= 0, sem="relaxed"
        )
