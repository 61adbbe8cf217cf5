"""One request's state: a shared context, a method, and the tail that it adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Protocol, overload

import torch

from decode_engine.layers.dense_layer import DenseLayer, WindowLayer
from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import LayerAttention, LayerSearch, SparseLayer
from index_store.attention.attention_state import PLAIN, LogitForm
from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.two_planes import TwoPlanes
from index_store.indexes.exact_index import ExactIndex
from index_store.indexes.interface.layer_index import Do, LayerIndex, do_now, reserve_together
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod, IndexSpec
from index_store.models.state_cache import TextStates

Watch = Callable[[int, Observation], None]
"""Is told a layer's number, and what it found."""


class Layers(Sequence[LayerAttention]):
    """The layers of one session, each made when it is first asked for, and `wait` has returned for it.

    So a session on a context that is still being loaded waits for no layer before it comes to it.
    """

    def __init__(
        self, count: int, make: Callable[[int], LayerAttention], wait: Callable[[int], None] = lambda _: None
    ) -> None:
        self._made: list[LayerAttention | None] = [None] * count
        self._make = make
        self._wait = wait

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, layer: int) -> LayerAttention: ...
    @overload
    def __getitem__(self, layer: slice) -> list[LayerAttention]: ...

    def __getitem__(self, layer: int | slice) -> LayerAttention | list[LayerAttention]:
        if isinstance(layer, slice):
            return [self[number] for number in range(*layer.indices(len(self)))]
        found = self._made[layer]
        if found is None:
            number = range(len(self))[layer]
            self._wait(number)
            with torch.inference_mode(False):  # what is made here is written to in any mode
                found = self._made[number] = self._make(number)
        return found

    def made(self) -> Iterator[LayerAttention]:
        """Those that there are already."""
        return (layer for layer in self._made if layer is not None)

    def clear(self) -> None:
        """Lets go of all layers; there are none from here on."""
        self._made.clear()


class Mirror(Protocol):
    """What keeps a session on other GPUs beside one here."""

    @property
    def number(self) -> int:
        """Of the session there."""

    def fork(self) -> Mirror:
        """See `Session.fork`."""

    def close(self) -> None:
        """See `Session.close`."""


