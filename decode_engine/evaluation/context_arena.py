"""Memory for commands that use one context at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from index_store.memory.arena import Arena
from index_store.memory.context_loading import choose_placement, placed_bytes
from index_store.memory.devices import context_device, default_budget
from index_store.memory.placement import MemoryBytes, Placement, parse_placement
from index_store.store.description.manifest import Manifest


def arena_for(manifests: Iterable[Manifest], device: torch.device, placement: str) -> Arena:
    """An arena in which each of the contexts has room, one at a time, for a model on this device.

    placement: a name of `Placement`, or `auto`: on a GPU all of each context that fits into the memory which is for
    contexts by default, otherwise as `choose_placement` says. Raises InvalidArgumentError for another one, and for one
    that needs a GPU where there is none.
    """
    wanted, where = parse_placement(placement), context_device(device)
    listed = list(manifests)
    room = default_budget(device) if where is not None and wanted is None else None
    needed = []
    for manifest in listed:
        chosen = wanted or Placement.DEVICE
        if where is not None and room is not None:
            chosen = choose_placement(manifest, where, room)[0]
        needed.append(placed_bytes(manifest, where, chosen))
    budget = MemoryBytes(max(each.host for each in needed), max(each.device for each in needed))
    if room is not None:
        budget = MemoryBytes(budget.host, max(budget.device, room))
    return Arena(budget, device=where, placement=wanted)
