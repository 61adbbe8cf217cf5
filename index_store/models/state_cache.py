"""States as models see them: the cache of a pass over new tokens of some texts.

transformers hands every layer one cache. Layers that attend give it keys and values, and get them back as they are:
those are kept elsewhere, by the attention function. Layers with a state find it there and leave the next one. They work
on copies, which go over to the texts once a pass has succeeded (`commit`): one that failed may be made again.

Models that select what they attend to by an index of their own give the cache its keys as well (`IndexCache`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from index_store.errors import InvalidArgumentError
from index_store.store.description.context_id import FIXED_DTYPES, STATE_KINDS, ModelStates, StatePart
from index_store.store.description.dtypes import dtype_name, stored_dtype


class TextStates:
    """The states behind the last token of one text: of every part [layers, *shape], at addresses that stay.

    begun: whether the text has a token; what is there before means nothing. device: where they are.

    All parts lie in one block, as `pack` has them. Steps that a device does by itself read one block and write another
    one, by turns: as long as nobody has said `advance`, what is behind the text stays, whatever was computed ahead.
    """

    def __init__(self, model: ModelStates, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """dtype: that the model computes in."""
        self.model = model
        self.begun = False
        self.dtype = dtype
        self.device = torch.device(device)
        self._blocks = [self._block()]
        self._now = 0

    def _block(self) -> Tensor:
        nbytes = self.model.nbytes(dtype_name(self.dtype))
        with torch.inference_mode(False):  # what is made here is written to in any mode
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    @property
    def parts(self) -> Sequence[Tensor]:
        """Of every part [layers, *shape]."""
        return [rows[:, 0] for rows in state_parts(self.model, self._blocks[self._now], self.dtype, 1)]

    @property
    def nbytes(self) -> int:
        """Bytes that are held for them."""
        return sum(block.nbytes for block in self._blocks)

    def addresses(self, ahead: int) -> tuple[int, int]:
        """Of the block behind `ahead` more tokens, 0 or 1, and of the one that is written behind one token more.

        Raises InvalidArgumentError for a text without a token.
        """
        if not self.begun:
            raise InvalidArgumentError("a text without a token has no states that a step could read")
        if len(self._blocks) == 1:
            self._blocks.append(self._block())
        read = self._blocks[(self._now + ahead) % 2]
        return read.data_ptr(), self._blocks[(self._now + ahead + 1) % 2].data_ptr()

    def advance(self) -> None:
        """Goes on to the block that was written behind one more token."""
        self._now = 1 - self._now

    def copy(self) -> TextStates:
        """The same states, for a text that goes on by itself."""
        other = TextStates(self.model, self.dtype, self.device)
        other._blocks[0].copy_(self._blocks[self._now])
        other.begun = self.begun
        return other

    def pack(self, dtype: str) -> Tensor:
        """All parts as they are stored in a context of that dtype: uint8 [bytes] on the CPU.

        Raises InvalidArgumentError for states that are not finite in it.
        """
        stored = stored_dtype(dtype).torch_dtype
        parts = [own.to(_dtype(part, stored)) for part, own in zip(self.model.parts, self.parts, strict=True)]
        for part, own in zip(self.model.parts, parts, strict=True):
            if not bool(torch.isfinite(own).all()):
                raise InvalidArgumentError(
                    f"{part.kind} states of layers {list(part.layers)} are not finite in {own.dtype}; "
                    "store them with --dtype bfloat16 or float32"
                )
        return torch.cat([own.contiguous().view(-1).view(torch.uint8).cpu() for own in parts])

    def unpack(self, stored: Tensor, dtype: str) -> Self:
        """Takes over what `pack` made, uint8 [bytes] on any device."""
        kept, start = stored_dtype(dtype).torch_dtype, 0
        for part, own in zip(self.model.parts, self.parts, strict=True):
            count = part.nbytes(dtype)
            own.copy_(stored[start : start + count].view(_dtype(part, kept)).view_as(own))
            start += count
        self.begun = True
        return self


def state_parts(model: ModelStates, block: Tensor, dtype: torch.dtype, texts: int) -> Sequence[Tensor]:
    """The parts in a block of so many texts, uint8 [bytes]: of every part [layers, texts, *shape]."""
    parts, start = [], 0
    for part in model.parts:
        count = texts * part.nbytes(dtype_name(dtype))
        own = block[start : start + count].view(_dtype(part, dtype))
        parts.append(own.view(len(part.layers), texts, *part.shape))
        start += count
    return parts


def _dtype(part: StatePart, dtype: torch.dtype) -> torch.dtype:
    return stored_dtype(part.dtype).torch_dtype if part.dtype else dtype


def cache_layers(config: Any) -> Sequence[Any]:
    """Of transformers' own cache for a model; none for a configuration that caches know nothing about."""
    try:
        return DynamicCache(config=config).layers  # type: ignore[no-any-return]
    except Exception:
        return ()


