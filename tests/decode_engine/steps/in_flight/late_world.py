"""A device that does its work late, at random, and a model on it.

The model tells the next token by all that a step reads of a session: the tokens in its tail, where the records say that
it lies, its position, and the counts of its search. The device notes as a fault what a step reads or writes of a
session that is closed, or of a tail that has moved.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.shared_attention import HEADER
from decode_engine.kernels.device_queue import DeviceQueue
from decode_engine.layers.session import Session
from decode_engine.steps.attention.listed_steps import DenseSteps
from decode_engine.steps.attention.step_batch import StepBatch
from decode_engine.steps.stepper import Stepper
from index_store.indexes.interface.layer_index import Do, do_now
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod
from tests.support.tiny_model import IDENTITY as TINY

CPU = torch.device("cpu")
VOCABULARY = 120
BROKEN = 119
"""After this token there are no finite logits."""
IDENTITY = replace(TINY, layers=2, query_heads=2, kv_heads=1, head_dim=64, vocab_size=VOCABULARY)
ROW_BYTES = 2 * IDENTITY.head_dim * 4


class LateDevice(DeviceQueue):
    """Does what it is given in order, but some of it only when that is waited for."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._pending: deque[Callable[[], object]] = deque()
        self._given = self._done = 0
        self.faults: list[str] = []

    def do(self, work: Callable[[], object]) -> None:
        self._pending.append(work)
        self._given += 1
        while self._pending and self._generator.random() < 0.4:
            self._next()

    def mark(self, device: torch.device) -> Callable[[], None]:
        number = self._given

        def wait() -> None:
            while self._done < number:
                self._next()

        return wait

    def _next(self) -> None:
        self._pending.popleft()()
        self._done += 1


class WatchedSession(Session):
    """Keeps its tails' memory when it is closed, so that a late step finds nobody else's there.

    moving: where tails were that are to be copied yet, with their capacity.
    """

    open: list[WatchedSession]
    kept: list[Tensor]
    moving: dict[int, int]

    def reserve_tail(self, ahead: int = 0, do: Do = do_now) -> None:
        buffers = [layer.tail.buffer for layer in self.layers]  # alike, so all move in one go

        def do_and_note(work: Callable[[], object]) -> None:
            self.moving |= {buffer.data_ptr(): buffer.shape[1] for buffer in buffers}
            self.kept += buffers

            def move() -> None:
                work()
                for buffer in buffers:
                    del self.moving[buffer.data_ptr()]

            do(move)

        super().reserve_tail(ahead, do_and_note)

    def close(self) -> None:
        self.open.remove(self)
        self.kept += [layer.tail.buffer for layer in self.layers]
        super().close()


def told_logits(keys: int, tokens: Sequence[int], told: Sequence[int]) -> Tensor:
    """Logits [V] after these tokens: as good as random."""
    number = 7
    for each in (keys, *tokens, *told):
        number = (number * 1000003 + each + 1) % (2**61 - 1)
    generator = torch.Generator().manual_seed(number)
    return torch.randn(VOCABULARY, generator=generator) * (torch.nan if tokens[-1] == BROKEN else 3.0)


@dataclass
class World:
    """A device, its model, and what the engine needs of both."""

    device: LateDevice | None
    open: list[WatchedSession] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    moving: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stepper = Stepper(self.model, IDENTITY, torch.float32, CPU, queue=self.device)
        self.launch = self.stepper.launch

    def start(self, context: ResidentContext, fitted: FittedMethod) -> WatchedSession:
        session = WatchedSession(context, fitted)
        session.open, session.kept, session.moving = self.open, self.kept, self.moving
        self.open.append(session)
        return session

    def fork(self, session: WatchedSession) -> WatchedSession:
        """As `Session.fork`, watched, too."""
        other = self.start(session.context, session.fitted)
        for layer, from_layer in zip(other.layers, session.layers, strict=True):
            layer.adopt(from_layer)  # type: ignore[arg-type]
        other.position = session.position
        return other

    def read(
        self,
        sessions: Sequence[Session],
        token_ids: Sequence[Sequence[int]],
        *,
        all_logits: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Reads prompts, at once; others may step as if in the middle of that."""
        for _ in range(IDENTITY.layers):
            between()
        found = []
        for session, ids in zip(sessions, token_ids, strict=True):
            rows = torch.zeros(1, len(ids), 2, IDENTITY.head_dim)
            rows[0, :, 0, 0] = torch.tensor(ids)
            session.restore([rows] * IDENTITY.layers)
            tail = session.layers[0].tail.rows[0, :, 0, 0].int().tolist()
            found.append(told_logits(session.context.manifest.token_count, tail, ())[None])
        return found

    def model(self, tokens_B1: Tensor, positions_B1: Tensor, batch: StepBatch) -> Tensor:
        """A step of the device, whenever that comes to it."""
        logits_BV = torch.zeros(len(tokens_B1), VOCABULARY)
        used = []
        for row, record in enumerate(batch._records_LBF[0].tolist()):
            count = record[records.TAIL_KEYS]
            if count:
                used.append(row)
                told = [record[each] for each in (records.FIRST, records.END, records.KEEP)]
                self._write_tails(batch._records_LBF[:, row], count, int(tokens_B1[row]))
                if int(positions_B1[row]) != record[records.KEYS] + count - 1:
                    self._fault(f"position {int(positions_B1[row])} with {count} tokens in the tail")
                logits_BV[row] = told_logits(record[records.KEYS], self._tail(record, count), told)
        for attention in batch.attentions:
            if isinstance(attention, DenseSteps):
                order = attention._groups.table[HEADER : HEADER + len(used)].tolist()
                if sorted(order) != used:
                    self._fault(f"rows {order} in the table, {used} in the step")
        return logits_BV

    def _write_tails(self, records_LF: Tensor, count: int, token: int) -> None:
        for layer, record in enumerate(records_LF.tolist()):
            place = record[records.TAIL]
            tails = [each.layers[layer].tail for each in self.open]
            owned = [tail.capacity for tail in tails if tail.buffer.data_ptr() == place]
            owned += [self.moving[place]] if place in self.moving else []
            if not owned or owned[0] < count:  # one that moves just now is found twice
                self._fault(f"row {count} of a tail that nobody has")
            ctypes.c_float.from_address(record[records.TAIL] + (count - 1) * ROW_BYTES).value = token

    def _tail(self, record: Sequence[int], count: int) -> list[int]:
        first = record[records.TAIL]
        return [int(ctypes.c_float.from_address(first + row * ROW_BYTES).value) for row in range(count)]

    def _fault(self, text: str) -> None:
        if self.device is not None:
            self.device.faults.append(text)
