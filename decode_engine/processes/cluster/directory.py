"""Which family a context belongs to, and the memory that it needs: asked of a replica with the caller's own token."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp

from decode_engine.rpc.routing.router import Replica

KNOWN_S = 60.0
"""Parents do not change, names seldom; what is out of date costs a request a longer way and nothing else."""
_MOST_KNOWN = 100_000
_MOST_PARENTS = 64
_ASK_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Family:
    """root: id of the context whose rows all others of the family continue. nbytes: in memory, of the context and those
    that it continues."""

    root: str
    nbytes: int = 0


class Directory:
    """Remembers families, by callers: what one may not see it does not learn. For one event loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._known: OrderedDict[tuple[str, str], tuple[float, Family]] = OrderedDict()

    async def find(self, name: str, authorization: str, replica: Replica) -> Family:
        """The family of a context; one of its own where the replica does not tell."""
        known = self._known.get((authorization, name))
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        seen, nbytes = name.removeprefix("contexts/"), 0
        family = Family(seen)
        for _ in range(_MOST_PARENTS):
            told = await self._ask(seen, authorization, replica)
            if told is None:
                return family
            nbytes += int(told.get("kv_bytes") or 0) + int(told.get("index_bytes") or 0)
            family = Family(str(told.get("id") or seen), nbytes)
            seen = str(told.get("parent") or "").removeprefix("contexts/")
            if not seen:
                break
        self._known[authorization, name] = (time.monotonic() + KNOWN_S, family)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return family

    async def _ask(self, name: str, authorization: str, replica: Replica) -> dict[str, Any] | None:
        headers = {"authorization": authorization} if authorization else {}
        url = f"{replica.http}/v1/contexts/{quote(name, safe='')}"
        try:
            async with self._session.get(
                url, headers=headers, timeout=aiohttp.ClientTimeout(total=_ASK_S)
            ) as reply:
                told = await reply.json() if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.debug("%s does not tell about a context: %s", replica.name, error)
            return None
        return told if isinstance(told, dict) else None
