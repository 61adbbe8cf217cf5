"""Where prompts are cut into pieces: by an estimate of what their tokens cost.

Between two tokens of every stream the scheduler reads pieces of prompts (`queues`). What a token of a prompt costs
depends on the method: where every token selects keys for itself it may be a hundred times what full attention takes,
and with a small append_block every few tokens are a search and an append of their own. So pieces are cut by cost.

Where, depends on the request and on the server's settings alone, never on measured time or on other requests: a model
rounds otherwise with other numbers of tokens, and tokens of a piece may share a selection. The same request gives the
same tokens in whatever company.

A piece still takes longer than several steps of small batches. So streams take steps between the layers of a piece,
which changes no bit of it, and here measured time decides (`Pace`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from decode_engine.settings.command_options import Prompts
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.method import FittedMethod
from index_store.selection.budgets import CLUSTERS, Budget, Mass, Ratio, Threshold, TokenCount

_KEPT_WORK = 60
"""Of a kept key, in keys attended to by all tokens together: its row is gathered and converted for one token alone."""

_SHARED_WORK = 4
"""The same of all searched keys, kept or not, where the tokens of a piece share a selection."""

_COPIED = 1 / 32
"""Of a token that is copied, in ordinary tokens: a row of every layer moves, and nothing is computed."""

_PRICED = 256
"""Tokens of a prompt that count as costing the same: those before them are keys that each attends to, too."""

_REFINEMENTS = 3  # passes of k-means over the open block for every append, see `key_clusters.index`


class _Machine(NamedTuple):
    """What is ordinary on a kind of device, to which work is compared.

    keys: of an ordinary context. move: multiply-adds in the time that a layer's extra search and append take, which is
    mostly overhead.
    """

    keys: int
    move: float


_CPU = _Machine(2**13, 8e7)  # measured: 1.4 to 4 ms a layer, at 23 billion multiply-adds a second and core
_GPU = _Machine(2**17, 1e11)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Estimated cost of a prompt's tokens, 1 being that of an ordinary one under full attention.

    token: of each. move: of each move of the recent window, which is a search and an append of its own. clustering: of
    each move again, times the square of the tail's tokens, up to `open_keys` of them. block: tokens from move to move.
    begin: the prompt's first token is so many tokens after a move. tail: tokens of the tail before it. key: what a
    token of the prompt adds to the cost of each later one; the first `free` ones add nothing.
    """

    token: float = 1.0
    move: float = 0.0
    clustering: float = 0.0
    open_keys: int = 0
    block: int = sys.maxsize
    begin: int = 0
    tail: int = 0
    key: float = 0.0
    free: float = 0.0

    def token_after(self, tokens: int) -> float:
        """The cost of the token that comes after so many of the prompt."""
        return self.token + self.key * max(0.0, tokens // _PRICED * _PRICED - self.free)

    def moves_after(self, tokens: int) -> float:
        """The cost of the move that comes with the token after so many of the prompt."""
        return self.move + self.clustering * min(self.tail + tokens, self.open_keys) ** 2


class Piece(NamedTuple):
    """Consecutive tokens of a prompt that are read at once, and their estimated cost.

    stored: they are not read: their keys and values are known.
    """

    tokens: int
    cost: float
    stored: bool = False


def cut_prompt(cost: PromptCost, tokens: int, most: float) -> list[Piece]:
    """Pieces of a prompt of so many tokens, each of which costs at most `most` or is a single token."""
    pieces: list[Piece] = []
    size, spent, done = 0, 0.0, 0
    while done < tokens:
        since = (cost.begin + done) % cost.block
        move = 0.0 if since else cost.moves_after(done)
        token = cost.token_after(done)
        fitting = int((most - spent - move) / token)
        if fitting < 1 and size:
            pieces.append(Piece(size, spent))
            size, spent = 0, 0.0
            continue
        alike = _PRICED - done % _PRICED if cost.key else tokens
        taken = max(1, min(fitting, cost.block - since, alike, tokens - done))
        size, spent, done = size + taken, spent + move + taken * token, done + taken
    return [*pieces, Piece(size, spent)]


def stored_cost(cost: PromptCost) -> PromptCost:
    """What tokens cost whose keys and values are known, where those of a prompt in their place cost that.

    They are copied, and what leaves the recent window is appended as ever.
    """
    return replace(cost, token=_COPIED, key=0.0)


def prompt_cost(fitted: FittedMethod, prompts: Prompts, device: torch.device, tail: int = 0) -> PromptCost:
    """What tokens of a prompt cost that is read with the method over its context, behind `tail` other tokens.

    Estimated in multiply-adds: of the model's weights, as they follow from its sizes, and of attention.
    """
    method, manifest = fitted.method, fitted.manifest
    model, keys, machine = manifest.model, manifest.token_count, _CPU if device.type == "cpu" else _GPU
    width = model.query_heads * model.head_dim
    weights, per_key = 12 * width**2 * model.layers, 2 * width
    ordinary = weights + model.layers * per_key * machine.keys
    searching = 0 if prompts is Prompts.EXACT else len(fitted.searching)
    attended: float = model.layers - searching
    if searching and method.budget is not None:
        shared = prompts is Prompts.SPARSE
        attended += searching * (_SHARED_WORK if shared else 1 + _KEPT_WORK * _kept(method.budget, keys))
    estimated, key = (weights + attended * per_key * (keys + tail)) / ordinary, attended * per_key / ordinary
    token, free = max(1.0, estimated), max(0.0, 1.0 - estimated) / key
    # On a GPU keys that exact prompts leave behind are appended by the first step, if that has no kernels.
    if not fitted.searching or (prompts is Prompts.EXACT and device.type != "cpu"):
        return PromptCost(token, tail=tail, key=key, free=free)
    specs = [spec for spec in (method.index, fitted.partition) if spec is not None]
    clusters = [spec for spec in specs if INDEX_KINDS[spec.kind].divides_into is CLUSTERS]
    blocks = [int(spec.parameters["block"]) for spec in clusters]
    per_cluster = [_REFINEMENTS / int(spec.parameters["keys_per_cluster"]) for spec in clusters]
    layers = len(fitted.searching) / ordinary
    return PromptCost(
        token=token,
        move=layers * machine.move,
        clustering=layers * model.kv_heads * model.head_dim * sum(per_cluster),
        open_keys=max((block + block // 2 if block else model.max_positions for block in blocks), default=0),
        block=method.append_block,
        begin=(keys + tail - method.recent) % method.append_block,
        tail=tail,
        key=key,
        free=free,
    )


def _kept(budget: Budget, keys: int) -> float:
    """Which part of the keys a token selects, about; of flat attention, where a share of the mass is as many keys."""
    if isinstance(budget, TokenCount):
        return min(1.0, budget.tokens / keys)
    if isinstance(budget, Ratio):
        return min(1.0, budget.count(keys) / keys)
    if isinstance(budget, Mass):
        return budget.mass
    if isinstance(budget, Threshold) and budget.keep is not None:
        return budget.keep
    return 1.0


class Pace:
    """When streams take a step between the layers of prompts: once these have taken about as long as a step does.

    What a device does shows a step later: with a step in flight, layers are launched behind it, and it is the step
    after that one which ends later. So a few layers are launched at first, and then as many as these have shown to fit.
    How long a step takes by itself is known of batches of a power of two, each seen once without a prompt between its
    steps.
    """

    _FIRST = 2  # layers of a pass of which nothing is known
    _GROWTH = 4  # times as many layers at most as were seen to fit

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._alone_ns: dict[int, float] = {}
        self._sessions = 0
        self._stepped_ns: int | None = None
        self._layers = self._before = 0
        self._most: float = self._FIRST

    def begin_pass(self) -> None:
        """From here on layers are those of another pass, which may take any time."""
        self._most = self._FIRST

    def note_layer(self) -> None:
        self._layers += 1

    @property
    def due(self) -> bool:
        """Whether streams are to take a step before the next layer."""
        if self._stepped_ns is None or self._layers >= self._most:
            return True
        alone_ns = self._alone_ns.get(self._sessions.bit_length())
        return alone_ns is None or self._clock_ns() - self._stepped_ns >= alone_ns

    def note_step(self, sessions: int) -> bool:
        """Streams took a step; 0 where there are none. Whether no prompt was read since the step before."""
        now, before, layers = self._clock_ns(), self._stepped_ns, self._layers + self._before
        size = sessions.bit_length()
        if sessions and before is not None and size == self._sessions.bit_length():
            gap = max(1.0, now - before)
            alone = self._alone_ns.get(size)
            if not layers:
                self._alone_ns[size] = gap if alone is None else (gap + alone) / 2
            elif alone is not None and self._before:
                late = gap - alone
                self._most = max(1.0, self._before * min(self._GROWTH, alone / max(1.0, late)))
        self._sessions, self._stepped_ns = sessions, now if sessions else None
        self._before, self._layers = self._layers, 0
        return not layers
