"""The ways in which tokens may come to stand behind a stored text, all of which have to be answered alike."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from decode_engine.layers.session import Session
from decode_engine.model.continuing import Ground, SessionKeeper
from decode_engine.model.runner import ModelRunner
from decode_engine.orders.order import KeepOptions
from index_store.cli.console import LineReporter
from index_store.memory.arena import Arena
from index_store.memory.placement import MemoryBytes
from index_store.methods.presets import METHODS
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store
from index_store.store.clean_up import StoreRoom
from index_store.store.description.manifest import Manifest
from prefill_worker.build.stages import Clock
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.children import ChildJob, carry_out_child, make_whole
from prefill_worker.jobs.document_layers import DEFAULT_MEANS
from prefill_worker.jobs.job import carry_out
from prefill_worker.jobs.prepared_job import PreparedJob, job_over_tokens

QUIET = LineReporter(io.StringIO())


@dataclass(frozen=True)
class Served:
    """A model, and a store with a text that it has read, for full attention."""

    runner: ModelRunner
    config: PrefillConfig
    store: Store
    manifest: Manifest
    text: Sequence[int]

    def job(self, token_ids: Sequence[int]) -> PreparedJob:
        """A prefill of these tokens."""
        return job_over_tokens(self.config, resolve_model(self.config.model), list(token_ids), "text")

    @contextmanager
    def session(self, named: Manifest) -> Iterator[tuple[Session, Callable[..., Manifest]]]:
        """A session on a context, and what keeps it with tokens that it has read: the child that it becomes."""
        ground = Ground.of(self.store, named)
        device = self.runner.device
        arena = Arena(2**32) if device.type == "cpu" else Arena(MemoryBytes(2**32, 2**32), device=device)
        with arena.acquire(self.store, ground.base.id) as resident:
            fitted, own = METHODS["full"].on(ground.base), ground.read(self.store)
            session = self.runner.start(resident, fitted)
            session.marks = True
            if own is not None:
                count = len(own.token_ids) // 2
                self.runner.restore(session, [rows[:, :count] for rows in own.rows])
                self.runner.restore(session, [rows[:, count:] for rows in own.rows], own.state)

            def keep(ended: Session, prompt: Sequence[int], answer: Sequence[int] = ()) -> Manifest:
                room = StoreRoom(self.store)
                keeper = SessionKeeper(
                    self.store, self.runner, ground, fitted, resident, own, prompt, KeepOptions(), room
                )
                return self.store.manifest(keeper.take(ended, answer)())

            yield session, keep

    def answer(self, session: Session, pieces: Sequence[Sequence[int]], count: int) -> list[int]:
        """Greedy tokens behind a prompt that is read in pieces."""
        for piece in pieces:
            logits = self.runner.read([session], [piece])[0]
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.runner.forward([session], [tokens[-1:]])[0][-1].argmax()))
        return tokens


@contextmanager
def served(
    folder: Path, store: Path, text: Sequence[int], chunk: int = 512, runner: ModelRunner | None = None
) -> Iterator[Served]:
    """A model of a folder, and a store in which it has read the text, in chunks."""
    runner = runner or ModelRunner(resolve_model(str(folder)))
    config = PrefillConfig(
        model=str(folder),
        store=store,
        input=(Path("-"),),
        method=("full",),
        chunk=chunk,
        device=runner.device.type,
    )
    made = Served(runner, config, Store(store, create=True), runner.no_context.manifest, text)
    manifest = carry_out(made.job(text), QUIET, Clock()).manifest
    yield replace(made, manifest=manifest)


def whole(own: Served, prompt: Sequence[int], count: int) -> list[int]:
    """The prompt is read at once."""
    with own.session(own.manifest) as (session, _):
        return own.answer(session, [prompt], count)


def pieces(own: Served, prompt: Sequence[int], count: int) -> list[int]:
    """The prompt is read in pieces, the first and the last of one token."""
    with own.session(own.manifest) as (session, _):
        return own.answer(session, [prompt[:1], prompt[1:-1], prompt[-1:]], count)


def beside(own: Served, prompt: Sequence[int], count: int) -> list[int]:
    """Beside two other sessions: prompts are read in one call, and every step is one for all of them."""
    with own.session(own.manifest) as (session, _), own.session(own.manifest) as (other, _):
        sessions, prompts = [other, session, other.fork()], [prompt[:3], prompt, prompt[::-1]]
        tokens = [[int(each[-1].argmax())] for each in own.runner.read(sessions, prompts)]
        while len(tokens[1]) < count:
            found = own.runner.forward(sessions, [answer[-1:] for answer in tokens])
            for answer, logits in zip(tokens, found, strict=True):
                answer.append(int(logits[-1].argmax()))
        return tokens[1]


def forked(own: Served, prompt: Sequence[int], count: int) -> list[int]:
    """By a second answer, which begins where the prompt ends, after the first has gone on."""
    with own.session(own.manifest) as (session, _):
        own.runner.read([session], [prompt[:-1]])
        other = session.fork()
        own.answer(session, [prompt[::-1]], 3)
        return own.answer(other, [prompt[-1:]], count)


def child(own: Served, prompt: Sequence[int], count: int) -> list[int]:
    """On a child that a worker makes, to which half of the prompt belongs."""
    with own.session(_child(own, prompt[: len(prompt) // 2])) as (session, _):
        return own.answer(session, [prompt[len(prompt) // 2 :]], count)


def kept(own: Served, prompt: Sequence[int], count: int) -> list[int]:
    """On a session that was kept, which was on a child itself, and had read more than is kept of it."""
    third = max(1, len(prompt) // 3)
    with own.session(_child(own, prompt[:third])) as (session, keep):
        own.runner.read([session], [prompt[third : 2 * third - 1]])
        for token in (prompt[2 * third - 1], 99, 98):
            own.runner.forward([session], [[token]])
        kept = keep(session, prompt[third : 2 * third - 1], prompt[2 * third - 1 : 2 * third])
    with own.session(kept) as (session, _):
        return own.answer(session, [prompt[2 * third :]], count)


def detached(own: Served, prompt: Sequence[int], count: int) -> list[int]:
    """On a child that was made whole."""
    made = _child(own, prompt[:2])
    alone = make_whole(own.store, made, own.runner.device, Clock(), QUIET).manifest
    with own.session(alone) as (session, _):
        return own.answer(session, [prompt[2:]], count)


def _child(own: Served, behind: Sequence[int]) -> Manifest:
    job = ChildJob(own.job([*own.text, *behind]), own.manifest)
    return carry_out_child(job, QUIET, Clock(), DEFAULT_MEANS).manifest


WAYS: Mapping[str, Callable[[Served, Sequence[int], int], list[int]]] = {
    way.__name__: way for way in (whole, pieces, beside, forked, child, kept, detached)
}
