"""States as models see them: the cache of a pass over new tokens of some texts.

transformers hands every layer one cache. Layers that attend give it keys and values, and get them back as they are:
those are kept elsewhere, by the attention function. Layers with a state find it there and leave the next one. They work
on copies, which go over to the texts once a pass has succeeded (`commit`): one that failed may be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DummyLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from index_store.errors import InvalidArgumentError
from index_store.store.description.context_id import FIXED_DTYPES, STATE_KINDS, ModelStates, StatePart
from index_store.store.description.dtypes import stored_dtype


class TextStates:
    """The states behind the last token of one text: of every part [layers, *shape], at addresses that stay.

    begun: whether the text has a token; what is there before means nothing.
    """

    def __init__(self, model: ModelStates, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """dtype: that the model computes in."""
        self.model = model
        self.begun = False
        self.dtype = dtype
        with torch.inference_mode(False):  # what is made here is written to in any mode
            self.parts = [
                torch.zeros(len(part.layers), *part.shape, dtype=_dtype(part, dtype), device=device)
                for part in model.parts
            ]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def copy(self) -> TextStates:
        """The same states, for a text that goes on by itself."""
        other = TextStates(self.model, self.dtype, self.parts[0].device)
        other.adopt(self)
        return other

    def adopt(self, other: TextStates) -> None:
        """Takes over the other text's states, in a copy."""
        for own, its in zip(self.parts, other.parts, strict=True):
            own.copy_(its)
        self.begun = other.begun

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


def _dtype(part: StatePart, dtype: torch.dtype) -> torch.dtype:
    return stored_dtype(part.dtype).torch_dtype if part.dtype else dtype


class StateCache(Cache):  # type: ignore[misc]  # transformers has no types here
    """See the file. attending: the model's layer whose keys were given last, which attends next."""

    def __init__(self, numbers: Sequence[int], texts: Sequence[TextStates] = ()) -> None:
        """numbers: how many states of a kind each layer has, 0 without. texts: that go on; of one model, all of which
        have begun, or none."""
        super().__init__(layers=[LinearAttentionLayer(count) if count else DummyLayer() for count in numbers])
        self.numbers = numbers
        self.attending = -1
        self._texts = texts

    @classmethod
    def over(cls, texts: Sequence[TextStates]) -> StateCache:
        """One that begins with copies of the texts' states."""
        model, begun = texts[0].model, texts[0].begun
        numbers = [0] * model.layers
        for part in model.parts:
            for layer in part.layers:
                numbers[layer] = max(numbers[layer], part.number + 1)
        made = cls(numbers, texts)
        for place, part in enumerate(model.parts):
            for row, layer in enumerate(part.layers):
                rows = torch.stack([text.parts[place][row] for text in texts])
                _put(made.layers[layer], part.kind, part.number, rows, begun)
        return made

    @classmethod
    def noting(cls, config: Any) -> StateCache | None:
        """One that takes whatever a model keeps; None for a model of whose states transformers' own cache has none."""
        try:
            layers = DynamicCache(config=config).layers
        except Exception:  # a configuration that caches know nothing about
            return None
        numbers = [
            layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0
            for layer in layers
        ]
        return cls(numbers) if any(numbers) else None

    @property
    def place(self) -> int:
        """Which of the layers that attend does so next."""
        return self._texts[0].model.attending.index(self.attending)

    def commit(self) -> None:
        """Has the texts go on behind the tokens of this pass."""
        for row, text in enumerate(self._texts):
            for part, own in zip(text.model.parts, text.parts, strict=True):
                for number, layer in enumerate(part.layers):
                    own[number].copy_(_held(self.layers[layer], part.kind)[part.number][row])
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


def attending_layer(module: nn.Module, cache: StateCache | None) -> int:
    """Which of the layers that attend a module belongs to, which calls the attention function."""
    return int(module.layer_idx) if cache is None else cache.place  # type: ignore[arg-type]


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
