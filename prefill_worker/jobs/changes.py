"""What a job changes of a context that the store has already: indexes that it lacks, its methods, name and expiry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType

from index_store.cli.options import parse_ttl
from index_store.errors import InvalidArgumentError
from index_store.methods.method import IndexSpec
from index_store.store.catalog import utc_now
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import IndexEntry, Manifest
from prefill_worker.build.index_choice import ChosenIndexes, fitted


@dataclass(frozen=True, slots=True)
class Changes:
    """present: the context as it is. wanted: as it is to be, but for the indexes. missing: indexes to add.

    notes: what else whoever asked should know.
    """

    present: Manifest
    wanted: Manifest
    missing: tuple[IndexSpec, ...]
    notes: tuple[str, ...] = ()

    def wanted_with(self, added: Sequence[IndexEntry]) -> Manifest:
        """The context as it is to be, with the missing indexes."""
        return replace(self.wanted, indexes=(*self.present.indexes, *added))

    def told(self) -> dict[str, str]:
        """A few words on each change by what changes; nothing where the context is as wanted."""
        before, after = self.present, self.wanted
        added = {"indexes": f"added {', '.join(spec.name for spec in self.missing)}"} if self.missing else {}
        methods = {"methods": f"now {', '.join(after.methods)}"} if after.methods != before.methods else {}
        name = {"name": f"{before.name!r} is now {after.name!r}"} if after.name != before.name else {}
        labels = {"labels": f"now {', '.join(after.labels)}"} if after.labels != before.labels else {}
        if after.expires_at == before.expires_at:
            return {**added, **methods, **name, **labels}
        expiry = f"expires {_moment(after.expires_at)} instead of {_moment(before.expires_at)}"
        return {**added, **methods, **name, **labels, "ttl": expiry}


def plan_changes(
    present: Manifest,
    chosen: ChosenIndexes,
    name: str | None = None,
    ttl: str | None = None,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Changes:
    """What is to be done so that the context has these indexes, name, labels and time to live, counted from now.

    What is None stays. A method takes an index that is there as it was built. Raises InvalidArgumentError for an index
    that was asked for in another form than the context has it in, and for too many labels, and MethodUnsupportedError
    for a method that cannot work with an index as it was built.
    """
    if present.parent is not None:
        raise InvalidArgumentError(
            f"context {present.id[:12]} has the indexes of context {present.parent.id}, which it continues; add them "
            "there",
            context=present.id,
        )
    pairs = [(spec, present.index(spec.name)) for spec in chosen.specs]
    notes = [
        note
        for spec, entry in pairs
        if entry is not None
        for note in _check_suits(present, entry, spec, spec.name in chosen.shaped)
    ]
    built = {entry.name: IndexSpec(entry.name, entry.kind, entry.parameters) for entry in present.indexes}
    for method in chosen.methods:
        fitted(method, built)
    lifetime = parse_ttl(ttl)
    wanted = replace(
        present,
        name=name or present.name,
        expires_at=present.expires_at if lifetime is None else utc_now() + lifetime,
        methods=tuple(dict.fromkeys((*present.methods, *chosen.method_names))),
        labels=present.labels_with(labels),
    )
    missing = tuple(spec for spec, entry in pairs if entry is None)
    return Changes(present, wanted, missing, tuple(notes))


def _check_suits(present: Manifest, entry: IndexEntry, spec: IndexSpec, shaped: bool) -> list[str]:
    """Says how the index differs. There is one of a name: to replace it would take it from those who use it."""
    differing = [key for key in spec.parameters if entry.parameters.get(key) != spec.parameters[key]]
    found = f"context {present.id[:12]} has index {spec.name} with {_listed(entry.parameters, differing)}"
    if shaped and differing:
        raise InvalidArgumentError(
            f"{found}, asked for is {_listed(spec.parameters, differing)}; take the index as it is, make another "
            f"context of the text with --salt, or delete this one (`index-store rm {present.id}`)",
            index=spec.name,
        )
    if len(entry.layers) < present.model.layers:
        raise InvalidArgumentError(
            f"context {present.id[:12]} has index {spec.name} of layers {', '.join(map(str, entry.layers))} alone, as "
            "an older version built it; prefill the document again (`prefill-worker run`)",
            index=spec.name,
        )
    return (
        [f"{found} instead of {_listed(spec.parameters, differing)}; it is used as it is"]
        if differing
        else []
    )


def _listed(parameters: Mapping[str, Scalar], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={parameters.get(key)}" for key in keys)


def _moment(time: datetime | None) -> str:
    return "never" if time is None else f"at {time:%F %T} UTC"
