"""Just enough HTTP/2 (RFC 9113) to ask a server what it is: preface, SETTINGS, PING, GOAWAY.

gRPC itself tells UNAVAILABLE for whatever goes wrong before the first call, and has no way to send
a PING. So the doctor (`cli/doctor.py`) speaks for itself: no streams, no headers, one thread.
"""

from __future__ import annotations

import enum
import os
import re
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket

__all__ = [
    "ACK",
    "PREFACE",
    "SETTINGS_NAMES",
    "Closed",
    "Connection",
    "Frame",
    "GoneAway",
    "Kind",
    "OtherProtocol",
    "protocol_of",
]

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What each client says first (RFC 9113, 3.4)."""

ACK: Final = 0x1

_HEADER: Final = 9

_SETTING: Final = struct.Struct(">HI")

_GOAWAY: Final = struct.Struct(">II")

_PING: Final = 8

_SHOWN: Final = 40
"""Bytes of what is no HTTP/2."""

_MAX_FRAME: Final = 1 << 14
"""The longest payload we said we take, by saying nothing."""

SETTINGS_NAMES: Final = {
    1: "header_table_size",
    2: "enable_push",
    3: "max_concurrent_streams",
    4: "initial_window_size",
    5: "max_frame_size",
    6: "max_header_list_size",
}

_CODES: Final = ("NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR")
_CALM: Final = 0xB


class Kind(enum.IntEnum):
    """The types of frames that matter here."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8


class Closed(ConnectionError):
    """The peer ended the connection, in the middle of nothing."""


class GoneAway(ConnectionError):
    """The peer sent GOAWAY: it takes no more streams on this connection."""

    def __init__(self, code: int, debug: str) -> None:
        """Say which error code it gave, and what it added in words."""
        super().__init__(code, debug)
        self.code = code
        self.debug = debug

    @property
    def too_many_pings(self) -> bool:
        """Whether it says that we pinged too often (gRFC A8: ENHANCE_YOUR_CALM)."""
        return self.code == _CALM or self.debug == "too_many_pings"

    def __str__(self) -> str:
        name = "ENHANCE_YOUR_CALM" if self.code == _CALM else f"code {self.code}"
        name = _CODES[self.code] if self.code < len(_CODES) else name
        return f"GOAWAY {name}" + (f" ({self.debug!r})" if self.debug else "")


