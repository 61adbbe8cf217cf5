"""The states behind a text's last token, in layers that keep one: linear attention, Mamba, short convolutions."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.store.description.dtypes import stored_dtype
from index_store.store.description.state_parts import ModelStates, StatePart


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
