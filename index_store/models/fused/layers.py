"""Replaces what a model's layers do in many small launches by one launch each, where a trial gives the same.

On a GPU a step of a few tokens is bound by memory but for these launches, of which a norm has eight and a rotation ten;
and products of the same input with several matrices take less time as one. What a module does is found out by trying,
not by its name: its own forward and the kernel get the same made-up numbers. A module for which no kernel gives what it
gives stays as it is. Other modules, and transformers itself, are not touched.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from index_store.models.fused.joined import give_together
from index_store.models.fused.kernels_triton import MOST_CHANNELS, Gate, gated, rms_norm, rotate

logger = logging.getLogger(__name__)

_ROTATION = "apply_rotary_pos_emb"
_ROWS = 16  # that are tried
_EQUAL = 0.95
"""Share of the numbers that have the same bits, at least; others are neighbours: sums in another order round so."""

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def fuse_layers(model: nn.Module) -> dict[str, int]:
    """Replaces forwards of modules of a loaded model; returns how many, by what they are.

    Matrices that are multiplied together lie together from then on, and are views of one for whoever looks at them.
    """
    found = {"norms": 0, "gates": 0, "rotations": 0, "projections": 0}
    known: dict[Any, Any] = {}
    with torch.no_grad():
        for module in model.modules():
            for name, find in (("norms", _norm), ("gates", _gate), ("rotations", _rotation)):
                try:
                    forward = find(module, known)
                except Exception as error:  # whatever an unusual module says to made-up numbers
                    logger.info("a %s stays as it is: %s", type(module).__name__, error)
                    continue
                if forward is not None:
                    module.forward = MethodType(forward, module)
                    found[name] += 1
            found["projections"] += _join_projections(module)
    return found


def _norm(module: nn.Module, known: dict[Any, Any]) -> Callable[..., Tensor] | None:
    """The forward of a norm over the last dimension."""
    weight, eps = (
        getattr(module, "weight", None),
        getattr(module, "variance_epsilon", getattr(module, "eps", None)),
    )
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float) or not _alone(module, ("weight",)):
        return None
    if weight.dim() != 1 or len(weight) > MOST_CHANNELS or not _takes_one(module):
        return None
    key = type(module), len(weight), eps
    if key not in known:
        kernels = [
            partial(rms_norm, eps=eps, offset=o, late=late) for o, late in product((False, True), repeat=2)
        ]
        x = _numbers((_ROWS, len(weight)), weight)
        known[key] = _best(
            lambda: module.forward(x), [(each, partial(each, x, weight)) for each in kernels], weight.dtype
        )
    kernel = known[key]

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return kernel(hidden_states, self.weight)  # type: ignore[no-any-return]

    return None if kernel is None else forward


def _gate(module: nn.Module, known: dict[Any, Any]) -> Callable[..., Tensor] | None:
    """The forward of a gated layer of three products, two of which become one."""
    linears, act = _linears(module, ("gate_proj", "up_proj")), getattr(module, "act_fn", None)
    if (
        linears is None
        or linears[0].weight.shape != linears[1].weight.shape
        or act is None
        or not _takes_one(module)
    ):
        return None
    weight = linears[0].weight
    key = type(module), type(act), tuple(weight.shape)
    if key not in known:
        gate, up = (_numbers((_ROWS, len(weight)), weight, seed) for seed in (0, 1))
        both = torch.cat([gate, up], 1)
        known[key] = _best(
            lambda: act(gate) * up,
            [(partial(gated, kind=kind), partial(gated, both, kind)) for kind in Gate],
            weight.dtype,
        )
        x = _numbers((1, _ROWS, weight.shape[1]), weight)
        if known[key] is not None:
            plain = module.down_proj(known[key](torch.cat([each(x) for each in linears], -1)))  # type: ignore[operator]
            known[key] = known[key] if _close(module.forward(x), plain) else None
    return None if known[key] is None else _gated_by(known[key], _Joined(linears))


def _gated_by(kernel: Callable[[Tensor], Tensor], joined: _Joined) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(kernel(joined.product(x)))  # type: ignore[no-any-return]

    return forward


def _join_projections(module: nn.Module) -> int:
    """Has one product give queries, keys and values, where a module asks for them one after the other."""
    linears = _linears(module, ("q_proj", "k_proj", "v_proj"))
    if linears is None:
        return 0
    joined, sizes = _Joined(linears), [each.out_features for each in linears]
    give_together(linears, lambda x: torch.split(joined.product(x), sizes, -1))
    return 1


class _Joined:
    """Linear layers of the same input, whose matrices lie below each other."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        """Makes the layers' own matrices views."""
        self._linears = linears
        weights: list[Tensor] = [each.weight for each in linears]
        biases: list[Tensor] = [each.bias for each in linears if each.bias is not None]
        self._weight, self._bias = torch.cat(weights), torch.cat(biases) if biases else None
        begin = 0
        for each in linears:
            end = begin + each.out_features
            each.weight.data = self._weight[begin:end]
            if self._bias is not None:
                each.bias.data = self._bias[begin:end]
            begin = end

    def product(self, x: Tensor) -> Tensor:
        """What all layers give, one behind the other."""
        if self._linears[0].weight.data_ptr() == self._weight.data_ptr():
            return linear(x, self._weight, self._bias)
        # Somebody has given the model other weights, of another dtype or device perhaps.
        return torch.cat([linear(x, each.weight, each.bias) for each in self._linears], -1)


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear] | None:
    """Linear layers of one kind and input; None where they are not."""
    found = [getattr(module, name, None) for name in names]
    linears = [each for each in found if type(each) is nn.Linear]
    first = linears[0] if len(linears) == len(names) else None
    if first is None:
        return None
    like = (first.in_features, first.weight.dtype, first.weight.device, first.bias is None)
    alike = all(
        (each.in_features, each.weight.dtype, each.weight.device, each.bias is None) == like
        for each in linears
    )
    return linears if alike else None