class OtherProtocol(Exception):
    """What came is no SETTINGS frame, or no frame that can be."""

    def __init__(self, first: bytes) -> None:
        """Keep what came instead."""
        super().__init__(first)
        self.first = first

    def __str__(self) -> str:
        return f"it sent what is no HTTP/2: {self.first[:_SHOWN]!r}"


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame; flags and stream are 0 unless said."""

    kind: int
    payload: bytes = b""
    flags: int = 0
    stream: int = 0

    def is_whole(self) -> bool:
        """Whether its payload has a length that its kind may have (RFC 9113, 6)."""
        size = len(self.payload)
        match self.kind:
            case Kind.SETTINGS:
                return size % _SETTING.size == 0
            case Kind.PING:
                return size == _PING
            case Kind.GOAWAY:
                return size >= _GOAWAY.size
        return True

    def encoded(self) -> bytes:
        """As it goes over the wire."""
        length = len(self.payload).to_bytes(3, "big")
        return length + struct.pack(">BBI", self.kind, self.flags, self.stream) + self.payload


@dataclass(slots=True)
class Connection:
    """Frames over a connected socket, plain or TLS. Times `until` are `time.monotonic()`."""

    sock: socket.socket
    settings: dict[str, int] = field(default_factory=dict)
    pings_seen: int = 0
    _buffer: bytearray = field(default_factory=bytearray)

    def greet(self, until: float) -> None:
        """Send the preface, take the peer's SETTINGS and acknowledge them.

        Raises:
            OtherProtocol: It answered, but not in HTTP/2.
            GoneAway: It wants no connection.
            Closed: It closed without a word.
            TimeoutError: It said nothing in time.
            OSError: The socket's own (reset, TLS alert).
        """
        self.send(Frame(Kind.SETTINGS), before=PREFACE)
        self._fill_first(until)
        first = self._buffer[3:5] in (bytes((Kind.SETTINGS, 0)), bytes((Kind.GOAWAY, 0)))
        if not first or self._buffer[5:9] != bytes(4):
            raise OtherProtocol(bytes(self._buffer))
        self.take(self._next(until))

    def ping(self, until: float) -> float:
        """Send a PING, wait for its answer; gives the seconds it took.

        Raises:
            GoneAway, OtherProtocol, Closed, TimeoutError, OSError: As they say.
        """
        payload = os.urandom(8)
        began = time.monotonic()
        self.send(Frame(Kind.PING, payload))
        while True:
            frame = self._next(until)
            took = time.monotonic() - began
            self.take(frame)
            if (frame.kind, frame.flags & ACK, frame.payload) == (Kind.PING, ACK, payload):
                return took

    def listen(self, until: float) -> None:
        """Take and answer what comes, until then.

        Raises:
            GoneAway, OtherProtocol, Closed, OSError: As they say.
        """
        while True:
            try:
                self.take(self._next(until))
            except TimeoutError:
                return

    def take(self, frame: Frame) -> None:
        """Do what the peer may expect for one of its frames.

        Raises:
            GoneAway: It is a GOAWAY.
            OtherProtocol: It has not the length that such a frame has.
        """
        answer = not frame.flags & ACK
        if not frame.is_whole():
            raise OtherProtocol(frame.encoded())
        if frame.kind == Kind.GOAWAY:
            _, code = _GOAWAY.unpack_from(frame.payload)
            raise GoneAway(code, frame.payload[_GOAWAY.size :].decode(errors="replace"))
        if frame.kind == Kind.PING and answer:
            self.pings_seen += 1
            self.send(Frame(Kind.PING, frame.payload, ACK))
        elif frame.kind == Kind.SETTINGS and answer:
            for number, value in _SETTING.iter_unpack(frame.payload):
                self.settings[SETTINGS_NAMES.get(number, str(number))] = value
            self.send(Frame(Kind.SETTINGS, b"", ACK))

    def send(self, frame: Frame, *, before: bytes = b"") -> None:
        """Send one frame."""
        self.sock.sendall(before + frame.encoded())

    def _fill_first(self, until: float) -> None:
        """Have a frame's header, or all that is to come where the peer ends before."""
        try:
            self._fill(_HEADER, until)
        except (Closed, TimeoutError):
            if not self._buffer:
                raise
            raise OtherProtocol(bytes(self._buffer)) from None

    def _next(self, until: float) -> Frame:
        self._fill(_HEADER, until)
        length = int.from_bytes(self._buffer[:3], "big")
        if length > _MAX_FRAME:
            raise OtherProtocol(bytes(self._buffer))
        self._fill(_HEADER + length, until)
        kind, flags, stream = struct.unpack(">BBI", self._buffer[3:_HEADER])
        payload = bytes(self._buffer[_HEADER : _HEADER + length])
        del self._buffer[: _HEADER + length]
        return Frame(kind, payload, flags, stream)

    def _fill(self, size: int, until: float) -> None:
        while len(self._buffer) < size:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("nothing came in time")
            self.sock.settimeout(left)
            more = self.sock.recv(_MAX_FRAME)
            if not more:
                raise Closed("the peer closed the connection")
            self._buffer += more


_GREETINGS: Final = (  # what servers that are no gRPC server say first, or to a preface
    (re.compile(rb"HTTP/1\.\d (?P<said>\d{3}[^\r\n]*)"), "HTTP/1.1"),
    (re.compile(rb"(?i)(?P<said><(!doctype )?html)"), "HTTP/1.1"),  # http.server: no status line
    (re.compile(rb"\x15\x03"), "TLS"),
    (re.compile(rb"(?P<said>SSH-[^\r\n]*)"), "SSH"),
    (re.compile(rb"(?P<said>-(ERR|NOAUTH|DENIED)[^\r\n]*)"), "Redis"),
    (re.compile(rb".{3}\x00\x0a(?P<said>[\x20-\x7e]+)\x00", re.DOTALL), "MySQL"),
    (re.compile(rb".{3}\x00\xff", re.DOTALL), "MySQL"),
    (re.compile(rb"(?P<said>220[ -][^\r\n]*)"), "SMTP or FTP"),
    (re.compile(rb"AMQP"), "AMQP (RabbitMQ)"),
    (re.compile(rb"(?P<said>RFB [^\r\n]*)"), "VNC"),
)


def protocol_of(first: bytes) -> tuple[str, str]:
    """What speaks like that: its name (empty where unknown), and what it said in words."""
    for pattern, name in _GREETINGS:
        if found := pattern.match(first):
            said = found.groupdict().get("said") or b""
            return name, said.decode(errors="replace")
    return "", repr(first[:40])[1:]
