"""Keys and values of different width: the narrower ones are filled up with zeros, which changes no result."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


def widen(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [..., d] and values [..., e], all of them max(d, e) wide."""
    missing = value.shape[-1] - key.shape[-1]
    if missing > 0:
        return pad(query, (0, missing)), pad(key, (0, missing)), value
    return query, key, pad(value, (0, -missing)) if missing < 0 else value


def narrow(out: Tensor, width: int) -> Tensor:
    """An attention output [..., d] without what values were filled up with: [..., width]."""
    return out if out.shape[-1] == width else out[..., :width]