def _rotation(module: nn.Module, known: dict[Any, Any]) -> Callable[..., Any] | None:
    """The module's own forward, with another function in place of the one that turns queries and keys."""
    own = inspect.unwrap(type(module).forward)
    if not isinstance(own, FunctionType) or _ROTATION not in own.__code__.co_names:
        return None
    turn, dim = own.__globals__.get(_ROTATION), getattr(module, "head_dim", None)
    key = own, dim
    if key not in known:
        weight, known[key] = next(module.parameters(), None), None
        if callable(turn) and isinstance(dim, int) and weight is not None and _turns_alike(turn, dim, weight):
            known[key] = _with_rotation(own, turn)
    return known[key]  # type: ignore[no-any-return]


def _with_rotation(own: FunctionType, turn: Callable[..., Any]) -> FunctionType:
    """A function that differs in the one that it calls by that name."""

    def rotate_or_turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or q.dim() != 4 or cos.dim() != 3:
            return turn(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin)

    names = {**own.__globals__, _ROTATION: rotate_or_turn}
    made = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def _turns_alike(turn: Callable[..., Any], dim: int, weight: Tensor) -> bool:
    """Whether the kernel does what a model's own function does, for all of a head's dimensions and for half of them."""
    q, k = (_numbers((2, 3, heads, dim), weight, heads).transpose(1, 2) for heads in (6, 2))
    alike = []
    for rotated in (dim, dim // 2):
        angles = _numbers((2, 3, rotated // 2), weight, 2).repeat(1, 1, 2)
        cos, sin = angles.cos(), angles.sin()
        try:
            own = turn(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError, IndexError):
            alike.append(rotated < dim)  # it may be one for whole heads alone, which then gets no others
            continue
        alike.append(
            all(
                _share_equal(*pair, weight.dtype) >= _EQUAL
                for pair in zip(own, rotate(q, k, cos, sin), strict=True)
            )
        )
    return all(alike)


def _best(
    own: Callable[[], Tensor], kernels: Sequence[tuple[Kernel, Callable[[], Tensor]]], dtype: torch.dtype
) -> Kernel | None:
    """The kernel whose numbers are those of a module; None where no kernel's are."""
    expected = own()
    shares = [_share_equal(expected, run(), dtype) for _, run in kernels]
    most = max(shares)
    return kernels[shares.index(most)][0] if most >= _EQUAL else None


def _share_equal(expected: Tensor, found: Tensor, dtype: torch.dtype) -> float:
    """Of numbers with the same bits, or about so in wider dtypes and near 0; 0 where one is no neighbour."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return 0.0
    wide = dtype in (torch.float32, torch.float64)
    near = 4e-6 if wide else torch.finfo(dtype).eps * 1.01
    apart, scale = (expected.double() - found.double()).abs(), expected.double().abs()
    allowed = near * (scale + (1 if wide else 0.01))
    if not bool((apart <= allowed).all()):
        return 0.0
    return float((apart <= (allowed if wide else near * 0.01)).double().mean())


def _close(expected: Tensor, found: Tensor) -> bool:
    """Behind a product, which adds up what was rounded."""
    apart = (expected.double() - found.double()).norm() / expected.double().norm()
    return bool(apart <= max(1e-5, 2 * torch.finfo(expected.dtype).eps))


def _numbers(shape: Sequence[int], like: Tensor, seed: int = 0) -> Tensor:
    """Made up, of a tensor's dtype and device, of both signs and several sizes."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(*shape, generator=generator) * 3
    return made.to(like.device, like.dtype)


def _alone(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether it has these parameters, and nothing else that changes what it gives."""
    own = [name for name, _ in module.named_parameters()]
    return own == list(names) and not [*module.children(), *module.buffers()]


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2
