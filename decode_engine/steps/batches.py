"""How sessions that step at the same time are divided into batches, and what their steps touched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import compress

from decode_engine.layers.session import Session
from decode_engine.steps.batch_kinds import BatchKind
from decode_engine.steps.step_graph import Stepped

MAX_ROWS = 64
FIXED_ROWS = 16
"""Rows of every graph that a session with a repeatable sampler steps in: products round otherwise with other numbers
of rows, but alike in all rows of one number."""


@dataclass(frozen=True, slots=True)
class Part:
    """Sessions that step in one graph of so many rows.

    numbers: of theirs among the caller's. part, lane: see `Stepper.graph`.
    """

    kind: BatchKind
    numbers: Sequence[int]
    sessions: Sequence[Session]
    rows: int
    max_keys: int
    part: int
    lane: int


def divide(
    sessions: Sequence[Session],
    repeatable: Sequence[bool],
    kinds: Sequence[BatchKind],
    lanes_of: Callable[[BatchKind], int],
) -> list[list[Part]]:
    """Batches of up to MAX_ROWS sessions of a kind, each by lane: parts as equal as can be.

    A graph for repeatable sessions is always of FIXED_ROWS rows and as long as these need for themselves; its other
    rows are for those that need as much. lanes_of: how many lanes a batch of that kind is split into.
    """
    fixed = {(kind.key, kind.max_keys) for kind in compress(kinds, repeatable)}
    groups: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike = (kind.key, kind.max_keys)
        groups.setdefault(alike if alike in fixed else kind.key, []).append(number)
    batches = []
    for shared, numbers in groups.items():
        kind = kinds[numbers[0]]
        lanes = lanes_of(kind)
        most = min(MAX_ROWS, FIXED_ROWS * lanes) if shared in fixed else MAX_ROWS
        for first in range(0, len(numbers), most):
            batch = numbers[first : first + most]
            share = -(-len(batch) // lanes)
            own = [batch[begin : begin + share] for begin in range(0, len(batch), share)]
            batches.append(
                [
                    Part(
                        kind,
                        some,
                        [sessions[i] for i in some],
                        FIXED_ROWS if shared in fixed else batch_size(len(some)),
                        max(kinds[i].max_keys for i in some),
                        first // most,
                        lane,
                    )
                    for lane, some in enumerate(own)
                ]
            )
    return batches


def batch_size(count: int) -> int:
    """Rows of a batch for so many sessions."""
    return 1 << (count - 1).bit_length()


def count_touched(session: Session, kind: BatchKind, stepped: Stepped) -> None:
    """Notes what the step touched in all layers."""
    manifest, available, figures = session.context.manifest, session.position + 1, session.figures
    model, searching = manifest.model, kind.searching
    heads, dense = model.kv_heads, len(model.full_layers) - searching
    figures.count_dense(heads * available * dense)
    if model.window is not None:
        seen = min(available, model.window.size)
        figures.count_dense(model.window.kv_heads * seen * len(model.window.layers))
    if kind.row_bytes:
        rows = stepped.host_rows + dense * heads * manifest.token_count
        figures.host_bytes_read += rows * kind.row_bytes
        figures.rows_reused += stepped.rows_reused
        figures.device_wait_for_host_ns += stepped.waited_ns
    if searching:
        exact = available - stepped.searched
        figures.count_exact(heads * searching * exact, heads * searching * available)
        figures.count_kept(stepped.kept)
        figures.searches += searching if stepped.searched else 0
