"""A ZeroMQ socket on an event loop.

Its descriptor tells of changes, once for several messages, so it is read until nothing is there; sending may take
such a word away. It is no part of a socket's own events that the other side has gone: its monitor tells that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from decode_engine.errors import AddressError

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Messages that are read before others on the loop have their turn."""
_MESSAGE_BYTES = 2**26


class LoopSocket:
    """To be made and used on the loop that runs; other threads have no part in it."""

    def __init__(
        self,
        kind: zmq.SocketType,
        waiting: int,
        events: int,
        on_message: Callable[[list[bytes]], None],
        on_event: Callable[[int], None],
    ) -> None:
        """waiting: messages to one other side that may wait to be sent, 0 for any number. on_message: gets the frames
        of each. on_event: gets those of the monitor that are wanted."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.SNDHWM, waiting)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if kind == zmq.ROUTER:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # who is gone, or reads nothing, is told of
        self._monitor = self._socket.get_monitor_socket(events)
        self._on_message = on_message
        self._on_event = on_event
        self._loop.add_reader(self._socket.FD, self.read)
        self._loop.add_reader(self._monitor.FD, self._read_monitor)
        self._loop.call_soon(self._read_monitor)  # a descriptor tells nothing before it was read in vain

    def bind(self, path: Path) -> None:
        """Listens there. Raises AddressError."""
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close(0.0)
            raise AddressError(
                f"no socket can be made at {path}: {error}; set TMPDIR to another folder"
            ) from error
        self._loop.call_soon(self.read)

    def connect(self, path: Path) -> None:
        """Speaks to who listens there, and to who does later."""
        self._socket.connect(f"ipc://{path}")
        self._loop.call_soon(self.read)

    def send(self, *frames: bytes) -> None:
        """Sends or raises zmq.ZMQError: Again where too many wait, EHOSTUNREACH where nobody has that address."""
        for frame in frames[:-1]:
            self._socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
        self._socket.send(frames[-1], zmq.NOBLOCK)
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.read)

    def read(self, at_once: int = _AT_ONCE) -> None:
        """Hands on what is there."""
        for _ in range(at_once):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except Exception:
                logger.exception("a message was not understood")
        self._loop.call_soon(self.read)

    def close(self, linger_s: float) -> None:
        """What was sent may take so long to be taken in by the other side. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._loop.remove_reader(self._monitor.FD)
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(round(linger_s * 1000))
            self._context.term()

    def _read_monitor(self) -> None:
        while not self._monitor.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_event(event["event"])
