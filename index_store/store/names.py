"""What contexts are called: a name belongs to one living context of a model, and moves to another one in one step.

Stores of before may have several of one name; such a name finds none of them until it is given to one (`take_name`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from index_store.errors import NameTakenError
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from index_store.store.files.locks import locked_file

MOST_NAME_CHARACTERS = 500
_DIGITS = 6


def require_free(store: Store, name: str, model: str, own: str | Callable[[Manifest], bool]) -> None:
    """Raises NameTakenError where another living context of the model has the name.

    own: the id of the context that is to have it, or what tells whether a context may be that one.
    """
    for other in _holders(store, name, model, own if isinstance(own, str) else ""):
        if not isinstance(own, str) and own(other):
            continue
        raise NameTakenError(
            f"the name {name[:100]!r} belongs to context {other.id[:12]}, made at {other.created_at:%F %T} UTC; choose "
            "another one, or say that it moves (--move-name; move_name in requests): that context keeps its id",
            name=name,
            context=other.id,
        )


def free_name(store: Store, name: str, model: str, id_: str) -> str:
    """The name, with digits of the context's id where another living context of the model has it."""
    return told_apart(name, id_) if _holders(store, name, model, id_) else name


def take_name(store: Store, id_: str, name: str) -> Manifest:
    """Gives the name to a context, and one with digits of their ids to those of its model that have it. Returns it.

    Whoever looks for the name meanwhile waits. Raises what `Store.update` raises.
    """
    with locked_file(store.folders.names_lock_path()):
        present = store.manifest(id_)
        if present.name != name:
            present = store.update(id_, partial(replace, name=name))
        for other in _holders(store, name, present.model.fingerprint, id_):
            store.update(other.id, partial(replace, name=told_apart(name, other.id)))
    return present


def told_apart(name: str, id_: str) -> str:
    """The name with digits of an id, within the bounds of names."""
    return f"{name[: MOST_NAME_CHARACTERS - _DIGITS - 1]} {id_[:_DIGITS]}"


def _holders(store: Store, name: str, model: str, id_: str) -> Sequence[Manifest]:
    return [
        manifest
        for manifest in store.list()
        if manifest.name == name
        and manifest.id != id_
        and manifest.model.fingerprint == model
        and not store.expired(manifest)
    ]
