"""The engine's side of a server: takes orders, finds out what they mean, brings their contexts into memory, runs them.

An order is grounded first: its context's manifest is read and judged, once; then it has its method, its memory and a
place. That happens on a few threads. What may wait long, for memory or for a method to be prepared, has a thread of its
own, of which places bound the number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial

from msgspec.structs import replace

from decode_engine.core.housekeeping import Housekeeping, KeptBeginnings
from decode_engine.core.seeing import Present, Seeing
from decode_engine.core.tenants import Tenants
from decode_engine.engine.engine import Engine
from decode_engine.engine.job import Outbox, Place, Reply, Sink
from decode_engine.engine.prompt_pieces import stored_cost
from decode_engine.engine.session_memory import fitting_tokens
from decode_engine.errors import CancelledError, DeadlineExceededError, PromptTooLongError
from decode_engine.layers.looking import Looking
from decode_engine.layers.session import Session
from decode_engine.model.continuing import Ground, SessionKeeper, SessionWork
from decode_engine.model.method_choice import AUTO, StepCosts
from decode_engine.model.preparing import Preparation
from decode_engine.model.runner import ModelRunner
from decode_engine.orders.events import Begins, Facts, Lookup, Residency, Status, Tenancy, Tier, Waits, Warmed
from decode_engine.orders.order import Order
from decode_engine.rpc.contexts.creation import Workshop
from decode_engine.rpc.contexts.defaults import default_method, remainder_name
from decode_engine.rpc.transport.work import BlockingWork
from decode_engine.settings.request_bounds import MAX_SEARCH_PERIOD
from index_store.errors import (
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
    MethodUnsupportedError,
    SparseKVError,
)
from index_store.family.parents import Missed
from index_store.family.prefixes import longest_prefix
from index_store.memory.arena import Arena
from index_store.memory.devices import describe_device
from index_store.methods.method import FittedMethod, Method
from index_store.methods.presets import get_method
from index_store.objects.courier import Courier
from index_store.store.catalog import Store, TunedDefault
from index_store.store.clean_up import renew
from index_store.store.description.callers import OPERATOR, Caller
from index_store.store.description.context_id import ModelIdentity, continued_digests, first_digest
from index_store.store.description.manifest import Manifest

DEFAULT_MAX_TOKENS = 256
MIN_APPEND_BLOCK = 16  # every move of the window costs a search and an append, however short


def choose_method(order: Order, manifest: Manifest, tuned: TunedDefault | None = None) -> Method:
    """The method that an order means on a context: its own where the order leaves that open, or to the server.

    tuned: the default that the context was tuned to, if it was.

    Raises MethodUnsupportedError for an unknown one, for parts that do not go together, and for a budget or search
    period where nothing is cut; InvalidArgumentError for a value out of range.
    """
    name, sizes = order.method, (order.keep_ratio, order.target_mass, order.token_budget)
    if name in ("", AUTO):
        default = default_method(manifest, tuned)
        name = default.expression
        if not order.has_budget:
            sizes = (default.keep, default.mass, default.tokens)
    keep, mass, tokens = sizes
    method = get_method(name, keep, order.search_period, mass=mass, tokens=tokens)
    if method.period > MAX_SEARCH_PERIOD:
        raise InvalidArgumentError(
            f"method {name!r}: @period is {method.period}, expected 1 to {MAX_SEARCH_PERIOD}", field="method"
        )
    if method.append_block < MIN_APPEND_BLOCK:
        raise InvalidArgumentError(
            f"method {name!r}: @append_block is {method.append_block}, expected {MIN_APPEND_BLOCK} to "
            f"{manifest.model.max_positions}",
            field="method",
        )
    return method


def fit_max_tokens(order: Order, manifest: Manifest, identity: ModelIdentity, prompt: int) -> int:
    """How many tokens may be generated after a prompt of that many tokens: as many as are wanted, or as fit.

    Raises PromptTooLongError when the model has no positions for one, or `min_tokens`.
    """
    room = identity.max_positions - manifest.token_count - prompt
    least = max(1, order.sampling.min_tokens)
    if least > room:
        raise PromptTooLongError(
            f"context ({manifest.token_count} tokens), prompt ({prompt}) and completion ({least} at least) exceed the "
            f"{identity.max_positions} positions of model {identity.name!r}; shorten the prompt",
            context_tokens=manifest.token_count,
            prompt_tokens=prompt,
            max_tokens=least,
            max_positions=identity.max_positions,
        )
    if order.keep is not None and order.keep.prompt_only:
        return 1
    return min(order.max_tokens or max(DEFAULT_MAX_TOKENS, least), room)


def _check_divided(order: Order, ground: Ground) -> None:
    """Raises InvalidArgumentError for what needs the heads of all GPUs in one place."""
    for field_, wanted, what in (
        ("keep", order.keep is not None, "keeps no sessions"),
        ("map_every", order.map_every is not None, "shows no maps of what is attended to"),
        ("context", bool(ground.own_tokens), "continues no contexts that continue others"),
    ):
        if wanted:
            raise InvalidArgumentError(
                f"this server {what}: its model is divided among GPUs (--tensor-parallel); ask another one",
                field=field_,
            )


@dataclass(slots=True)
class Outboxes:
    """Those of all doors."""

    of_doors: list[Outbox] = field(default_factory=list)

    def open(self, sink: Sink) -> Outbox:
        outbox = Outbox(sink)
        self.of_doors = [*self.of_doors, outbox]
        return outbox

    def close(self, outbox: Outbox) -> None:
        """One less; nothing more is sent by it."""
        self.of_doors = [each for each in self.of_doors if each is not outbox]

    def flush(self) -> None:
        for outbox in self.of_doors:
            outbox.flush()


@dataclass(frozen=True, slots=True)
class Meaning:
    """An order on its context, before anything is loaded. prompt: of its tokens those that are read."""

    order: Order
    ground: Ground
    fitted: FittedMethod
    prompt: Sequence[int]
    max_tokens: int
    memory: int
    arrived_ns: int
    reason: str
    lookup: Lookup
    missed: Missed | None
    tier: Tier
    audited: bool

    @property
    def cached(self) -> int:
        """Tokens that are not read, since their keys and values are stored."""
        return (
            self.ground.named.token_count if self.order.context else len(self.order.prompt) - len(self.prompt)
        )

    @property
    def again(self) -> int:
        """1 where the prompt is the context's last token, which is read for what follows it; 0 elsewhere."""
        return self.ground.named.token_count - self.cached

    def begins(self) -> Begins:
        """As its door is told."""
        method, named = self.fitted.method, self.ground.named
        return Begins(
            named.id if named.token_count else "",
            method.name,
            self.cached,
            len(self.prompt),
            self.max_tokens,
            "" if method.budget is None else method.budget.label,
            remainder_name(method),
            self.reason,
            self.lookup,
            self.missed,
            self.tier,
        )