class Session:
    """Decoding state over a resident context. The context is shared and never written.

    position: tokens so far, context included; the next token gets this position. method: as it runs over this context.
    drafts: whether it attends to everything but for drafts, by the same tails in searching layers. states: of a model
    with states, behind the last token; None of others. marked: those at an earlier position. shadow: what its steps are
    compared with, None where they are not; lag: tokens that this was not fed yet. mirror: where the model is divided
    among GPUs, of the first one's sessions. device: of queries, tails and
    indexes; keys and values of the context may be in host memory beside it. Raises InvalidArgumentError when the method
    was fitted to another context.
    """

    def __init__(
        self,
        context: ResidentContext,
        fitted: FittedMethod,
        forms: Sequence[LogitForm] = (),
        *,
        check: Callable[[], None] = lambda: None,
        again: int = 0,
        watch: Watch | None = None,
        states: TextStates | None = None,
    ) -> None:
        """forms: what every layer of the model does to logits; nothing where there are none. states: of a model that
        has some, those behind the context's last token, which become the session's.

        check: called now and then while a layer of the context is waited for; what it raises ends the wait. again: last
        tokens of the context that are fed first: their keys and values are there, what follows them is wanted. watch:
        is told what every searching layer finds, which takes the general path.
        """
        if fitted.manifest.id != context.manifest.id:
            raise InvalidArgumentError(
                f"method {fitted.method.name!r} was fitted to context {fitted.manifest.id}, the session is on "
                f"{context.manifest.id}"
            )
        self.context = context
        self.fitted = fitted
        self.method = fitted.method
        self.drafts = fitted.drafting is not None
        self.figures = Figures()
        self.states = states
        self.marks = False
        self.marked: tuple[int, TextStates] | None = None
        self._forms = forms
        self.position = context.manifest.token_count - again
        self.device = context.device
        self.watched = watch is not None
        self.shadow: Session | None = None
        self.lag: list[int] = []
        self.mirror: Mirror | None = None
        make = partial(_make_layer, context, fitted.drafting or fitted, self.figures, forms, watch)
        self._layers = Layers(
            context.manifest.model.layers, make, lambda layer: context.gate.wait(layer, check)
        )
        self._advanced_to: int | None = None  # tokens in the tails, where those do not know yet
        self._room_until = 0  # a position before which all tails have room
        self._drafting: Session | None = None

    def fork(self) -> Session:
        """Another session on the same context that has read the same tokens, and goes on by itself.

        It shares the context, and so the lease on it; its tails and extensions of indexes are copies. Its figures begin
        with what was done so far.
        """
        states = None if self.states is None else self.states.copy()
        other = Session(self.context, self.fitted, self._forms, states=states)
        other.marks, other.marked = self.marks, self.marked
        other.figures.become(self.figures)
        with torch.inference_mode(False):
            for layer, from_layer in zip(other.layers, self.layers, strict=True):
                layer.adopt(from_layer)  # type: ignore[arg-type]  # both are made for the same layer
        other.position = self.position
        other.mirror = None if self.mirror is None else self.mirror.fork()
        return other

    @property
    def layers(self) -> Layers:
        """The layers; their tails know how many tokens they hold."""
        if self._advanced_to is not None:
            for layer in self._layers:
                layer.tail.count = self._advanced_to
            self._advanced_to = None
        return self._layers

    @property
    def drafting(self) -> Session | None:
        """A session of the method that drafts, on the same tails and as far as this one; None where nothing drafts.

        What it adds counts only there, until it is asked for again, and its figures are this one's.
        """
        if self.fitted.drafting is None:
            return None
        if self._drafting is None:
            self._drafting = copy(self)
            self._drafting.fitted = self.fitted.drafting
            self._drafting.method = self.fitted.drafting.method
        self._drafting.position, self._drafting._advanced_to = self.position, self.tail_keys
        return self._drafting

    def close(self) -> None:
        """Drops the tail and the layers' references to the context's memory; the session cannot be used afterwards."""
        self.end_audit()
        if self.mirror is not None:
            self.mirror.close()
            self.mirror = None
        self._layers.clear()
        self._advanced_to, self._room_until = None, 0
        self.states = self.marked = self._drafting = None

    @property
    def nbytes(self) -> int:
        """Bytes that the session holds besides the shared context: its tail and states, and what was appended to the
        index."""
        kept = (self.states, None if self.marked is None else self.marked[1])
        states = sum(each.nbytes for each in kept if each is not None)
        return states + sum(layer.nbytes for layer in self._layers.made())

    def begin_audit(self, shadow: Session, token_ids: Sequence[int]) -> None:
        """Has its steps compared with those of a session with full attention, which gets the same tokens.

        token_ids: those behind the shadow's that it is fed before the first step. Takes the general path from here on.
        """
        self.shadow, self.lag, self.watched = shadow, [*token_ids], True

    def end_audit(self) -> None:
        """Lets go of the shadow. Idempotent."""
        shadow, self.shadow, self.lag = self.shadow, None, []
        if shadow is not None:
            shadow.close()

    def mark(self) -> None:
        """Remembers the states here, where `marks` says that they may be asked for later."""
        if self.marks and self.states is not None:
            self.marked = self.position, self.states.copy()

    @property
    def tail_keys(self) -> int:
        """Tokens that the session has added to its context."""
        return self.position - self.context.manifest.token_count

    def restore(self, rows: Sequence[torch.Tensor]) -> None:
        """Adds tokens whose keys and values are known: of every layer [H, t, 2, d] in the context's dtype."""
        start = self.tail_keys
        for layer, rows_HT2D in zip(self.layers, rows, strict=True):
            layer.tail.put(start, rows_HT2D)
        self.position += rows[0].shape[1]

    def rewind(self, tokens: int) -> None:
        """Takes back the last tokens, of those that it has added."""
        self.position -= tokens
        self._advanced_to = self.tail_keys

    def tail_rows(self) -> list[torch.Tensor]:
        """Keys and values of all tokens that were added, of every layer [H, t, 2, d].

        Views, which stay valid when the session is closed; it must not be used any more.
        """
        return [layer.tail.rows for layer in self.layers]

    def reserve_tail(self, ahead: int = 0, do: Do = do_now) -> None:
        """Makes room for the next token, and so many behind it, in the tails of all layers; they may move.

        do: see `GrowingRows.reserve`.
        """
        if self.position + ahead < self._room_until:
            return
        keys, last = self.context.manifest.token_count, self._layers[-1].tail
        needed = self.position + 1 + ahead - keys
        if needed > last.capacity:  # the last one that grows, should memory run out between
            reserve_together([layer.tail for layer in self.layers], needed, do)
        self._room_until = keys + last.capacity

    @property
    def room(self) -> int:
        """Tokens for which the tails of all layers have room, as far as `reserve_tail` has seen."""
        return self._room_until - self.position

    def tail_capacities(self) -> tuple[int, int]:
        """Change whenever tails move: they grow layer by layer, the first one first and the last one last."""
        return self._layers[0].tail.capacity, self._layers[-1].tail.capacity

    def advance(self) -> None:
        """Notes that a step wrote the next token's keys and values into the tails of all layers, and states behind it.

        The tails are told when somebody asks for the layers: steps that go through kernels do not, one after another.
        """
        self.position += 1
        self._advanced_to = self.position - self.context.manifest.token_count
        if self.states is not None:
            self.states.advance()


def _make_layer(
    context: ResidentContext,
    fitted: FittedMethod,
    figures: Figures,
    forms: Sequence[LogitForm],
    watch: Watch | None,
    layer: int,
) -> LayerAttention:
    """A layer of a session. Waits until the context has it in memory."""
    kv, manifest = context.rows(layer), context.manifest
    form = forms[layer] if forms else PLAIN
    shape = manifest.model.shape(layer)
    if shape.window is not None:
        return WindowLayer(
            context.kv(layer), manifest.token_count, shape.window, figures, form, chunked=shape.chunked
        )
    beside = context.device if context.placement.kv_on_host else None
    index, partition = fitted.method.index, fitted.partition
    if index is None or layer not in fitted.searching:
        return DenseLayer(kv, figures, beside, form=form)
    search = LayerSearch(
        _index(context, index, layer),
        None if partition is None else _index(context, partition, layer),
        fitted.thresholds,
    )
    searching = SparseLayer(kv, search, fitted.method, figures, beside, form)
    searching.observer = None if watch is None else partial(watch, layer)
    return searching


def _index(context: ResidentContext, spec: IndexSpec, layer: int) -> LayerIndex:
    if spec.stored:
        return context.index(spec.name, layer)
    rows = context.rows(layer)
    return ExactIndex(rows if isinstance(rows, TwoPlanes) else rows[:, :, 0])
