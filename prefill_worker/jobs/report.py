"""What a job ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from index_store.store.description.manifest import Manifest
from prefill_worker.build.kv_placement import UsedMemory


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """`created` is False when the store had the context already; `seconds` then are those of what was added.

    changed: of a context that was there, a few words on each of "indexes", "methods", "name", "ttl" that was changed.
    memory: what reading took; None where nothing was read.
    """

    manifest: Manifest
    created: bool
    seconds: Mapping[str, float]
    changed: Mapping[str, str] = field(default_factory=dict)
    memory: UsedMemory | None = None
