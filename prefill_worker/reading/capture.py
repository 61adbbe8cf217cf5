"""The attention that prefill gives the model: causal, and it keeps keys, values and a sample of queries.

It is exact, or attends to the past through clusters (`prefill_worker.muse.ranges`). Of layers whose queries see a
sliding window, which have no index, the last keys and values are kept and no queries.

A `Capture` is handed to the model as a keyword argument, travels through transformers unchanged and arrives at
`capture_attention`, registered under the name ATTENTION. There is no cache object and no state outside the Capture.

Shape legend: H KV heads, G query heads per KV head, T tokens of one forward pass, N tokens of the context,
P sampled tokens, d head dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface

from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm
from index_store.attention.fused import attend_recent, narrow, widen
from index_store.attention.selected_keys import attend_selected
from index_store.models.state_cache import IndexCache, StateCache, TextStates, passed, without_index_head
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import dtype_name, stored_dtype
from index_store.store.stored_context import QuerySample
from prefill_worker.muse.ranges import RangeAttention
from prefill_worker.reading.kept_layers import DeviceLayers, HostLayers, WindowRows, attend_causally
from prefill_worker.reading.query_sample import SampledPositions

ATTENTION = "sparsekv_capture"
_STATE = "state."

Passed = Callable[[int, int, int], None]
"""Told a layer, the first token of a pass, and how many it carries."""

LayerPart = tuple[Tensor, Tensor | None]
"""Keys and values of a pass in a layer, [H, T, 2, d], of a sliding window its last ones at most, and of layers whose
queries see all keys the sampled queries [H, P, G, d]."""


class Capture:
    """Keys, values and sampled queries of every layer while a model reads a context.

    Later tokens attend to keys and values as they are stored (rounded to `kv_dtype`), so that a session that attends
    fully sees exactly what prefill saw. Peak memory: docs/prefill.md.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        token_count: int,
        kv_dtype: torch.dtype,
        sampled: SampledPositions,
        device: torch.device | str = "cpu",
        block_tokens: int | None = None,
        approximation: RangeAttention | None = None,
        state_marks: int | None = None,
    ) -> None:
        """block_tokens: keys and values are kept in host memory and read in blocks of so many tokens, at most.

        By default they stay on the device. approximation: attends to the context's past in place of exact attention;
        a pass is then one of its blocks. state_marks: of a model with states, those behind every so many tokens of the
        context are kept, where a pass ends. Raises MemoryBudgetError when the machine refuses the host memory.
        """
        self.identity = identity
        self.token_count = token_count
        self.kv_dtype = kv_dtype
        self.device = torch.device(device)
        self._sampled = sampled
        self._when_passed: Passed | None = None
        self._approximation = approximation
        heads, dim = identity.kv_heads, identity.head_dim
        shape = (heads, token_count, 2, dim)
        self._places = {layer: place for place, layer in enumerate(identity.full_layers)}
        self._kept = (
            DeviceLayers(len(self._places), shape, kv_dtype, self.device)
            if block_tokens is None
            else HostLayers(len(self._places), shape, kv_dtype, self.device, block_tokens)
        )
        self._windows = None if identity.window is None else WindowRows(identity.window.size)
        self._forms = [PLAIN] * identity.layers
        self._sample_shape = (heads, sampled.rows, identity.query_heads // heads, dim)
        self._queries: list[Tensor | None] = [None] * identity.layers
        self._prompt_kv: list[Tensor | None] = [None] * identity.layers
        self._states: TextStates | None = None
        self._prompt_states: TextStates | None = None
        self._given_state: tuple[Tensor, str] | None = None
        self._state_marks = state_marks
        self._marked: dict[int, Tensor] = {}
        self._behind = 0
        self.cache: StateCache | None = None
        self.index: IndexCache | None = None
        self.calls: Iterator[int] = itertools.count()
        self._start = self._count = 0
        self._kept_T = torch.empty(0, dtype=torch.int64)
        self._first_row = 0

    def when_passed(self, call: Passed) -> None:
        """Has it told of every pass over the context, as soon as a layer has its keys, values and queries."""
        self._when_passed = call

    def take(self, layer: int, kv_HP2D: Tensor, queries_HSGD: Tensor | None) -> None:
        """Takes over the context's first tokens in a layer: no forward pass carries them.

        kv_HP2D: in the stored dtype, of a layer with a window the last of them. queries_HSGD: of the first sampled
        positions, as a sample has them; None without any.
        """
        if layer not in self._places:
            if self._windows is not None:
                self._windows.add(layer, kv_HP2D)
            return
        self._kept.write(self._places[layer], 0, kv_HP2D[:, :, 0], kv_HP2D[:, :, 1])
        if queries_HSGD is not None:
            self._queries_of(layer, queries_HSGD.dtype)[:, : queries_HSGD.shape[1]] = queries_HSGD.to(
                self.device
            )

    def take_state(self, packed: Tensor | None, dtype: str, behind: int) -> None:
        """Takes over packed states, in a dtype of keys and values: those behind so many tokens, the last ones last."""
        model = self.identity.states
        if packed is None or model is None:
            return
        self._given_state = (packed, dtype)
        if self.is_mark(behind):
            own = TextStates(model, stored_dtype(dtype).torch_dtype).unpack(packed, dtype)
            self._marked[behind] = own.pack(dtype_name(self.kv_dtype))

    def is_mark(self, tokens: int) -> bool:
        """Whether the states behind so many tokens are kept beside those of the last one."""
        every = self._state_marks
        return every is not None and 0 < tokens < self.token_count and tokens % every == 0

    def begin_pass(self, dtype: torch.dtype) -> Mapping[str, object]:
        """What else the next forward pass is called with, by a model that computes in the dtype."""
        model = self.identity.states
        self.calls = itertools.count()
        if self.identity.index_keys:
            rows = partial(self._rows_to, end=self._start)
            self.index = IndexCache(self.identity.layers, self._start, rows, self.kv_dtype)
            return self.index.inputs(self._count, self.device)
        if model is None:
            return {}
        if self._states is None:
            self._states = TextStates(model, dtype, self.device)
            if self._given_state is not None:
                self._states.unpack(*self._given_state)
        if self._start == self.token_count:
            self._prompt_states = self._states.copy()
        text = self._states if self._start < self.token_count else self._prompt_states
        self.cache = StateCache.over([text or self._states])
        return {"cache": self.cache}

    def end_pass(self) -> None:
        """The pass has succeeded."""
        if self.cache is None or self._states is None:
            return
        self.cache.commit()
        if self.is_mark(self._behind) and self._prompt_states is None:
            self._marked[self._behind] = self._states.pack(dtype_name(self.kv_dtype))

    def packed_state(self, dtype: torch.dtype) -> Tensor | None:
        """States behind the last token of the context that was read, as a context of the dtype stores them; None of a
        model without."""
        return None if self._states is None else self._states.pack(dtype_name(dtype))

    def marked_states(self) -> list[Tensor]:
        """The same behind every mark, in the order of the tokens."""
        return [self._marked[tokens] for tokens in sorted(self._marked)]

    def state_tensors(self) -> dict[str, Tensor]:
        """The same as the model computes with them, under the name that `put_state` finds them by."""
        states = self._states
        return (
            {}
            if states is None
            else {f"{_STATE}{dtype_name(states.dtype)}": states.pack(dtype_name(states.dtype))}
        )

    def put_state(self, tensors: Mapping[str, Tensor], behind: int) -> None:
        """Takes over what `state_tensors` has among these, behind so many tokens."""
        for name in tensors:
            if name.startswith(_STATE):
                self.take_state(tensors[name], name.removeprefix(_STATE), behind)

    def begin_context_chunk(self, start: int, count: int) -> None:
        """The next forward pass carries the context's tokens start..start+count-1."""
        rows = self._sampled_rows(start, count)
        self._first_row = rows.start
        self._kept_T = (self._sampled.context_P[rows] - start).to(self.device)
        self._start, self._behind, self._count = start, start + count, count

    def begin_prompt_chunk(self, prompt: int, start: int, count: int) -> None:
        """The next forward pass carries tokens start..start+count-1 of a calibration prompt, after the context.

        Its keys and values are kept apart from the context's and dropped when another prompt starts.
        """
        if start == 0:
            self.forget_prompt()
        kept = self._sampled.prompts[prompt]
        before = int((kept < start).sum())
        inside = kept[(kept >= start) & (kept < start + count)]
        earlier = sum(len(other) for other in self._sampled.prompts[:prompt])
        self._first_row = len(self._sampled.context_P) + earlier + before
        self._kept_T = (inside - start).to(self.device)
        self._start, self._count = self.token_count + start, count

    def forget_prompt(self) -> None:
        """Drops keys, values and states of the calibration prompt; the context's are as if it had never been read."""
        self._prompt_states = None
        self._prompt_kv = [None] * self.identity.layers

    def attend(
        self,
        layer: int,
        query_HqTD: Tensor,
        key_HTD: Tensor,
        value_HTD: Tensor,
        form: LogitForm = PLAIN,
        ids_TK: Tensor | None = None,
    ) -> Tensor:
        """Stores one layer's keys and values, samples its queries, returns its attention output [T, Hq, d].

        Logits are scaled by 1/sqrt(d). ids_TK: positions that the model selected by an index of its own.
        """
        self._forms[layer] = form
        query_HGTD = query_HqTD.view(len(key_HTD), -1, *query_HqTD.shape[1:])
        if ids_TK is not None:
            return self._attend_selected(layer, query_HGTD, key_HTD, value_HTD, ids_TK)
        attend = self._attend_all if layer in self._places else self._attend_window
        state = attend(layer, query_HGTD, key_HTD, value_HTD, form.cap)
        by_token = AttentionState(state.out.transpose(1, 2), state.lse.transpose(1, 2))
        out_HTGD = form.add_sink(by_token).out.to(query_HqTD.dtype)
        return out_HTGD.transpose(0, 1).flatten(1, 2)

    def _attend_all(
        self, layer: int, query_HGTD: Tensor, key_HTD: Tensor, value_HTD: Tensor, cap: float | None
    ) -> AttentionState:
        """Attention of a layer whose queries see all keys."""
        count, place = key_HTD.shape[1], self._places[layer]
        self._sample(layer, query_HGTD)
        pasts = [self._kept.past(place, min(self._start, self.token_count))]
        if self._start < self.token_count:
            chunk = self._kept.write(place, self._start, key_HTD, value_HTD)
            if self._approximation is None:
                self._tell(layer, count)
        else:
            earlier = self._prompt_kv[layer]
            chunk = self._add_to_prompt(layer, key_HTD, value_HTD)
            pasts += [] if earlier is None else [earlier]
        if self._approximation is not None and self._start < self.token_count:
            state = self._approximation.attend(
                layer, query_HGTD, self._start, chunk, partial(self._kept.part, place)
            )
            self._tell(layer, count)  # only now are the clusters found that indexes start from
            return state
        return attend_causally(query_HGTD, pasts, chunk, cap=cap)

    def _attend_selected(
        self, layer: int, query_HGTD: Tensor, key_HTD: Tensor, value_HTD: Tensor, ids_TK: Tensor
    ) -> Tensor:
        """`attend` of a layer whose queries have lists of keys."""
        count = key_HTD.shape[1]
        self._sample(layer, query_HGTD)
        if self._start < self.token_count:
            self._kept.write(self._places[layer], self._start, key_HTD, value_HTD)
            self._tell(layer, count)
        else:
            self._add_to_prompt(layer, key_HTD, value_HTD)
        queries_HTGD = query_HGTD.transpose(1, 2).float() * query_HGTD.shape[-1] ** -0.5
        parts = self._rows_to(layer, self._start + count)
        state = attend_selected(queries_HTGD, parts, ids_TK, self._start, self._forms[layer])
        return state.out.to(query_HGTD.dtype).transpose(0, 1).flatten(1, 2)

    def _rows_to(self, layer: int, end: int) -> Sequence[Tensor]:
        """Keys and values [H, n, 2, d] of all tokens before that one, as stored, of a layer whose queries see all."""
        if layer not in self._places:
            return ()
        context = self._kept.part(self._places[layer], 0, min(end, self.token_count))
        prompt = self._prompt_kv[layer]
        return (context,) if prompt is None else (context, prompt)

    def _attend_window(
        self, layer: int, query_HGTD: Tensor, key_HTD: Tensor, value_HTD: Tensor, cap: float | None
    ) -> AttentionState:
        """Attention of a layer whose queries see the last keys only, always exact."""
        windows, shape, count = self._windows, self.identity.shape(layer), key_HTD.shape[1]
        if windows is None or shape.window is None:
            raise ValueError(f"layer {layer} has no window")
        if self._start < self.token_count:
            rows = windows.add(layer, torch.stack([key_HTD, value_HTD], dim=2).to(self.kv_dtype))
            self._tell(layer, count)
        else:
            self._add_to_prompt(layer, key_HTD, value_HTD)
            prompt = self._prompt_kv[layer]
            rows = windows.kept(layer) if prompt is None else torch.cat([windows.kept(layer), prompt], dim=1)
        return attend_recent(query_HGTD, rows, shape.window, self._start, chunked=shape.chunked, cap=cap)

    def _add_to_prompt(self, layer: int, key_HTD: Tensor, value_HTD: Tensor) -> Tensor:
        """Keeps a calibration prompt's keys and values until it is forgotten; returns them as they would be stored."""
        chunk = torch.stack([key_HTD, value_HTD], dim=2).to(self.kv_dtype)
        earlier = self._prompt_kv[layer]
        self._prompt_kv[layer] = chunk if earlier is None else torch.cat([earlier, chunk], dim=1)
        return chunk

    def _tell(self, layer: int, count: int) -> None:
        if self._when_passed is not None:
            self._when_passed(layer, self._start, count)

    def kv(self, layer: int) -> Tensor:
        """Keys and values of a layer where they are kept, [H, N, 2, d] in the stored dtype; a window's are its last.

        Raises ValueError once released.
        """
        if self._windows is not None and layer not in self._places:
            return self._windows.kept(layer)
        return self._kept.kept(self._places[layer])

    def kv_on_device(self, layer: int) -> Tensor:
        """The same on the capture's device: a copy, made by the caller's stream, where they are kept elsewhere."""
        return self._kept.on_device(self._places[layer]) if layer in self._places else self.kv(layer)

    def rows(self, start: int, count: int) -> list[LayerPart]:
        """What the pass over tokens start..start+count-1, the last one that there was, left of every layer."""
        sampled = self._sampled_rows(start, count)
        found: list[LayerPart] = []
        for layer, queries in enumerate(self._queries):
            if layer not in self._places:
                found.append((self.kv(layer)[:, -count:], None))
            elif queries is None:
                raise ValueError(f"layer {layer} has not seen any query, or was released")
            else:
                kv = self._kept.part(self._places[layer], start, start + count)
                found.append((kv, queries[:, sampled]))
        return found

    def put_rows(self, start: int, count: int, parts: Sequence[LayerPart]) -> None:
        """Has the capture hold what `rows` returned, in place of a pass over these tokens. Passes come in order.

        Raises ValueError, before anything has changed, for tensors of other shapes or another dtype.
        """
        sampled = self._sampled_rows(start, count)
        heads, _, *rest = self._sample_shape
        for layer, (kv, queries) in enumerate(parts):
            shape = self.identity.shape(layer)
            wanted_kv = (shape.kv_heads, min(count, shape.window or count), 2, shape.head_dim)
            wanted = (heads, sampled.stop - sampled.start, *rest) if layer in self._places else None
            found = None if queries is None else tuple(queries.shape)
            if tuple(kv.shape) != wanted_kv or kv.dtype != self.kv_dtype or found != wanted:
                raise ValueError(f"these are no rows of layer {layer}, tokens {start} to {start + count - 1}")
        for layer, (kv, queries) in enumerate(parts):
            own = kv.to(self.device)
            if queries is not None:
                self._kept.write(self._places[layer], start, own[:, :, 0], own[:, :, 1])
                self._queries_of(layer, queries.dtype)[:, sampled] = queries.to(self.device)
            elif self._windows is not None:
                self._windows.add(layer, own)

    def form(self, layer: int) -> LogitForm:
        """What the layer does to logits, once the model has come to it."""
        return self._forms[layer]

    def settle(self) -> None:
        """Has the caller's stream wait until what was captured is where it is kept."""
        self._kept.settle()

    def settled(self) -> Callable[[], None]:
        """What keeps a thread until all that was captured so far is where it is kept."""
        return self._kept.settled()

    @property
    def sample_positions(self) -> Tensor:
        """Positions of the sampled queries, [P] int64 ascending on the CPU; calibration prompts have positions >= N."""
        return self._positions.sort(stable=True).values

    def query_sample(self, layer: int) -> QuerySample:
        """The layer's sampled queries on the capture's device, in the order of `sample_positions`."""
        queries = self._queries[layer]
        if queries is None:
            raise ValueError(f"layer {layer} has not seen any query, or was released")
        order = self._positions.argsort(stable=True)
        return QuerySample(queries.float()[:, order.to(self.device)], self._positions[order])

    @property
    def _positions(self) -> Tensor:
        prompts = (kept + self.token_count for kept in self._sampled.prompts)
        return torch.cat([self._sampled.context_P, *prompts])

    def release(self, layer: int) -> None:
        """Frees what is kept of a layer."""
        if layer in self._places:
            self._kept.release(self._places[layer])
        elif self._windows is not None:
            self._windows.release(layer)
        if self._approximation is not None:
            self._approximation.release(layer)
        self._queries[layer] = self._prompt_kv[layer] = None

    def close(self) -> None:
        """Frees everything."""
        self._kept.close()
        self._queries = [None] * self.identity.layers
        self.forget_prompt()

    def _sample(self, layer: int, query_HGTD: Tensor) -> None:
        queries = self._queries_of(layer, query_HGTD.dtype)
        rows = slice(self._first_row, self._first_row + len(self._kept_T))
        queries[:, rows] = query_HGTD.index_select(2, self._kept_T).transpose(1, 2)

    def _queries_of(self, layer: int, dtype: torch.dtype) -> Tensor:
        queries = self._queries[layer]
        if queries is None:
            queries = torch.empty(self._sample_shape, dtype=dtype, device=self.device)
            self._queries[layer] = queries
        return queries

    def _sampled_rows(self, start: int, count: int) -> slice:
        """Rows of the sample that these tokens of the context have."""
        first, end = torch.searchsorted(
            self._sampled.context_P, torch.tensor([start, start + count])
        ).tolist()
        return slice(first, end)


def register_attention() -> str:
    """Makes `capture_attention` known to transformers; returns the name to load a model with."""
    AttentionInterface.register(ATTENTION, capture_attention)
    return ATTENTION


def capture_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    capture: Capture | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, d], key and value [1, H, T, d] -> ([1, T, Hq, d], None).

    The scale of the logits is folded into the queries, which are kept as if it were 1/sqrt(d). Dropout and mask do not
    apply (inference, one sequence); which layers have a window says the model's identity. indices: positions [1, T, K]
    that the model selected by an index of its own.
    """
    capture = capture or cast(Capture, passed())
    layer = next(capture.calls)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width, heads = value.shape[-1], query.shape[1]
    query, key, value = widen(query, key, value)
    if capture.index is not None and layer in capture.identity.full_layers:
        query, key, value = capture.index.join(layer, query, key, value)
    factor = scale * query.shape[-1] ** 0.5
    if not math.isclose(factor, 1.0, rel_tol=1e-6):
        query = query * factor
    if s_aux is not None:
        s_aux = pad(s_aux.float(), (0, query.shape[1] - len(s_aux)))
    sink_HG = None if s_aux is None else s_aux.view(key.shape[1], -1)
    form = LogitForm(softcap or None, sink_HG) if softcap or sink_HG is not None else PLAIN
    lists = None if indices is None else indices[0]
    out = capture.attend(layer, query[0], key[0], value[0], form, lists)[None]
    return narrow(without_index_head(out, heads), width).contiguous(), None
