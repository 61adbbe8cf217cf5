"""A gRPC client of its own making: what it leaves undone, no library would let it leave undone."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK = 1
_END_STREAM, _END_HEADERS = 1, 4
_HEADER_TABLE, _INITIAL_WINDOW = 1, 4

GENERATE = "/sparsekv.v1.GenerationService/Generate"
CHECK = "/grpc.health.v1.Health/Check"
REFLECT = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of HTTP/2; stream 0 is the connection."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class RawConnection:
    """A connection that sends what it is told to, and reads only when asked."""

    def __init__(self, address: str, window: int | None = None) -> None:
        """window: bytes of an answer that the server may send before it is read; the protocol's 65,535 by default."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        settings = struct.pack(">HI", _HEADER_TABLE, 0)  # so that the server, too, writes headers as they are
        if window is not None:
            settings += struct.pack(">HI", _INITIAL_WINDOW, window)
        self.socket.sendall(_PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(SETTINGS, ACK, 0))
        self._next = 1
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.close()

    def call(self, method: str, message: bytes | None = None) -> int:
        """Opens a call and returns its stream; without a message it stays half open."""
        stream, self._next = self._next, self._next + 2
        out = _frame(HEADERS, _END_HEADERS, stream, _headers(method))
        if message is not None:
            out += _frame(DATA, _END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message)
        self.socket.sendall(out)
        return stream

    def ping(self, count: int = 1) -> None:
        """Sends pings, in one write: a server that hangs up after the first few must not break the others."""
        self.socket.sendall(_frame(PING, 0, 0, bytes(8)) * count)

    def frames(self, seconds: float) -> Iterator[Frame]:
        """Frames as they come, until none has for that long; a GOAWAY of stream -1 when the server hung up."""
        self.socket.settimeout(seconds)
        while True:
            while len(self._received) < 9 or len(self._received) < 9 + self._length():
                try:
                    data = self.socket.recv(2**16)
                except TimeoutError:
                    return
                except ConnectionError:
                    data = b""
                if not data:
                    yield Frame(GOAWAY, 0, -1, b"")
                    return
                self._received += data
            end = 9 + self._length()
            head, payload = self._received[:9], self._received[9:end]
            self._received = self._received[end:]
            yield Frame(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)

    def status(self, stream: int, seconds: float = 60.0) -> int | None:
        """The gRPC status that ends a call; None where it does not come, or the server hangs up."""
        for frame in self.frames(seconds):
            if frame.kind == HEADERS and frame.stream == stream and frame.flags & _END_STREAM:
                _, _, after = frame.payload.partition(b"\x0bgrpc-status")
                return int(after[1 : 1 + after[0]])
        return None

    def is_open(self, seconds: float = 0.1) -> bool:
        """Whether the server has not hung up."""
        return all(frame.stream != -1 for frame in self.frames(seconds))

    def _length(self) -> int:
        return int.from_bytes(self._received[:3], "big")


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _headers(method: str) -> bytes:
    """A gRPC call's headers, in HPACK without any table: name and value as they are."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
