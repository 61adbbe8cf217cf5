"""Keys that a trained model's searches list, step by step, for sessions on one context: recorded, stored, counted.

Searches of a model with random weights list keys that neither its steps nor its sessions have in common. What a trained
one lists says how many rows a step reads from host memory, and can be replayed by a larger model's steps.

Shape legend: S steps, B sessions, R rows (searched layer x KV head) of the recorded model, W listed keys at most, N
keys of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.engine.sampler import Sampler
from decode_engine.engine.sampling.parameters import SamplingParameters
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.model.runner import ModelRunner
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method


@dataclass(frozen=True)
class RecordedLists:
    """What searches listed. ids_SBRW: int32 keys of a context of `tokens`, ascending, -1 behind the last one."""

    ids_SBRW: NDArray[np.int32]
    tokens: int

    def save(self, path: Path) -> None:
        """As differences of neighbours, which compress well."""
        gaps = np.diff(self.ids_SBRW, axis=-1, prepend=np.int32(0))
        with path.open("wb") as file:
            np.savez_compressed(file, gaps_SBRW=gaps, tokens=np.array(self.tokens))

    @classmethod
    def load(cls, path: Path) -> RecordedLists:
        with np.load(path, allow_pickle=False) as stored:
            ids = np.cumsum(stored["gaps_SBRW"], axis=-1, dtype=np.int32)
            return cls(ids, int(stored["tokens"]))


def record_lists(
    runner: ModelRunner,
    context: ResidentContext,
    method: Method,
    prompts: Sequence[Sequence[int]],
    steps: int,
    warm_up: int,
) -> RecordedLists:
    """Lists of sessions with these prompts that sample tokens with temperature 1, each with a seed of its own.

    The steps of the warm-up are not recorded, nor are layers that attend to everything.
    """
    fitted = method.on(context.manifest)
    sessions = [runner.start(context, fitted) for _ in prompts]
    samplers = [Sampler(SamplingParameters(temperature=1.0, seed=seed)) for seed in range(len(prompts))]
    tokens = [
        sampler.sample(runner.forward([session], [list(prompt)])[0][-1])
        for session, sampler, prompt in zip(sessions, samplers, prompts, strict=True)
    ]
    found: list[list[Tensor]] = []
    for step in range(warm_up + steps):
        listed: list[Tensor] = []
        if step >= warm_up:
            found.append(listed)
            for session in sessions:
                _observe(session, listed, context.manifest.token_count)
        logits = runner.forward(sessions, [[token] for token in tokens])
        tokens = [sampler.sample(each[-1]) for sampler, each in zip(samplers, logits, strict=True)]
    # Layers come one after the other, and in each of them the sessions do.
    shape = (steps, len(fitted.searching), len(prompts), context.manifest.model.kv_heads)
    for session in sessions:
        session.close()
    return RecordedLists(
        _padded([row for each in found for row in each], shape), context.manifest.token_count
    )


def _observe(session: Session, listed: list[Tensor], tokens: int) -> None:
    """Appends the lists of each KV head of each layer of the session's next step."""

    def observe(seen: Observation) -> None:
        for head, count in enumerate(seen.selection.counts_HT[:, 0].tolist()):
            ids = seen.selection.ids_HTK[head, 0, :count]
            listed.append(ids[ids < tokens].sort().values.cpu())

    for layer in session.layers:
        if isinstance(layer, SparseLayer):
            layer.observer = observe


def _padded(rows: Sequence[Tensor], shape: tuple[int, int, int, int]) -> NDArray[np.int32]:
    """ids_SBRW of rows by step, layer, session and KV head."""
    width = max(map(len, rows))
    padded = np.full((len(rows), width), -1, dtype=np.int32)
    for place, ids in zip(padded, rows, strict=True):
        place[: len(ids)] = ids
    by_layer = padded.reshape(*shape, width).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(by_layer).reshape(shape[0], shape[2], -1, width)


@dataclass
class Fetched:
    """Rows of all counted steps, over sessions, layers and KV heads. read: over the bus, in vain or not."""

    wanted: int = 0
    union: int = 0
    read: int = 0
    bypassed: int = 0


@dataclass
class SlotsOfRow:
    """Slots of one layer and KV head, the one used longest ago taken first; a device takes them from those of two sets.

    once: a key that several sessions miss in a step is read once, and has one slot. Otherwise each of them reads it,
    into a slot of its own, and only one of these is found again. used_N: last step of a key that is in a slot, 0 for
    others. dead: last steps of slots that are found no more.
    """

    slots: int
    keys: int
    once: bool
    step: int = 0
    used_N: NDArray[np.int64] = field(init=False)
    dead: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.used_N = np.zeros(self.keys, dtype=np.int64)
        self.dead = np.zeros(0, dtype=np.int64)

    def take(self, lists: Sequence[NDArray[np.int32]], counts: Fetched | None) -> None:
        """A step of sessions that want these keys."""
        self.step += 1
        wanted = np.concatenate(lists)
        missing = wanted[self.used_N[wanted] == 0]
        union = np.unique(wanted)
        found = union[self.used_N[union] > 0]
        owners = np.unique(missing)
        claims = len(owners) if self.once else len(missing)
        free = max(0, self.slots - len(found))
        installed = owners[: min(len(owners), free)]
        self.used_N[found] = self.used_N[installed] = self.step
        more = max(0, min(claims, free) - len(owners))
        self.dead = np.concatenate([self.dead, np.full(more, self.step)])
        self._evict()
        if counts is not None:
            # Keys without a slot are read in place, by each session.
            in_place = np.isin(missing, owners[len(installed) :]).sum()
            counts.wanted += len(wanted)
            counts.union += len(union)
            counts.bypassed += int(in_place)
            counts.read += int(len(installed) + in_place if self.once else len(missing))

    def _evict(self) -> None:
        live = np.flatnonzero(self.used_N)
        over = len(live) + len(self.dead) - self.slots
        if over <= 0:
            return
        ages = np.concatenate([self.used_N[live], self.dead])
        gone = np.argsort(ages, kind="stable")[:over]
        self.used_N[live[gone[gone < len(live)]]] = 0
        self.dead = np.delete(self.dead, gone[gone >= len(live)] - len(live))


def count_rows(
    recorded: RecordedLists, sessions: Sequence[int], slots: int, warm_up: int, *, once: bool
) -> Fetched:
    """Rows that steps of some of the recorded sessions on one context read; those of the warm-up are not counted."""
    counts = Fetched()
    for row in range(recorded.ids_SBRW.shape[2]):
        cache = SlotsOfRow(slots, recorded.tokens, once)
        for step, ids_BW in enumerate(recorded.ids_SBRW[:, sessions, row]):
            cache.take([ids[ids >= 0] for ids in ids_BW], counts if step >= warm_up else None)
    return counts
