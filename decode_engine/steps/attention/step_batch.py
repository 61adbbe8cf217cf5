"""The sessions of one batch of decode steps, as the device sees them: records per layer and row.

Shape legend: L layers, B rows, H KV heads, G query heads per KV head, d head dim, F fields of a record.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.shared_attention import Seat, write_tails
from decode_engine.kernels.state_rows import StateChunks, copy_states
from decode_engine.layers.session import Session
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.selections import coarse_fields
from decode_engine.steps.attention.step_attention import StepAttention, StepPlan
from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.two_planes import TwoPlanes
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.models.state_cache import StateCache, state_parts
from index_store.selection.budgets import Ratio, TokenCount
from index_store.store.description.dtypes import dtype_name
from index_store.store.description.manifest import HIGH_PLANE

logger = logging.getLogger(__name__)

_FIRST_STEP_FIELD, _END_STEP_FIELD = records.STEP_FIELDS
STEP_COUNTS = _END_STEP_FIELD - _FIRST_STEP_FIELD


_EARLY = 64
"""Tokens before the end of its room from which on a tail may grow."""

_EARLY_GROWTHS = 2
"""Sessions whose tails grow in a step, of those that need not yet: each takes about a millisecond of the host."""


class _Counts(NamedTuple):
    """Counts of a row's steps, and the first position for which they hold and the first for which they do not."""

    values_C: NDArray[np.int64]
    since: int
    until: int


_NO_COUNTS = _Counts(np.zeros(STEP_COUNTS, dtype=np.int64), 0, 0)


