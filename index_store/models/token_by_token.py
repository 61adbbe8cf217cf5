"""Layers that read a text at once, but behind a state single tokens alone, made to read pieces of a text there.

Some mixers of transformers begin anew where several tokens follow a state. Fed with one token after the other they go
on, so that what is around them still reads the tokens at once. Whether a model has such mixers shows where it is
compared with itself (`LoadedModel.verify`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from index_store.models.state_cache import StateCache


@contextmanager
def noting_readers(model: torch.nn.Module) -> Iterator[list[str]]:
    """Names of the modules that ask for recurrent states meanwhile, innermost ones, in the order of the model's."""
    running: list[str] = []
    found: dict[str, None] = {}

    def begin(name: str, *_: object) -> None:
        running.append(name)

    def end(*_: object) -> None:
        running.pop()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(begin, name)))
        handles.append(module.register_forward_hook(end, always_call=True))
    names: list[str] = []
    try:
        with StateCache.telling(lambda: found.setdefault(running[-1])):
            yield names
    finally:
        for handle in handles:
            handle.remove()
        names += found


def read_singly(model: torch.nn.Module, names: Sequence[str]) -> Callable[[], None]:
    """Has the modules of these names read single tokens where the text has begun. Returns what undoes it."""
    before = {}
    for name in names:
        module: Any = model.get_submodule(name)
        if getattr(module.forward, "func", None) is not _forward:  # else it was done before
            before[module] = module.forward
            module.forward = partial(_forward, module.forward)

    def undo() -> None:
        for module, forward in before.items():
            module.forward = forward

    return undo


def _forward(forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A mixer's own pass over the next tokens of texts [B, T, D], one after the other where these have begun."""
    cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, StateCache)), None)
    if cache is None or not cache.begun or hidden_states.shape[1] == 1:
        return forward(hidden_states, *args, **kwargs)
    found = [forward(each, *args, **kwargs) for each in torch.split(hidden_states, 1, dim=1)]
    if isinstance(found[0], tuple):
        return (torch.cat([each[0] for each in found], dim=1), *found[-1][1:])
    return torch.cat(found, dim=1)