class StateCache(Cache):  # type: ignore[misc]  # transformers has no types here
    """See the file. attending: the model's layer whose keys were given last, which attends next. begun: whether the
    texts had a token before."""

    _tell: ClassVar[Callable[[], object] | None] = None

    def __init__(self, numbers: Sequence[int]) -> None:
        """numbers: how many states of a kind each layer has, 0 without."""
        super().__init__(layers=[LinearAttentionLayer(count) if count else DummyLayer() for count in numbers])
        self.numbers = numbers
        self.attending = -1
        self.begun = False
        self._held: list[tuple[int, StatePart, Tensor]] = []
        self._texts: Sequence[TextStates] = ()
        self._parts: Sequence[Tensor] = ()

    @classmethod
    def over(cls, texts: Sequence[TextStates]) -> StateCache:
        """One that begins with copies of the texts' states. texts: of one model, all of which have begun, or none."""
        parts = [torch.stack(rows, dim=1) for rows in zip(*(text.parts for text in texts), strict=True)]
        made = cls.holding(texts[0].model, parts, texts[0].begun)
        made._texts, made._parts = texts, parts
        return made

    @classmethod
    def holding(cls, model: ModelStates, parts: Sequence[Tensor], begun: bool = True) -> StateCache:
        """One whose layers change these states: of every part [layers, B, *shape]."""
        numbers = [0] * model.layers
        for part in model.parts:
            for layer in part.layers:
                numbers[layer] = max(numbers[layer], part.number + 1)
        made = cls(numbers)
        made.begun = begun
        for part, own in zip(model.parts, parts, strict=True):
            for layer, rows in zip(part.layers, own, strict=True):
                _put(made.layers[layer], part.kind, part.number, rows, begun)
                made._held.append((layer, part, rows))
        return made

    @classmethod
    def noting(cls, config: Any) -> StateCache | None:
        """One that takes whatever a model keeps; None for a model of whose states transformers' own cache has none."""
        numbers = [
            layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0
            for layer in cache_layers(config)
        ]
        return cls(numbers) if any(numbers) else None

    @classmethod
    @contextmanager
    def telling(cls, tell: Callable[[], object]) -> Iterator[None]:
        """Calls that whenever a layer asks for a recurrent state."""
        cls._tell = tell
        try:
            yield
        finally:
            cls._tell = None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a layer, None where it has none."""
        if StateCache._tell is not None:
            StateCache._tell()
        state: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return state

    def settle(self) -> None:
        """Puts what a pass has left into the states that the cache began with, where a layer did not do so itself."""
        for layer, part, rows in self._held:
            held = _held(self.layers[layer], part.kind)[part.number]
            if held.data_ptr() != rows.data_ptr():
                rows.copy_(held)

    def commit(self) -> None:
        """Has the texts go on behind the tokens of this pass."""
        self.settle()
        for row, text in enumerate(self._texts):
            for own, rows in zip(text.parts, self._parts, strict=True):
                own.copy_(rows[:, row])
            text.begun = True

    def found(self, attending: Sequence[int]) -> ModelStates | None:
        """What a model kept of a text that it read in bfloat16; None for nothing. attending: layers that attend."""
        layers: dict[tuple[str, int, tuple[int, ...], str], list[int]] = {}
        for layer, kind, number, tensor in self._all():
            name = str(tensor.dtype).removeprefix("torch.")
            dtype = name if name in FIXED_DTYPES else ""
            layers.setdefault((kind, number, tuple(tensor.shape[1:]), dtype), []).append(layer)
        parts = [
            StatePart(kind, number, tuple(own), shape, dtype)
            for (kind, number, shape, dtype), own in layers.items()
        ]
        parts.sort(key=lambda part: (*FIXED_DTYPES, "").index(part.dtype))
        return ModelStates(len(self.layers), tuple(attending), tuple(parts)) if parts else None

    def _all(self) -> Iterator[tuple[int, str, int, Tensor]]:
        """Layer, kind, number, and the states of all texts [B, ...]."""
        for layer, own in enumerate(self.layers):
            for kind in STATE_KINDS if isinstance(own, LinearAttentionLayer) else ():
                yield from (
                    (layer, kind, n, each) for n, each in _held(own, kind).items() if each is not None
                )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, as they are."""
        self.attending = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing: positions are given, and masks are the attention function's affair."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As without a cache."""
        return query_length, 0

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """A state by the name that MiniMax has for it."""
        state: Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """See `get_linear_cache`."""
        _put(self.layers[layer_idx], "recurrent", 0, linear_cache, True)