class StepBatch:
    """Up to `plan.size` sessions, each in a row of its own, and the attention of every layer.

    A session with drafts has several rows, one for each token that it is fed: `numbers` says which. They share its
    tail, which gets all of these tokens before any of them attends; each sees the tail up to its own.

    Records change in two ways. `place` and `clear` write a row's addresses on the host; `send` copies what changed to
    the device. `refresh` runs on the device, in every step: it puts the step's counts into the records of all layers.
    """

    def __init__(self, plan: StepPlan, layers: Sequence[type[StepAttention]]) -> None:
        """layers: the attention of each layer; layers of one type share an object and its buffers."""
        self.plan = plan
        shared = {kind: kind(plan) for kind in dict.fromkeys(layers)}
        self.attentions: Sequence[StepAttention] = list(shared.values())
        """One for each kind of layer."""
        self._searching = [each for each in self.attentions if isinstance(each, ListedSteps)]
        self._layers = [shared[kind] for kind in layers]
        shape = (len(layers), plan.size, records.RECORD_FIELDS)
        self._host_LBF = np.zeros(shape, dtype=np.int64)
        self._records_LBF = torch.zeros(shape, dtype=torch.int64, device=plan.device)
        self._changed = False
        states = plan.model.states
        self._chunks = None if states is None else StateChunks.of(states, plan.dtype, plan.device)
        self.cache: StateCache | None = None
        """Of the rows' states, within a step of a model that has some."""
        self.calls: Iterator[int] = itertools.count()
        """Numbers calls of attention in a pass."""
        self.sessions: list[Session | None] = [None] * plan.size
        self.numbers = [0] * plan.size
        self.seatings = 0
        """Changes whenever a row gets another session."""
        self._tails = [(0, 0)] * plan.size
        self._counts = [_NO_COUNTS] * plan.size
        self._arranged: tuple[int, bool, Sequence[tuple[int, int]]] = (-1, False, ())

    def seat(self, sessions: Sequence[Session]) -> list[int | Exception]:
        """Rows of the sessions: those that sit keep their row, others leave, new ones take free rows.

        A session that comes several times is fed as many tokens, one after the other. One that there is no memory for,
        or that cannot be placed, gets the error instead; that is not the others' fault.
        """
        seated = {
            (id(session), number): row
            for row, (session, number) in enumerate(zip(self.sessions, self.numbers, strict=True))
            if session is not None
        }
        times: Counter[int] = Counter()
        wanted = []
        for session in sessions:
            wanted.append((id(session), times[id(session)]))
            times[id(session)] += 1
        # Rows for more tokens than a session has now stay, as far as there is room: the next step may want them.
        for left in [key for key in seated if key[0] not in times]:
            self.clear(seated.pop(left))
        spare = [row for key, row in seated.items() if key[1] >= times[key[0]]]
        free = [row for row, session in enumerate(self.sessions) if session is None]
        unused = iter([*free, *reversed(spare)])
        seats: list[int | Exception] = []
        for session, key in zip(sessions, wanted, strict=True):
            row = seated[key] if key in seated else next(unused)
            try:
                session.reserve_tail(key[1])
                if key not in seated:
                    self.place(row, session, key[1])
                self.counts(row)
            except Exception as error:
                logger.exception("a session of method %s has no place in a batch", session.method.name)
                self.clear(row)
                seats.append(error)
            else:
                seats.append(row)
        return seats

    def place(self, row: int, session: Session, number: int = 0) -> None:
        """Puts a session into a row, for its token of that number in a step.

        Its tails must have room up to that token (`Session.reserve_tail`). When it raises, the row is idle; what has
        states must have begun.
        """
        context, method = session.context, session.method
        if context.manifest.token_count > self.plan.max_keys:
            raise InvalidArgumentError(
                f"a context of {context.manifest.token_count} tokens in a batch of up to {self.plan.max_keys}"
            )
        if session.states is not None:
            session.states.addresses(0)  # which raises where a step has nothing to read
        self.clear(row)
        seated = next((other for other, sitting in enumerate(self.sessions) if sitting is session), None)
        self.sessions[row], self.numbers[row] = session, number
        self.seatings += 1
        if seated is not None:
            self._host_LBF[:, row] = self._host_LBF[:, seated]
            self._tails[row] = self._tails[seated]
            return
        try:
            for layer, attention in enumerate(self._layers):
                values = self._host_LBF[layer, row]
                own = attention.fields(context, method, layer)
                for field, value in {**row_fields(context, layer), **own}.items():
                    values[field] = value
        except Exception:
            self.clear(row)
            raise
        self._point_to_tail(row, session)

    def clear(self, row: int) -> None:
        """Makes a row idle."""
        self._host_LBF[:, row] = 0
        self.sessions[row], self.numbers[row] = None, 0
        self.seatings += 1
        self._tails[row] = (0, 0)
        self._counts[row] = _NO_COUNTS
        self._changed = True

    def counts(self, row: int, ahead: int = 0) -> NDArray[np.int64]:
        """What a row's next step has in the records of all layers, [STEP_COUNTS], but for TAIL_KEYS and STEP.

        ahead: see `step_counts`. The same array as long as it holds. Raises InvalidArgumentError for an idle row,
        OverflowError for a session whose counts no record can hold.
        """
        session, known = self.sessions[row], self._counts[row]
        if session is None:
            raise InvalidArgumentError(f"row {row} of a batch holds no session")
        ahead += self.numbers[row]
        position = session.position + ahead
        if not known.since <= position < known.until:
            counts = step_counts(session, ahead)
            values = [counts[field] for field in range(*records.STEP_FIELDS)]
            known = _Counts(np.array(values, dtype=np.int64), position, counts_hold_until(session, ahead))
            self._counts[row] = known
        return known.values_C

    def follow_tails(self) -> None:
        """Notices tails that moved because they grew."""
        for row, session in enumerate(self.sessions):
            if session is not None and session.tail_capacities() != self._tails[row]:
                self._point_to_tail(row, session)

    def _point_to_tail(self, row: int, session: Session) -> None:
        self._tails[row] = session.tail_capacities()
        for layer, attention in enumerate(session.layers):
            self._host_LBF[layer, row, records.TAIL] = attention.tail.address
            self._host_LBF[layer, row, records.TAIL_HEAD] = attention.tail.head_bytes
        self._changed = True

    def can_follow(self, rows: Sequence[int]) -> bool:
        """Whether the step after the next one of these rows may be launched while that is in flight: tails have room.

        Tails that have none grow now, and of those that soon have none a few: all at once would hold streams up. The
        device copies them behind the step that is in flight.
        """
        sessions = [session for row in rows if (session := self.sessions[row]) is not None]
        early = [session for session in sessions if 1 < session.room <= _EARLY][:_EARLY_GROWTHS]
        try:
            for session in sessions:
                session.reserve_tail(_EARLY if session in early else 1, self.plan.queue.do)
        except torch.OutOfMemoryError:
            return False  # who makes room tells whose session fails
        return len(sessions) == len(rows)

    def begin(self, rows: Sequence[int], steady: bool = False, ahead: int = 0) -> int:
        """Makes ready for a step of these rows, on its stream before it is launched; what their records get as STEP.

        steady: see `StepAttention.arrange`. ahead: see `step_counts`.
        """
        sessions = {row: session for row in rows if (session := self.sessions[row]) is not None}
        self._arrange(sessions, steady, ahead)
        try:
            return max((each.selection.begin(sessions) for each in self._searching), default=0)
        except Exception:
            self.end()
            raise

    def _arrange(self, sessions: Mapping[int, Session], steady: bool, ahead: int) -> None:
        """Tells who shares a context where that, or the magnitude of a tail, has changed."""
        tails = [
            (row, (session.tail_keys + ahead + self.numbers[row]).bit_length())
            for row, session in sessions.items()
        ]
        arranged = (self.seatings, steady, tails)
        if arranged == self._arranged:
            return
        seats = [
            Seat(
                row,
                int(self._host_LBF[0, row, records.KV]),
                session.context.manifest.token_count,
                1 << magnitude,
            )
            for (row, session), (_, magnitude) in zip(sessions.items(), tails, strict=True)
        ]
        for attention in self.attentions:
            attention.arrange(seats, steady)
        self._arranged = arranged

    def end(self) -> int:
        """Ends the step: see `KeySelection.end`."""
        return sum(each.selection.end() for each in self._searching)

    def send(self) -> None:
        """Copies changed addresses to the device, in stream order."""
        if self._changed:
            self.plan.queue.send(torch.from_numpy(self._host_LBF), self._records_LBF)
            self._changed = False

    def refresh(self, counts_BC: Tensor) -> None:
        """Puts the counts of every row, [B, STEP_COUNTS] int64, into all layers' records; on the device."""
        self._records_LBF[:, :, _FIRST_STEP_FIELD:_END_STEP_FIELD] = counts_BC

    @contextmanager
    def states(self, addresses_B2: Tensor) -> Iterator[None]:
        """Has `cache` for the model's layers, from where the rows' states are to where the next step reads them.

        addresses_B2: see `TextStates.addresses`. What it takes comes from the memory that graphs share.
        """
        model, plan = self.plan.model.states, self.plan
        if model is None or self._chunks is None:
            yield
            return
        nbytes = plan.size * model.nbytes(dtype_name(plan.dtype))
        block = torch.empty(nbytes, dtype=torch.uint8, device=plan.device)
        copy_states(addresses_B2[:, 0], block, self._chunks, back=False)
        self.cache = cache = StateCache.holding(model, state_parts(model, block, plan.dtype, plan.size))
        try:
            yield
        finally:
            self.cache = None
        cache.settle()
        copy_states(addresses_B2[:, 1], block, self._chunks, back=True)

    def attend(self, layer: int, q_BQ1D: Tensor, k_BH1D: Tensor, v_BH1D: Tensor) -> Tensor:
        """Adds the newest tokens' keys and values to the tails and attends: out [B, 1, Q, d], of Q = H * G heads.

        Kernels only. The result may be a buffer that the next layer's call writes again.
        """
        rows, query_heads, _, head_dim = q_BQ1D.shape
        heads, records_BF = k_BH1D.shape[1], self._records_LBF[layer]
        q_BHGD = q_BQ1D.reshape(rows, heads, query_heads // heads, head_dim).contiguous()
        write_tails(k_BH1D[:, :, 0], v_BH1D[:, :, 0], records_BF)
        return self._layers[layer].attend(layer, q_BHGD, records_BF).reshape(rows, 1, query_heads, head_dim)

    def kept_B(self) -> Tensor:
        """Selected keys that the step attended, over all layers and KV heads; on the device."""
        total = self.attentions[0].kept_B()
        for attention in self.attentions[1:]:
            total = total + attention.kept_B()
        return total

    def fetched_B2(self) -> Tensor | None:
        """See `RowsInPlace.found_B2`, over all layers; on the device."""
        found = [fetched for each in self._searching if (fetched := each.rows.found_B2()) is not None]
        return sum(found[1:], start=found[0]) if found else None


def row_fields(context: ResidentContext, layer: int) -> Mapping[int, int]:
    """What a layer's record says about the context's exact rows; their high plane is a coarse copy."""
    stored, planes = context.stored_rows(layer), isinstance(context.rows(layer), TwoPlanes)
    fields = {records.KV: stored.data_ptr(), records.KV_HEAD: stored.stride(0) * stored.element_size()}
    return {**(coarse_fields(context, HIGH_PLANE, layer) if planes else {}), **fields}


def step_counts(session: Session, ahead: int = 0) -> Mapping[int, int]:
    """The fields that a session's next step has in the records of all layers.

    ahead: steps before that one whose tokens the session has not taken yet. The searched range ends where it does on a
    CPU (`layers.sparse_layer`), but for the session's own tokens, which are all attended exactly.
    """
    method, keys = session.method, session.context.manifest.token_count
    counts = {records.KEYS: keys, records.TAIL_KEYS: session.tail_keys + ahead + 1, records.STEP: 0}
    if not session.fitted.searching:
        return counts | {records.FIRST: 0, records.END: 0, records.KEEP: 0}
    first, end = method.searched_range(session.position + ahead, keys)
    keep = kept_count(method, end + method.recent)
    return counts | {records.FIRST: first, records.END: min(end, keys), records.KEEP: keep}


def counts_hold_until(session: Session, ahead: int = 0) -> int:
    """The first later position whose `step_counts` differ from those of now in more than TAIL_KEYS, perhaps."""
    method, position = session.method, session.position + ahead
    if not session.fitted.searching:
        return sys.maxsize
    return position + method.append_block - (position - method.recent) % method.append_block


def kept_count(method: Method, length: int) -> int:
    """How many of so many keys the method's budget keeps. Raises InvalidArgumentError for one that looks at weights."""
    budget = method.budget
    if isinstance(budget, Ratio):
        return min(budget.count(length), length)
    if isinstance(budget, TokenCount):
        return min(budget.tokens, length)
    raise InvalidArgumentError(f"method {method.name!r} has a budget that no record can hold")
