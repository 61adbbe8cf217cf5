"""A cable between clients and a port, which can be pulled: connections are reset, or nothing gets through."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST
_PIECE = 1 << 16


class Cable:
    """Listens on a free port of this machine, `address`, and passes on to `target`, HOST:PORT, which may change."""

    def __init__(self) -> None:
        self.target = ""
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        threading.Thread(target=self._loop.run_forever, name="cable", daemon=True).start()
        server = self._do(asyncio.start_server(self._pass, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def pull(self) -> int:
        """Resets all connections; how many there were."""

        async def reset() -> int:
            # One that was pulled before may still be on its way out.
            found = [each for each in self._open if not each.transport.is_closing()]
            for each in found:
                each.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.transport.abort()
            return len(found)

        return int(self._do(reset()))

    def hold(self, seconds: float) -> int:
        """Lets nothing through for so long; how many connections there were."""

        async def wait() -> int:
            self._flows.clear()
            await asyncio.sleep(seconds)
            self._flows.set()
            return len(self._open)

        return int(self._do(wait()))

    def close(self) -> None:
        """Ends all connections."""
        self.pull()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            there_reader, there = await asyncio.open_connection(host, int(port))
        except (OSError, ValueError):
            writer.transport.abort()
            return
        both = {writer, there}
        self._open |= both
        try:
            await asyncio.gather(self._copy(reader, there), self._copy(there_reader, writer))
        finally:
            self._open -= both
            for each in both:
                each.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE):
                await self._flows.wait()
                writer.write(piece)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            return
        writer.transport.abort()
