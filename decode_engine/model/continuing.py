"""Sessions on contexts that continue another one, and sessions that become such contexts when they end.

A session on a child is one on its parent, whose tail begins with the child's own rows. So every method, placement and
captured step works on it as on any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from decode_engine.engine.drafting import Drafter
from decode_engine.engine.requests import Work
from decode_engine.errors import InternalError
from decode_engine.layers.session import Session, Watch
from decode_engine.model.runner import ModelRunner
from decode_engine.orders.order import KeepOptions
from decode_engine.settings.command_options import Prompts
from index_store.family.children import (
    Continuation,
    OwnRows,
    attention_of,
    joined,
    publish_child,
    read_own_rows,
)
from index_store.family.parents import EXACT, parent_of
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod
from index_store.methods.presets import get_method
from index_store.store.catalog import Store, free_name, require_free, take_name, told_apart, utc_now
from index_store.store.clean_up import StoreRoom, note_use
from index_store.store.description.manifest import Manifest

FULL = get_method("full")


@dataclass(frozen=True, slots=True)
class Ground:
    """What a request stands on. named: the context that it names. base: what is searched, the parent of a child."""

    named: Manifest
    base: Manifest

    @classmethod
    def of(cls, store: Store, named: Manifest) -> Ground:
        """Raises ParentMissingError, and what `Store.manifest` raises."""
        return cls(named, parent_of(store, named) or named)

    @property
    def own_tokens(self) -> int:
        """Tokens of a child that its parent has not; 0 of other contexts."""
        return self.named.token_count - self.base.token_count

    @property
    def own_bytes(self) -> int:
        """What they take in host memory until the session has them."""
        return self.named.kv_bytes if self.own_tokens else 0

    def read(self, store: Store) -> OwnRows | None:
        """What a child has of its own; None of other contexts. Raises as `read_own_rows` does."""
        if not self.own_tokens:
            return None
        note_use(store, self.named.id)
        return read_own_rows(store, self.named)


@dataclass(kw_only=True, eq=False)
class SessionWork(Work[Session]):
    """An order on a stored context, or on none. resident: what is searched; own: rows that the session begins with.

    again: 1 where the prompt begins with the context's last token, which is read for what follows it. waiting: see
    `ModelRunner.start`. keeper: makes a child of the session. watch: see `Session`. audited: whether the first answer's
    steps are compared with full attention, of no child. release: gives the context's lease back.
    """

    runner: ModelRunner
    fitted: FittedMethod
    resident: ResidentContext
    own: OwnRows | None
    again: int
    waiting: Callable[[], None]
    keeper: SessionKeeper | None
    watch: Watch | None
    release: Callable[[], None]
    audited: bool = False

    @property
    def loading(self) -> bool:
        """Whether the context is still being loaded."""
        return self.resident.gate.loading

    def start(self) -> Session:
        session = self.runner.start(self.resident, self.fitted, self.waiting, self.again, self.watch)
        session.marks = self.keeper is not None
        if self.audited:
            shadow = self.runner.start(self.resident, FULL.on(self.resident.manifest), again=self.again)
            session.begin_audit(shadow, self.prompt)
        return session

    def restore(self, session: Session, start: int, end: int) -> None:
        if self.own is not None:
            state = self.own.state if end == len(self.own.token_ids) else None
            self.runner.restore(session, [rows[:, start:end] for rows in self.own.rows], state)

    def drafter(self) -> Drafter | None:
        """For a method that drafts: from the context's text, and from what stands behind it.

        On a GPU rounding follows from how many tokens are fed at once, which nothing but the tokens may say where a
        seed was given. A model with states drafts nothing: these do not go back to before a token.
        """
        if self.fitted.method.drafts is None or self.resident.manifest.model.states is not None:
            return None
        own = [] if self.own is None else self.own.token_ids.tolist()
        text = self.runner.suffixes(self.resident)
        timed = self.runner.device.type == "cpu" or self.order.sampling.seed is None
        return Drafter(text, [*own, *self.prompt], by_method=self.fitted.drafting is not None, timed=timed)

    def keep(self, session: Session, answer: Sequence[int]) -> Callable[[], str]:
        if self.keeper is None:
            raise InternalError("a session is to be kept that nobody wanted kept")
        return self.keeper.take(session, answer)

    def close(self) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class SessionKeeper:
    """Makes children of sessions. resident: the base; own, prompt: the tokens that the session begins with. room: what
    the store has for them."""

    store: Store
    runner: ModelRunner
    ground: Ground
    fitted: FittedMethod
    resident: ResidentContext
    own: OwnRows | None
    prompt: Sequence[int]
    options: KeepOptions
    room: StoreRoom

    def check(self) -> None:
        """Raises before anything is computed: NameTakenError for a name that another context has, StoreBoundError where
        not even what there is so far has room."""
        options, named = self.options, self.ground.named
        begun = self.ground.own_tokens + len(self.prompt)
        self.room.require(self.room.needed("", named.model, named.dtype, begun, ()), named.tenant)
        if options.name and not options.moves:
            require_free(self.store, options.name, named.model.fingerprint, self._may_become, named.tenant)

    def _may_become(self, other: Manifest) -> bool:
        """Whether the session may be kept as this context: it has the session's tokens so far, and none or more."""
        if other.parent is not None and other.parent.id != self.ground.base.id:
            return False
        own = [] if self.own is None else self.own.token_ids.tolist()
        before = [] if other.parent is not None else self.resident.tokens().tolist()
        begun = [*before, *own, *self.prompt]
        with self.store.files(other) as context:
            ids: list[int] = context.token_ids().tolist()
        return ids == begun if self.options.prompt_only else ids[: len(begun)] == begun

    def take(self, session: Session, answer: Sequence[int]) -> Callable[[], str]:
        """What publishes the session with these tokens of its answer; it may have read more of them."""
        added = torch.tensor([*self.prompt, *answer], dtype=torch.int64)
        token_ids = added if self.own is None else torch.cat([self.own.token_ids, added])
        rows = [layer_rows[:, : len(token_ids)] for layer_rows in session.tail_rows()]
        if any(layer_rows.shape[1] != len(token_ids) for layer_rows in rows):
            raise InternalError(f"a session of {len(token_ids)} tokens has {rows[0].shape[1]} rows of them")
        if session.states is not None and session.tail_keys > len(token_ids):
            rows = [layer_rows.clone() for layer_rows in rows]  # which are written again
        states = self.runner.states_behind(session, token_ids.tolist())
        state = None if states is None else states.pack(self.ground.named.dtype)
        return lambda: self._publish(token_ids, rows, state)

    def _publish(
        self, token_ids: torch.Tensor, rows: Sequence[torch.Tensor], state: torch.Tensor | None
    ) -> str:
        options, named = self.options, self.ground.named
        made = Continuation(
            parent=self.ground.base,
            before=self.resident.tokens().cpu(),
            own=OwnRows(token_ids, [layer_rows.cpu() for layer_rows in rows], state),
            attention=joined(attention_of(named), self._attention()),
            name=options.name or named.name,
            expires_at=None if options.ttl_s is None else utc_now() + timedelta(seconds=options.ttl_s),
            owner=options.owner,
        )
        id_ = made.id()
        note_use(self.store, self.ground.base.id)  # which does not go for its own child
        self.room.make(self.room.needed(id_, named.model, named.dtype, len(token_ids), ()), named.tenant)
        if options.moves:  # from one that it may continue: to be found by it until this one is there
            made = replace(made, name=told_apart(made.name, id_))
            publish_child(self.store, made)
            take_name(self.store, id_, options.name)
            return id_
        name = free_name(self.store, made.name, named.model.fingerprint, id_, named.tenant)
        return publish_child(self.store, replace(made, name=name)).id

    def _attention(self) -> str:
        """How the session's own tokens attended, and with which weights, where these were rounded."""
        weights = self.runner.kept_weights
        return f"{self._attended()}, weights {weights.name}" if weights.rounded else self._attended()

    def _attended(self) -> str:
        method = self.fitted.method
        exact_prompt = self.options.prompt_only and self.runner.prompts is Prompts.EXACT
        if exact_prompt or not self.fitted.searching or method.budget is None:
            return EXACT
        return f"{method.name} {method.budget.label}"