class IndexCache(Cache):  # type: ignore[misc]  # transformers has no types here
    """Of one text: hands every layer's indexer the keys of all tokens.

    They are stored with keys and values, as if they were one KV head more, the last one: the numbers of a token's index
    key begin its row [2, d]. So whatever keeps, loads, copies or cuts rows does the same with them. width: of the last
    key that was given; 0 before any.
    """

    def __init__(
        self,
        layers: int,
        count: int = 0,
        rows: Callable[[int], Sequence[Tensor]] = lambda _: (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """count: tokens that the text has already. rows: of a layer, [H, n, 2, d] of so many of them, in order.

        dtype: in which rows are stored; new keys are rounded to it, so that it does not matter how a text is cut.
        """
        super().__init__(layers=[DummyLayer() for _ in range(layers)])
        self.width = 0
        self._count, self._rows, self._dtype = count, rows, dtype
        self._new: dict[int, Tensor] = {}

    @classmethod
    def noting(cls, config: Any) -> IndexCache | None:
        """One without tokens; None for a model for which transformers' own cache keeps no such keys."""
        layers = cache_layers(config)
        return cls(len(layers)) if any(isinstance(layer, DynamicIndexedLayer) for layer in layers) else None

    def inputs(self, tokens: int, device: torch.device | str) -> dict[str, object]:
        """What the model is called with for so many new tokens: this, and which keys their indexers may select."""
        queries = torch.arange(self._count, self._count + tokens, device=device)
        keys = torch.arange(self._count + tokens, device=device)
        return {"cache": self, "attention_mask": (keys <= queries[:, None])[None, None]}

    def update_indexer(self, keys_1TW: Tensor, layer: int, *_: object) -> Tensor:
        """Index keys of all tokens [1, N + T, W], given those of the new ones."""
        self.width = keys_1TW.shape[-1]
        new = keys_1TW if self._dtype is None else keys_1TW.to(self._dtype).to(keys_1TW.dtype)
        self._new[layer] = new
        earlier = [rows[-1].flatten(1)[:, : self.width].to(new) for rows in self._rows(layer)]
        return torch.cat([*(each[None] for each in earlier), new], dim=1)

    def join(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [1, Hq, T, d], keys and values [1, H, T, d] of new tokens, with a KV head more for their index keys.

        Its query heads are zero; a layer without an indexer has zeros there as well.
        """
        _, heads, tokens, dim = key.shape
        row = key.new_zeros(1, 1, tokens, 2 * dim)
        if layer in self._new:
            row[0, 0, :, : self.width] = self._new.pop(layer)[0]
        group = query.shape[1] // heads
        own_key, own_value = row.chunk(2, dim=-1)
        return (
            pad(query, (0, 0, 0, 0, 0, group)),
            torch.cat([key, own_key], dim=1),
            torch.cat([value, own_value], dim=1),
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, as they are."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the new ones."""
        return self._count

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The same."""
        return self._count

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys of all tokens, from the first one on."""
        return self._count + query_length, 0


def without_index_head(out: Tensor, heads: int) -> Tensor:
    """An attention output [1, T, Hq, d] of so many heads, without those that stand for index keys."""
    return out[:, :, :heads]


_running = threading.local()


@contextmanager
def passing(what: object) -> Iterator[None]:
    """Runs a model for this: the attention function asks (`passed`) where layers do not hand on what they are given."""
    before, _running.what = passed(), what
    try:
        yield
    finally:
        _running.what = before


def passed() -> Any:
    """What this thread runs a model for; None where it was not said."""
    return getattr(_running, "what", None)


def _held(layer: Any, kind: str) -> dict[int, Any]:
    held: dict[int, Any] = layer.conv_states if kind == "conv" else layer.recurrent_states
    return held


def _put(layer: Any, kind: str, number: int, rows: Tensor, begun: bool) -> None:
    """States of all texts [B, ...], as a layer that has made room for them holds them."""
    _held(layer, kind)[number] = rows
    layer.has_previous_state[number] = begun
    layer.device, layer.dtype = rows.device, rows.dtype
    if kind == "conv":
        layer.is_conv_states_initialized[number] = True
        layer.conv_kernel_size[number] = rows.shape[-1]
    else:
        layer.is_recurrent_states_initialized[number] = True
