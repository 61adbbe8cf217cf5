"""Who asks, and what they see of a store: the one rule of tenants, which all goes by that finds or tells of a context.

A *tenant* is whoever contexts belong to: everybody who shows one of its tokens. The tenant "" is that of a server that
tells no tenants apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from index_store.errors import InvalidArgumentError, PermissionDeniedError
from index_store.store.description.json_fields import field_error

Right = Literal["read", "create", "delete", "admin"]
RIGHTS: tuple[Right, ...] = get_args(Right)
"""read: ask, and list what is one's own. create: contexts and what leads to them. delete. admin: of all tenants."""

EVERYBODY = "*"
"""In place of a tenant: a context that all may read."""

MOST_READERS = 64
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def is_tenant(name: str) -> bool:
    """Whether a name may be a tenant's, "" aside."""
    return _TENANT.fullmatch(name) is not None


def require_tenant(name: str) -> None:
    """Raises InvalidArgumentError for what is neither a tenant's name nor ""."""
    if name and not is_tenant(name):
        raise InvalidArgumentError(
            f"the tenant is {name[:100]!r}, expected 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_', '@' and '-', "
            "beginning with a letter or digit",
            field="tenant",
        )


def check_tenant(field: str, name: str) -> None:
    """Raises ManifestError unless the field is "" or may be a tenant's name."""
    if name and not is_tenant(name):
        raise field_error(field, name, "1 to 64 letters, digits, '.', '_', '@' and '-'")


def rights_of(names: Sequence[str]) -> tuple[Right, ...]:
    """The rights of those names. Raises InvalidArgumentError for a name that is none's, and for none at all."""
    if not names or not set(names) <= set(RIGHTS):
        raise InvalidArgumentError(
            f"the rights are {', '.join(map(repr, names))[:100] or 'none'}, expected some of {', '.join(RIGHTS)}",
            field="rights",
        )
    return tuple(each for each in RIGHTS if each in names)


def check_readers(names: Sequence[str]) -> None:
    """Raises ManifestError unless the names are those of different tenants, or `EVERYBODY`."""
    if len(set(names)) != len(names) or len(names) > MOST_READERS or "" in names:
        raise field_error("readers", names, f"at most {MOST_READERS} different tenants")
    for name in names:
        if name != EVERYBODY:
            check_tenant("readers", name)


NEWCOMERS = 3


def crowds(tenant: str, has: int, left: int) -> bool:
    """Whether a tenant has so much of what all share that what is left is for others: three times as much. However many
    want all, who comes new so finds some. The tenant "" crowds nobody."""
    return bool(tenant) and has >= NEWCOMERS * left


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. name: of what was shown, a token or a certificate; "" where nobody was asked for one."""

    tenant: str = ""
    rights: frozenset[Right] = frozenset(RIGHTS)
    name: str = ""

    @property
    def admin(self) -> bool:
        """Whether what belongs to any tenant counts as its own."""
        return "admin" in self.rights

    def owns(self, tenant: str) -> bool:
        """Whether what belongs to a tenant is its own."""
        return self.admin or tenant == self.tenant

    def sees(self, tenant: str, readers: Collection[str] = ()) -> bool:
        """Whether what belongs to a tenant, and may be read by others, is there for it at all."""
        return self.owns(tenant) or EVERYBODY in readers or self.tenant in readers

    def require(self, right: Right) -> None:
        """Raises PermissionDeniedError without the right."""
        if right not in self.rights:
            had = ", ".join(each for each in RIGHTS if each in self.rights) or "none"
            raise PermissionDeniedError(
                f"this takes the right {right}, the caller has {had}; show another token", right=right
            )


OPERATOR = Caller()
"""Whoever works on the machine itself, or at a server that asks nobody who they are."""
