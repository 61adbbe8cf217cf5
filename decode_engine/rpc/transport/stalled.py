"""Clients that keep the server waiting: bounded in time and in number, and forgotten in order of age.

A call may wait for its client twice: for the message that it was opened for, and for the client to read the answer.
`Stalls` bounds both. Who is given up while a message of the server lies unread cannot be told so, because the status
stands behind that message in HTTP/2's flow control; its call stays with the transport, small but not gone, until the
client reads, resets the stream or goes away. `Abandoned` bounds how many there are, by ending connections.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_HANDLES = Path("/proc/self/fd")


class Stalls:
    """Waits for clients: at most `limit` at once, each of at most `seconds`. One too many ends the longest one."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._waits: dict[asyncio.Future[None], float] = {}  # when each ends at the latest, the oldest first
        self._timer: asyncio.TimerHandle | None = (
            None  # one for all: a message is sent more often than one is late
        )

    def __len__(self) -> int:
        return len(self._waits)

    async def wait(self, task: asyncio.Future[Any]) -> bool:
        """Whether the task was done in time. It goes on otherwise; nobody sees what it raises then."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(done: asyncio.Future[Any]) -> None:
            forget_error(done)
            if not waiter.done():
                waiter.set_result(None)

        task.add_done_callback(wake)
        self._waits[waiter] = loop.time() + self._seconds
        if len(self._waits) > self._limit:
            self._give_up(next(iter(self._waits)))
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._end_late_ones)
        try:
            await waiter
        finally:
            self._waits.pop(waiter, None)
        return task.done()

    def _give_up(self, waiter: asyncio.Future[None]) -> None:
        del self._waits[waiter]
        if not waiter.done():
            waiter.set_result(None)

    def _end_late_ones(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waits and (oldest := next(iter(self._waits.items())))[1] <= loop.time():
            self._give_up(oldest[0])
        self._timer = None
        if self._waits:
            self._timer = loop.call_at(next(iter(self._waits.values())), self._end_late_ones)


def forget_error(task: asyncio.Future[Any]) -> None:
    """Takes note of a task's error, so that asyncio does not report it as one that nobody saw."""
    if not task.cancelled():
        task.exception()


class Abandoned:
    """Calls that ended here and not yet for their clients: at most `limit`.

    One too many ends the connection that has most of them: a client, or a proxy, that keeps reading nothing.
    """

    def __init__(self, limit: int, hang_up: Callable[[str], object]) -> None:
        self._limit = limit
        self._hang_up = hang_up
        self._peers: dict[asyncio.Future[Any], str] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, peer: str, ending: asyncio.Future[Any]) -> None:
        """Takes in a call of a peer that is over when `ending` is done."""
        self._peers[ending] = peer
        ending.add_done_callback(self._remove)
        if len(self._peers) > self._limit:
            ((worst, _),) = Counter(self._peers.values()).most_common(1)
            self._peers = {task: other for task, other in self._peers.items() if other != worst}
            self._hang_up(worst)

    def _remove(self, ending: asyncio.Future[Any]) -> None:
        forget_error(ending)
        self._peers.pop(ending, None)


def hang_up(peer: str) -> bool:
    """Ends the connection of a peer, `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`. False where it is not found.

    gRPC's Python server can neither reset a stream nor close a connection. The sockets are this process's own, though,
    and shutting one down has gRPC clean up behind it. Does nothing where the system does not list a process's sockets.
    """
    wanted = _endpoint(peer)
    if wanted is None or not _HANDLES.is_dir():
        return False
    for entry in os.listdir(_HANDLES):
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            copy = os.dup(int(entry))  # names the same connection, whatever becomes of the number
        except OSError:
            continue
        with socket.socket(fileno=copy) as connection:
            try:
                host, port = connection.getpeername()[:2]
                if (_plain(host), port) == wanted:
                    connection.shutdown(socket.SHUT_RDWR)
                    return True
            except (OSError, ValueError):  # not connected, or no Internet address
                continue
    return False


def host_of(peer: str) -> str:
    """The address of a peer without its port: the same for all connections of one machine."""
    endpoint = _endpoint(peer)
    return peer if endpoint is None else endpoint[0]


def _endpoint(peer: str) -> tuple[str, int] | None:
    _, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """An address in its one spelling; an IPv4 address that came by IPv6 is the IPv4 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