@dataclass(frozen=True, slots=True)
class EngineService:
    """What is served from. Its methods may be called by any thread; `start` and `close` once.

    workshop: where kept beginnings are ordered. housekeeping: of what has expired. preparation: of methods, before
    requests run by them. costs: of decode steps, by which a method is chosen where requests leave that to the server;
    auto: whether those do that name none. max_waiting: requests beside those in progress. threads: on which orders
    begin. outboxes: by which doors get events, one batch for each turn of the engine.
    tenants: what each used, and may use. courier: to an object store.
    """

    store: Store
    arena: Arena
    runner: ModelRunner
    engine: Engine[Session]
    workshop: Workshop
    housekeeping: Housekeeping
    preparation: Preparation
    beginnings: KeptBeginnings
    outboxes: Outboxes
    max_waiting: int
    threads: BlockingWork
    tenants: Tenants = field(default_factory=Tenants)
    costs: StepCosts = field(default_factory=StepCosts)
    auto: bool = True
    seeing: Seeing = field(default_factory=Seeing)
    courier: Courier | None = None

    def start(self) -> None:
        """Begins to take orders. Raises AddressError where metrics or events cannot be told at their address."""
        exporter, events = self.seeing.exporter, self.seeing.kv_events
        if exporter is not None:
            exporter.start(self._present)
        if events is not None:
            events.start(self.store, self.arena, first_digest(self.runner.identity, self.runner.kv_dtype, ""))
        self.engine.start()
        self.housekeeping.start()
        if self.courier is not None:
            self.courier.start()

    def close(self, patience_s: float | None = None) -> bool:
        """Ends what is being done, tells whose requests are not finished, and lets go of everything.

        patience_s: for the step that the engine takes; None waits as long as it does. Returns whether all has ended:
        otherwise nothing may be let go of but by ending the process.
        """
        self.preparation.close()
        self.beginnings.close()
        self.housekeeping.stop()
        if self.courier is not None:
            self.courier.stop()
        self.arena.stop_loading()  # which the engine may be waiting for
        ended = self.engine.shutdown(patience_s=patience_s)
        self.threads.close()
        self.seeing.close()
        return ended

    def _present(self) -> Present:
        return Present(
            self.facts(),
            self.engine.stats(),
            self.arena.stats(),
            self.beginnings.stats(),
            self.tenants.totals(),
            0 if self.courier is None else int(self.courier.figures()["objects_mended"]),
        )

    def release(self) -> None:
        """Gives memory back, after `close`."""
        self.arena.clear()
        self.runner.close()

    def facts(self) -> Facts:
        runner = self.runner
        return Facts(
            runner.identity,
            runner.kv_dtype,
            self.engine.max_sessions,
            self.max_waiting,
            describe_device(runner.device),
        )

    def submit(self, order: Order, reply: Reply) -> None:
        """Begins an order; its reply is told all else. Never waits."""
        arrived_ns = self.engine.clock_ns()
        self.seeing.watch(order, reply, arrived_ns)
        try:
            self.threads.submit(partial(self._begin, order, reply, arrived_ns))
        except SparseKVError as error:
            self._fail(reply, error)

    def status(self) -> Status:
        arena = self.arena.stats()
        return Status(
            asdict(self.engine.stats()),
            asdict(self.beginnings.stats()),
            {
                "context_bytes": arena.used.total,
                "context_used_bytes": arena.leased.total,
                "context_limit_bytes": arena.budget.total,
                "contexts": arena.contexts,
                "context_loads": arena.loads,
                "context_hits": arena.hits,
                "context_evictions": arena.evictions,
                "context_device_bytes": arena.used.device,
                "context_device_used_bytes": arena.leased.device,
                "context_device_limit_bytes": arena.budget.device,
            },
            self.costs.told(),
            {} if self.courier is None else self.courier.figures(),
        )

    def residency(self, bases: Sequence[str]) -> Residency:
        placements = {}
        for id_ in bases:
            try:
                placements[id_] = self.arena.placement(self.store.manifest(id_)).value
            except SparseKVError:  # who shows it says what is wrong with it
                continue
        return Residency(self.arena.ids(), placements)

    def tenancy(self) -> Tenancy:
        stored: Counter[str] = Counter()
        for manifest in self.store.list():
            stored[manifest.tenant] += manifest.kv_bytes + manifest.index_bytes
        held = {"stored_bytes": stored, "resident_bytes": self.arena.held_by_tenant()}
        return Tenancy(self.tenants.use(held), self.tenants.quotas.problem)

    def warm(self, context: str, check: Callable[[], None]) -> Warmed:
        """See `Core.warm`. check: called now and then; what it raises ends the wait."""
        ground = self.ground(context)
        base = ground.base
        already = base.id in self.arena.ids()
        before = self.engine.clock_ns()
        self._fetch(ground, check, math.inf)
        with self.arena.acquire(self.store, base.id, check=check, manifest=base) as resident:
            ground.read(self.store)
            load_ns = self.engine.clock_ns() - before
            renew(self.store, ground.named)
            return Warmed(already, load_ns, resident.gate.first_layer_ns, resident.gate.all_layers_ns)

    def _fetch(self, ground: Ground, check: Callable[[], None], limit_s: float | None = None) -> None:
        """Has in the store what has to be loaded, where an object store has it. limit_s: see `Beyond.bring`."""
        if ground.base.token_count and not self.arena.ready(ground.base):
            self.store.bring(ground.base.id, check, limit_s)
        if ground.own_tokens:
            self.store.bring(ground.named.id, check, limit_s)

    def changed(self, context: str) -> None:
        try:
            self.arena.note(self.store.manifest(context))
        except SparseKVError:  # it is not there, or is not to be used
            self.arena.drop(context)

    def ground(self, id_: str, caller: Caller = OPERATOR) -> Ground:
        """A context that can be decoded against by the loaded model, and the one that it continues, as a caller sees
        it.

        Raises what `Store.manifest` raises, ContextExpiredError, ModelMismatchError, DtypeMismatchError or
        ParentMissingError. What was deleted or has expired is not served from memory either.
        """
        try:
            manifest = self.store.seen_by(caller).manifest(id_)
            self.store.check_expiry(manifest)
        except ContextExpiredError:
            self.arena.drop(id_)
            raise
        except ContextNotFoundError:
            if not self.store.lists(id_):  # it may be there for others
                self.arena.drop(id_)
            raise
        self.runner.check(manifest)
        return Ground.of(self.store, manifest)

    @property
    def nothing(self) -> Ground:
        """What a prompt stands on that begins with no stored context: no tokens."""
        manifest = self.runner.no_context.manifest
        return Ground(manifest, manifest)

    def beginning(self, token_ids: Sequence[int], tenant: str = "") -> tuple[Ground, Missed | None]:
        """The tenant's longest stored context, made without a salt, that tokens begin with, or are; `nothing` without
        one.

        Contexts that do not fit into memory are passed over. And why it is no longer one.
        """
        identity = self.runner.identity
        if identity.states is not None:  # behind whose last token one has to come: it cannot be read again
            token_ids = token_ids[:-1]
        digests = continued_digests(first_digest(identity, self.runner.kv_dtype, "", tenant), token_ids)
        seen = self.store.seen_by(Caller(tenant, frozenset()))
        found, missed = longest_prefix(seen, digests, token_ids, self._may_hold)
        return self.nothing if found is None else Ground.of(self.store, found), missed

    def _may_hold(self, manifest: Manifest) -> bool:
        if self.runner.ranks.divided and manifest.parent is not None:
            return False
        try:
            return self.arena.may_hold(Ground.of(self.store, manifest).base)
        except SparseKVError:
            return False

    def _begin(self, order: Order, reply: Reply, arrived_ns: int) -> None:
        """On one of a few threads: what the order means, and its place; and the rest where nothing has to be waited
        for."""
        try:
            self._check(order, reply)
            meaning = self._mean(order, arrived_ns)
            reply.tell(meaning.begins())
            memory = meaning.memory * order.answers
            use = self.tenants.admit(order.tenant, order.answers, len(meaning.prompt))
            try:
                place = self.engine.reserve(
                    meaning.fitted.manifest.id, memory, order.client, order.tenant, use
                )
            except BaseException:
                use.close()
                raise
        except Exception as error:
            self._fail(reply, error)
            return
        if self._is_ready(meaning):
            self._bring(meaning, place, reply)
            return
        reply.tell(Waits("context"))
        self.outboxes.flush()
        try:
            self.threads.submit_alone(partial(self._bring, meaning, place, reply))
        except RuntimeError as error:
            place.release()
            self._fail(reply, error)

    def _fail(self, reply: Reply, error: Exception) -> None:
        reply.fail(error)
        self.outboxes.flush()

    def _check(self, order: Order, reply: Reply) -> None:
        """Raises DeadlineExceededError or CancelledError once nobody needs the answer any more."""
        if order.deadline_ns is not None and self.engine.clock_ns() >= order.deadline_ns:
            raise DeadlineExceededError("the deadline passed before the server had an answer")
        if reply.cancelled:
            raise CancelledError("the client ended the call")

    def _mean(self, order: Order, arrived_ns: int) -> Meaning:
        self.engine.check_answers(order.answers)
        identity, whole = self.runner.identity, order.prompt
        viewer = order.viewer
        ground, missed = (
            (self.ground(order.context, viewer), None) if order.context else self._beginning(order)
        )
        named, base = ground.named, ground.base
        if self.runner.ranks.divided:
            _check_divided(order, ground)
        if order.keep is not None:
            self.store.seen_by(viewer).require_own(named.id)
        lookup: Lookup = "named" if order.context else "found" if named.token_count else "none"
        tier: Tier = self.arena.tier(base) if base.token_count else ""
        if tier == "disk" and self.store.elsewhere(base.id):
            tier = "objects"
        method, reason = self._choose(order, base)
        fitted = method.on(base)
        prompt = whole if order.context else whole[min(named.token_count, len(whole) - 1) :]
        max_tokens = fit_max_tokens(order, named, identity, len(prompt))
        device = self.runner.device.type
        audited = not ground.own_tokens and self.seeing.audits(fitted, order, device)
        limit, least = self.engine.session_memory, max(1, order.sampling.min_tokens)
        ending = identity.states if order.keep is not None else None  # of its prompt
        beside = ground.own_bytes + (0 if ending is None else ending.nbytes("float32"))
        room = None if limit is None else limit // order.answers // (1 + audited) - beside
        max_tokens, own = fitting_tokens(fitted, ground.own_tokens + len(prompt), least, max_tokens, room)
        memory = (own + beside) * (1 + audited)  # with its shadow
        found = (arrived_ns, reason, lookup, missed, tier, audited)
        return Meaning(order, ground, fitted, prompt, max_tokens, memory, *found)

    def _beginning(self, order: Order) -> tuple[Ground, Missed | None]:
        """What an order without a context stands on, and why it is nothing longer.

        Raises InvalidArgumentError where nothing can be kept of it.
        """
        if order.prompt_logprobs:  # all of the prompt has to be read
            return self.nothing, Missed("not_looked_for")
        if order.keep is None:
            return self.beginning(order.prompt, order.tenant)
        ground, missed = self.beginning(order.prompt[:-1], order.tenant)
        if not ground.named.token_count:
            raise InvalidArgumentError(
                "keep continues a stored context, and this prompt begins with none; name one, or have the prompt made "
                "into a context first (CreateContext)",
                field="keep",
            )
        return ground, missed

    def _choose(self, order: Order, base: Manifest) -> tuple[Method, str]:
        """The method of an order, and why where the server chose it; "" where the client or the context did."""
        left_open = order.method in ("", AUTO)
        if not base.token_count:
            method = choose_method(order, base)
            if method.sparse:
                raise MethodUnsupportedError(
                    f"method {order.method!r} searches a stored context, and this prompt begins with none; name a "
                    "context, or leave the method out",
                    method=order.method,
                )
            return method, ""
        own = choose_method(order, base, self.store.default_method(base.id) if left_open else None)
        if not left_open or not (order.method or self.auto):
            return own, ""
        if order.map_every is not None:
            return own, "the context's own, as full attention selects nothing that a map could show"
        if order.has_budget or order.search_period is not None:
            return own, "the context's own, as the request sets its budget or search period"
        drawn = order.sampling
        greedy = drawn.temperature == 0.0 or drawn.top_k == 1
        if order.keep is not None or (drawn.seed is not None and not greedy):
            return own, "the context's own, as a seed, or what is kept, may depend on no times"
        sessions = self.engine.on_context(base.id) + order.answers
        placement = self.arena.placement(base)
        return self.costs.choose(
            own,
            base,
            placement,
            sessions,
            ready=lambda drafting: self.preparation.begin(drafting.on(base), placement).done(),
        )

    def _is_ready(self, meaning: Meaning) -> bool:
        """Whether nothing has to be loaded, prepared or compiled."""
        ground, order = meaning.ground, meaning.order
        if ground.own_tokens or order.keep is not None or order.constraint is not None:
            return False
        base = ground.base
        placement = self.runner.no_context.placement
        if base.token_count:
            if not self.arena.ready(base):
                return False
            placement = self.arena.placement(base)
        return self.preparation.begin(meaning.fitted, placement).done()

    def _bring(self, meaning: Meaning, place: Place, reply: Reply) -> None:
        """Has the context loaded, and queues the order.

        While other contexts that are in use leave no memory for it, or its method is being prepared, this waits. The
        context's lease goes over to the engine, which ends it when it has let go of the session.
        """
        try:
            work = self._work(meaning, reply)
            self.engine.submit(place, work, reply)
            if not meaning.order.context:
                order, found = meaning.order, meaning.ground.named
                self.beginnings.note(order.prompt, found, meaning.cached, order.tenant)
        except (ContextNotFoundError, ContextExpiredError) as error:
            place.release()
            if meaning.order.context:
                self._fail(reply, error)
            else:  # a beginning that was found went before it was in use: there are others, or none
                self._begin(meaning.order, reply, meaning.arrived_ns)
        except Exception as error:
            place.release()
            self._fail(reply, error)
        else:
            self.outboxes.flush()
            renew(self.store, meaning.ground.named)

    def _work(self, meaning: Meaning, reply: Reply) -> SessionWork:
        """What the engine works with. Waits until the context is in memory, or being loaded, and the method ready."""
        order, ground, fitted = meaning.order, meaning.ground, meaning.fitted
        store, runner, base = self.store, self.runner, meaning.ground.base
        check = partial(self._check, order, reply)
        with ExitStack() as stack:
            before = self.engine.clock_ns()
            resident = runner.no_context
            placement = resident.placement
            if base.token_count:
                placement = self.arena.placement(base)
            self.preparation.begin(fitted, placement)  # while the context is brought into memory
            self._fetch(ground, check)
            if base.token_count:
                lease = self.arena.acquire(
                    store, base.id, check=check, wait_for_memory=True, early=True, manifest=base
                )
                resident = stack.enter_context(lease)
            own, again = ground.read(store), meaning.again
            if own is not None and again:
                own, again = own.first(ground.own_tokens - again), 0
            if not self.preparation.begin(fitted, resident.placement).done():
                reply.tell(Waits("method"))
                self.outboxes.flush()
                self.preparation.wait(fitted, resident.placement, check)
            keeper = None
            if order.keep is not None:
                options = replace(order.keep, owner=order.caller)
                keeper = SessionKeeper(
                    store, runner, ground, fitted, resident, own, meaning.prompt, options, self.workshop.room
                )
                keeper.check()
            looking = None
            if order.map_every is not None and fitted.searching:
                tokens = ground.named.token_count
                first = tokens - meaning.again + len(meaning.prompt) - 1
                looking = Looking(first, order.map_every, tokens, sorted(fitted.searching), reply.tell)
            cost = runner.prompt_cost(fitted, ground.own_tokens)
            grammar = None if order.constraint is None else runner.grammars.compile(order.constraint)
            return SessionWork(
                order=order,
                prompt=meaning.prompt,
                max_tokens=meaning.max_tokens,
                end_ids=frozenset(runner.tokenizer.eos_ids),
                before=() if order.context else order.prompt[: meaning.cached],
                context=base.id,
                memory=meaning.memory,
                cost=cost,
                stored=0 if own is None else len(own.token_ids),
                stored_cost=stored_cost(cost if own is None else runner.prompt_cost(fitted)),
                grammar=grammar,
                arrived_ns=meaning.arrived_ns,
                loaded_in_ns=self.engine.clock_ns() - before,
                runner=runner,
                fitted=fitted,
                resident=resident,
                own=own,
                again=again,
                waiting=self.engine.give_way,
                keeper=keeper,
                watch=None if looking is None else looking.observe,
                audited=meaning.audited,
                release=stack.pop_all().close,  # last: until here, what fails ends the lease
            )
